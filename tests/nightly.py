"""How much more is tried at night."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from datetime import date
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")

FACTOR = int(os.environ.get("CNR_NIGHTLY_FACTOR", "1"))
"""``make nightly`` sets it: so many times the usual histories."""


NIGHT = FACTOR > 1

TODAY = int(os.environ.setdefault("CNR_DAY", str(date.today().toordinal())))
"""Chooses what a sweep tries by day: all processes of a run choose alike, and one of another day can be run again."""


def histories(usual: int) -> int:
    """How many histories a test draws: by day a third of what is usual, but two, since the first is the shortest."""
    return usual * FACTOR if NIGHT else max(2, -(-usual // 3))


def at_night(*values: Any) -> Any:
    """The parameters of a case that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def by_day(cases: Iterable[tuple[Any, ...]], but: Container[tuple[Any, ...]]) -> list[Any]:
    """Cases, some of which only `make nightly` runs."""
    return [at_night(*case) if case in but else case for case in cases]


def sample(whole: Iterable[Item], usual: int) -> list[Item]:
    """So many, evenly spread from the first to the last; at night all of them."""
    found = list(whole)
    if NIGHT or len(found) <= usual:
        return found
    return [found[number * (len(found) - 1) // max(usual - 1, 1)] for number in range(usual)]


def of_today(whole: Iterable[Item], usual: int) -> list[Item]:
    """So many, evenly spread, and on each day others; at night all of them."""
    found = list(whole)
    if NIGHT or len(found) <= usual:
        return found
    return [found[(number * len(found) // usual + TODAY) % len(found)] for number in range(usual)]
