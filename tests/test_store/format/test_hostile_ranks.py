"""Versions that claim to be saved by many ranks, or for column shards: read exactly, or refused.

Every digest in these stores matches but those that a test is about.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cnr_store.format import layout
from cnr_store.format.state import dumps
from tests.test_store.support.tampering import (
    ABSENT,
    DENSE,
    HUGE,
    SLOT,
    WEIGHT,
    Forgery,
    put,
    read_all,
    refused,
    spoiled_generators,
)

Json = Any
Forge = Callable[[], "Shared"]
DIGEST = "0" * 64


class Shared(Forgery):
    """The documents of a version of two ranks: the second has no array beside the state."""

    def __init__(self, base: Path, folder: Path) -> None:
        super().__init__(base, folder)
        self.cnr["requires"].append(layout.STATE_PARTS)
        self.own = {name: self.state[name] for name in ("reader", "rng")}
        self.state |= dict.fromkeys(self.own)
        self.parts: list[Json] = [self.own, self.own | {"reader": 1}]

    def sign_parts(self) -> None:
        """Put the parts, and their digests into the state."""
        self.state["ranks"] = []
        (self.version / "state/ranks").mkdir(exist_ok=True)
        for rank, part in enumerate(self.parts):
            data = dumps(part)
            (self.version / layout.state_part(rank)).write_bytes(data)
            self.state["ranks"].append(hashlib.sha256(data).hexdigest())


@pytest.fixture
def forge(base: Path, tmp_path: Path) -> Forge:
    numbers = itertools.count()
    return lambda: Shared(base, tmp_path / str(next(numbers)))


def test_parts_that_are_what_ranks_write(forge: Forge, exact: dict[str, Json]) -> None:
    forgery = forge()
    forgery.sign_parts()
    forgery.sign()
    assert read_all(forgery.url) == exact


@pytest.mark.slow
def test_lists_of_parts(forge: Forge, exact: dict[str, Json]) -> None:
    wrong: list[Json] = [
        *(ABSENT, None, {}, "x", 5, [], [5, 5], ["x", "x"], [DIGEST[1:]] * 2, [DIGEST + "0"] * 2),
        *(["g" * 64] * 2, [DIGEST.replace("0", "A")] * 2, [HUGE] * 2, [None] * 2, [[DIGEST]] * 2),
        *([DIGEST] * 2, [DIGEST] * (layout.MAX_RANKS + 1), {"0": DIGEST, "1": DIGEST}),
    ]
    for value in wrong:
        forgery = forge()
        forgery.sign_parts()
        put(forgery.state, "ranks", value)
        refused(forgery, exact, f"{value!r:.80}")


@pytest.mark.slow
def test_lists_that_fit_other_parts(forge: Forge, exact: dict[str, Json]) -> None:
    changes: list[Callable[[list[str]], object]] = [
        list[str].reverse,
        lambda ranks: ranks.append(ranks[0]),
        lambda ranks: ranks.__setitem__(1, ranks[1].upper()),
    ]
    for number, change in enumerate(changes):
        forgery = forge()
        forgery.sign_parts()
        change(forgery.state["ranks"])
        refused(forgery, exact, number)


def test_parts_without_their_feature_or_the_feature_without_parts(
    forge: Forge, exact: dict[str, Json]
) -> None:
    forgery = forge()
    forgery.sign_parts()
    forgery.cnr["requires"].remove(layout.STATE_PARTS)
    assert "does not require state-parts" in str(refused(forgery, exact)["load"])
    assert "requires state-parts" in str(refused(forge(), exact)["load"])


@pytest.mark.slow
def test_parts(forge: Forge, exact: dict[str, Json]) -> None:
    array = {"$array": {"kind": "torch", "path": DENSE}}
    values: list[Json] = [None, [], 5, "x", {}, {"reader": 1}, {"rng": None}]
    generators: list[Json] = [5, "x", [], {}, {"torch": None}]
    own = forge().own
    wrong: list[Json] = [
        *values,
        *(own | {"rng": value} for value in generators),
        *(own | {"reader": value} for value in ({"$x": 1}, array, {"$tuple": 5})),
        own,  # it refers to the arrays of the first rank
    ]
    for number, part in enumerate(wrong):
        forgery = forge()
        forgery.parts[1] = part
        forgery.sign_parts()
        refused(forgery, exact, number, ["load", "verify"])


@pytest.mark.slow
def test_generators_of_a_rank_that_stand_outside_their_memory(forge: Forge, exact: dict[str, Json]) -> None:
    drawn = random.getstate()
    for name, rng in spoiled_generators(forge().own["rng"]):
        forgery = forge()
        forgery.parts[1]["rng"] = rng
        forgery.sign_parts()
        assert "malformed" in str(refused(forgery, exact, name, ["load"])["load"]), name
    assert random.getstate() == drawn


@pytest.mark.slow
def test_boundaries_of_columns(forge: Forge, exact: dict[str, Json]) -> None:
    def bounded(path: str, boundaries: Json) -> Forgery:
        forgery = forge()
        forgery.sign_parts()
        forgery.cnr["requires"].append(layout.COLUMN_BOUNDARIES)
        forgery.entry(path)["boundaries"] = boundaries
        return forgery

    edges = list(range(17))
    forgery = bounded(SLOT, edges)
    forgery.sign()
    assert read_all(forgery.url) == exact
    wrong: list[Json] = [
        *(None, {}, "x", 5, [5], [0, 16], edges[:-1], [*edges, 17], [*edges[:-1], 17], [*edges[:-1], 15]),
        *([1, *edges[1:]], [0, *edges[:-1]], edges[::-1], [0.0, *edges[1:]], [False, *edges[1:]]),
        *([*edges[:-1], HUGE], [-1, *edges[1:]], [str(edge) for edge in edges], [[edge] for edge in edges]),
    ]
    for value in wrong:
        refused(bounded(SLOT, value), exact, value)
    refused(bounded(WEIGHT, edges), exact, "a table's own")
