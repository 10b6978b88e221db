"""When to write everything and when only what changed (standard library only; the paper's section on policies).

A policy sees the bytes of the versions since the last full one and decides about the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cnr_store.errors import OptionError

PolicyName = Literal["full", "one-shot", "consecutive", "intermittent"]
Since = Literal["baseline", "previous"]
POLICIES: tuple[PolicyName, ...] = ("full", "one-shot", "consecutive", "intermittent")


@dataclass(frozen=True)
class Decision:
    """What the next version is to be.

    Attributes
    ----------
    full
        Whether every table is written whole.
    since
        What a delta covers: the rows changed since the last ``baseline``, or since the ``previous`` version.
    policy, sizes_bytes
        The policy's name and the sizes it saw: the last full version's, then those of the deltas after it.
    reason
        For the commit record and for people.
    """

    full: bool
    since: Since
    policy: str
    sizes_bytes: tuple[int, ...]
    reason: str


def check_policy(name: str) -> PolicyName:
    """The policy of that name.

    Raises
    ------
    OptionError
        For any other name, listing those there are.
    """
    for known in POLICIES:
        if name == known:
            return known
    raise OptionError(f"policy {name!r} is not one of {', '.join(POLICIES)}")


def decide(policy: PolicyName, sizes_bytes: Sequence[int], *, full: bool = False) -> Decision:
    """Decide about the next version.

    Parameters
    ----------
    policy
        Its name.
    sizes_bytes
        Bytes of the last full version, then of each delta since; empty where there is none to build on.
    full
        The caller asks for a full one.
    """
    sizes = tuple(sizes_bytes)
    since: Since = "previous" if policy == "consecutive" else "baseline"

    def decision(is_full: bool, reason: str) -> Decision:
        return Decision(is_full, since, policy, sizes, reason)

    if full:
        return decision(True, "asked for")
    if not sizes:
        return decision(True, "nothing to build on")
    if policy == "full":
        return decision(True, "every version is full")
    if policy == "intermittent" and len(sizes) > 1:
        if full_is_due(sizes):
            return decision(True, "a full version now costs no more than going on")
        return decision(False, "going on costs less than a full version")
    return decision(False, f"changed since the {since}")


def full_is_due(sizes_bytes: Sequence[int]) -> bool:
    """The paper's predictor for intermittent differentials.

    With sizes as shares of the full version, S_1 ... S_i of the differentials so far: a full version now will
    cost, over the next i + 1 intervals, what the last ones did, F = 1 + S_1 + ... + S_i; going on will cost at
    least I = (i + 1) * S_i. Full is due iff F <= I. (The common divisor is left out.)
    """
    differentials = sizes_bytes[1:]
    return sum(sizes_bytes) <= (len(differentials) + 1) * differentials[-1]
