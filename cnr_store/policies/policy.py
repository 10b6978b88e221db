"""When to write everything and when only what changed (the paper's section on policies).

A policy sees sums over the versions since the last full one and decides about the next. ``auto`` also weighs
what it may write next by cost (docs/design-notes/policies.md has the model and its proof).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cnr_store.errors import OptionError
from cnr_store.policies.checks import Natural, integer, number
from cnr_store.policies.past import Delta, Past, Since, Sums

PolicyName = Literal["full", "one-shot", "consecutive", "intermittent", "auto"]
POLICIES: tuple[PolicyName, ...] = ("full", "one-shot", "consecutive", "intermittent", "auto")
MAX_CHAIN = 64
"""Versions that reading one may take before it is folded, unless a caller says otherwise."""

_HORIZON_SAVES = 64


@dataclass(frozen=True)
class Offer:
    """Bytes that the next version is expected to take, by which rows it holds."""

    baseline_bytes: Natural  # with the rows changed since the last full version
    previous_bytes: (
        Natural  # with the rows changed since the previous version. Never more than `baseline_bytes`.
    )


@dataclass(frozen=True)
class Costs:
    """What ``auto`` weighs beside the bytes written."""

    # Versions that retention keeps, with all that they depend on; None keeps everything
    keep_last: int | None = None
    # Restores expected between two saves: what a byte read by a restore counts beside a byte written
    restores_per_save: float = 0.1
    longest_chain: int = 32  # versions that a restore may have to read

    def __post_init__(self) -> None:
        if self.keep_last is not None:
            integer("keep_last", self.keep_last, minimum=1)
        object.__setattr__(self, "restores_per_save", number("restores_per_save", self.restores_per_save))
        integer("longest_chain", self.longest_chain, minimum=2)

    def limited(self, max_chain: int | None) -> Costs:
        """These costs where a chain of more versions than `max_chain` is folded.

        A fold takes what a full version does, so never less than the delta since the baseline that does without.
        """
        return (
            self
            if max_chain is None
            else replace(self, longest_chain=max(2, min(self.longest_chain, max_chain)))
        )


@dataclass(frozen=True)
class Decision:
    """What the next version is to be."""

    full: bool  # whether every table is written whole
    # What a delta covers: the rows changed since the last ``baseline``, or since the ``previous`` version
    since: Since
    # policy, past: the policy's name, and what it saw of the versions since the last full one; None where there is none
    policy: str
    past: Past | None
    reason: str  # for the commit record and for people
    # offer, costs: what ``auto`` saw beside: the sizes it could choose from, and its weights
    offer: Offer | None = None
    costs: Costs | None = None
    # The width that ``bits="auto"`` stands for in this version, and why; None where no table's width is ``"auto"``
    bits: tuple[int, str] | None = None


def check_policy(name: str) -> PolicyName:
    """The policy of that name."""
    for known in POLICIES:
        if name == known:
            return known
    raise OptionError(f"policy {name!r} is not one of {', '.join(POLICIES)}")


def decide(
    policy: PolicyName,
    past: Past | None,
    full: bool = False,
    offer: Offer | None = None,
    costs: Costs | None = None,
    is_relative: bool = False,
) -> Decision:
    """Decide about the next version.

    `policy`: its name.
    `past`: the last full version and the deltas since. None where there is none to build on.
    `full`: the caller asks for a full version.
    `offer`, `costs`: for ``auto``: what it may choose from, and its weights. Without an offer it decides as
    ``intermittent`` does.
    `is_relative`: for ``auto``: whether rows are stored relative to those of the previous version.
    """
    since: Since = "previous" if policy == "consecutive" else "baseline"
    if full:
        is_full, reason = True, "asked for"
    elif past is None:
        is_full, reason = True, "nothing to build on"
    elif policy == "full":
        is_full, reason = True, "every version is full"
    elif policy == "auto":
        is_full, since, reason = _weigh(past, offer, costs or Costs(), is_relative)
        return Decision(is_full, since, policy, past, reason, offer, costs)
    elif policy == "intermittent":
        is_full, reason = _predict(past.written)
    else:
        is_full, reason = False, f"changed since the {since}"
    return Decision(is_full, since, policy, past, reason)


def _predict(sums: Sums) -> tuple[bool, str]:
    if full_is_due(sums):
        return True, "a full version now costs no more than going on"
    if not sums.deltas:
        return False, "changed since the baseline"
    return False, "going on costs less than a full version"


def full_is_due(sums: Sums) -> bool:
    """The paper's predictor for intermittent differentials.

    With sizes as shares of the full version, S_1 ... S_i of the differentials so far: a full version now will
    cost, over the next i + 1 intervals, what the last ones did, F = 1 + S_1 + ... + S_i; going on will cost at
    least I = (i + 1) * S_i. Full is due iff F <= I. (The common divisor is left out.) Never without differentials.
    """
    return sums.deltas > 0 and sums.total_bytes <= (sums.deltas + 1) * sums.last_bytes


def _weigh(past: Past, offer: Offer | None, costs: Costs, is_relative: bool) -> tuple[bool, Since, str]:
    """What ``auto`` does: the cheaper delta of those with which it never costs more than ``intermittent``.

    It writes a full version whenever ``intermittent`` would, so that the deltas of both depend on the same ones.
    Relative rows always go on from the previous version: what was known of the baseline's was overwritten, and a delta
    since the baseline would hold none.
    """
    is_full, reason = _predict(past.intermittent)
    if is_full or offer is None:
        return is_full, "baseline", reason
    dear, cheap = offer.baseline_bytes, min(offer.previous_bytes, offer.baseline_bytes)
    long, short = (
        past.with_delta(cheap, Delta("previous", dear)),
        past.with_delta(dear, Delta("baseline", dear)),
    )
    if cheap == dear:
        return False, "baseline", "nothing else changed since the baseline"
    if long.links > costs.longest_chain:
        return False, "baseline", f"a chain may have {costs.longest_chain} versions"
    if is_relative:
        return False, "previous", "its rows are relative to the previous version"
    if long.max_excess_bytes(costs.keep_last) > 0:
        return False, "baseline", "a longer chain would keep more than intermittent does"
    reads = costs.restores_per_save * _saves_to_come(short.intermittent)
    longer, shorter = (_cost(one, costs.keep_last, reads) for one in (long, short))
    if longer < shorter:
        return False, "previous", f"costs {longer:.0f}, since the baseline {shorter:.0f}"
    return False, "baseline", f"costs {shorter:.0f}, since the previous {longer:.0f}"


def _cost(past: Past, keep_last: int | None, reads: float) -> float:
    """Bytes written for the newest version, kept for it and read with it; what earlier versions cost is left out."""
    nbytes = past.written.last_bytes
    # Where more versions are kept, they keep its chain anyway.
    kept = nbytes + past.beneath_bytes if keep_last == 1 else nbytes
    return nbytes + kept + reads * (past.written.full_bytes + nbytes + past.beneath_bytes)


def _saves_to_come(sums: Sums) -> int:
    """Saves until a full one is due, if deltas go on growing as they did. At most `_HORIZON_SAVES`."""
    # By a straight line through the first and the last delta.
    growth = (sums.last_bytes - sums.first_bytes) / (sums.deltas - 1) if sums.deltas > 1 else 0.0
    total, last, count = float(sums.total_bytes), float(sums.last_bytes), sums.deltas + 1
    for save in range(1, _HORIZON_SAVES):
        if total <= count * last:
            return save
        total, last, count = total + last + growth, last + growth, count + 1
    return _HORIZON_SAVES
