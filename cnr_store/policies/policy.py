"""When to write everything and when only what changed (standard library only; the paper's section on policies).

A policy sees the bytes of the versions since the last full one and decides about the next. ``auto`` also weighs
what it may write next by cost (docs/design-notes/policies.md has the model and its proof).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cnr_store.errors import OptionError
from cnr_store.policies.checks import number

PolicyName = Literal["full", "one-shot", "consecutive", "intermittent", "auto"]
Since = Literal["baseline", "previous"]
POLICIES: tuple[PolicyName, ...] = ("full", "one-shot", "consecutive", "intermittent", "auto")
_HORIZON_SAVES = 64


@dataclass(frozen=True)
class Offer:
    """Bytes that the next version is expected to take, by which rows it holds.

    Attributes
    ----------
    baseline_bytes
        With the rows changed since the last full version.
    previous_bytes
        With the rows changed since the previous version. Never more than `baseline_bytes`.
    """

    baseline_bytes: int
    previous_bytes: int


class Delta(NamedTuple):
    """A delta that was written: what it covers, and what ``intermittent`` would have written in its place."""

    since: Since
    intermittent_bytes: int


@dataclass(frozen=True)
class Costs:
    """What ``auto`` weighs beside the bytes written.

    Attributes
    ----------
    keep_last
        Versions that retention keeps, with all that they depend on; None keeps everything.
    restores_per_save
        Restores expected between two saves: what a byte read by a restore counts beside a byte written.
    longest_chain
        Versions that a restore may have to read.

    Raises
    ------
    OptionError
        A number out of range.
    """

    keep_last: int | None = None
    restores_per_save: float = 0.1
    longest_chain: int = 32

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise OptionError(f"keep_last={self.keep_last!r}: give an integer of at least 1, or None for all")
        object.__setattr__(self, "restores_per_save", number("restores_per_save", self.restores_per_save))
        if type(self.longest_chain) is not int or self.longest_chain < 2:
            raise OptionError(f"longest_chain={self.longest_chain!r}: give an integer of at least 2")


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
    deltas, offer, costs
        What ``auto`` saw beside the sizes: those deltas, the sizes it could choose from, and its weights.
    bits
        The width that ``bits="auto"`` stands for in this version, and why; None where no table's width is ``"auto"``.
    """

    full: bool
    since: Since
    policy: str
    sizes_bytes: tuple[int, ...]
    reason: str
    deltas: tuple[Delta, ...] = ()
    offer: Offer | None = None
    costs: Costs | None = None
    bits: tuple[int, str] | None = None


def check_policy(name: str) -> PolicyName:
    """The policy of that name.

    Raises
    ------
    OptionError
        There is none of that name. The message lists all.
    """
    for known in POLICIES:
        if name == known:
            return known
    raise OptionError(f"policy {name!r} is not one of {', '.join(POLICIES)}")


def decide(
    policy: PolicyName,
    sizes_bytes: Sequence[int],
    *,
    full: bool = False,
    deltas: Sequence[Delta] = (),
    offer: Offer | None = None,
    costs: Costs | None = None,
) -> Decision:
    """Decide about the next version.

    Parameters
    ----------
    policy
        Its name.
    sizes_bytes
        Bytes of the last full version, then of each delta since. Empty where there is none to build on.
    full
        The caller asks for a full version.
    deltas, offer, costs
        For ``auto``: the deltas in `sizes_bytes` (as `deltas_after` gives them), what it may choose from, and its
        weights. Without an offer it decides as ``intermittent`` does.
    """
    sizes = tuple(sizes_bytes)
    since: Since = "previous" if policy == "consecutive" else "baseline"
    if full:
        is_full, reason = True, "asked for"
    elif not sizes:
        is_full, reason = True, "nothing to build on"
    elif policy == "full":
        is_full, reason = True, "every version is full"
    elif policy == "auto":
        known = tuple(deltas)[: len(sizes) - 1]
        known += tuple(Delta("baseline", size) for size in sizes[1 + len(known) :])
        is_full, since, reason = _weigh(_Epoch(sizes, known), offer, costs or Costs())
        return Decision(is_full, since, policy, sizes, reason, known, offer, costs)
    elif policy == "intermittent":
        is_full, reason = _predict(sizes)
    else:
        is_full, reason = False, f"changed since the {since}"
    return Decision(is_full, since, policy, sizes, reason)


def _predict(sizes: Sequence[int]) -> tuple[bool, str]:
    if full_is_due(sizes):
        return True, "a full version now costs no more than going on"
    if len(sizes) == 1:
        return False, "changed since the baseline"
    return False, "going on costs less than a full version"


def full_is_due(sizes_bytes: Sequence[int]) -> bool:
    """The paper's predictor for intermittent differentials.

    With sizes as shares of the full version, S_1 ... S_i of the differentials so far: a full version now will
    cost, over the next i + 1 intervals, what the last ones did, F = 1 + S_1 + ... + S_i; going on will cost at
    least I = (i + 1) * S_i. Full is due iff F <= I. (The common divisor is left out.) Never without differentials.
    """
    differentials = sizes_bytes[1:]
    return bool(differentials) and sum(sizes_bytes) <= (len(differentials) + 1) * differentials[-1]


def deltas_after(policy: Mapping[str, Any], nbytes: int) -> tuple[Delta, ...]:
    """The deltas that ``auto`` sees after a version that is a delta itself.

    Parameters
    ----------
    policy
        The policy in that version's commit record: the fields of a `Decision`, by whatever policy.
    nbytes
        Bytes of that version.
    """
    since: Since = "previous" if policy.get("since") == "previous" else "baseline"
    # A run under another policy recorded no deltas, only sizes: each counts as one of that policy's kind.
    past = tuple(Delta(*delta) for delta in policy.get("deltas", ()))
    past += tuple(Delta(since, size) for size in policy.get("sizes_bytes", ())[1 + len(past) :])
    offer = policy.get("offer")
    saved = offer["baseline_bytes"] - offer["previous_bytes"] if offer and since == "previous" else 0
    return (*past, Delta(since, nbytes + max(saved, 0)))


@dataclass(frozen=True)
class _Epoch:
    """The last full version and the deltas since, with what ``intermittent`` would have written for each.

    Attributes
    ----------
    sizes
        Bytes of the full version, then of each delta.
    deltas
        What these cover.
    """

    sizes: tuple[int, ...]
    deltas: tuple[Delta, ...]

    def with_delta(self, since: Since, nbytes: int, intermittent_bytes: int) -> _Epoch:
        return _Epoch((*self.sizes, nbytes), (*self.deltas, Delta(since, intermittent_bytes)))

    def as_intermittent(self) -> _Epoch:
        """The same versions, each as ``intermittent`` would have written it."""
        sizes = (self.sizes[0], *(delta.intermittent_bytes for delta in self.deltas))
        return _Epoch(sizes, tuple(Delta("baseline", size) for size in sizes[1:]))

    def beneath(self) -> list[int]:
        """For each delta, the bytes of the other deltas that reading it takes."""
        beneath: list[int] = []
        for position, delta in enumerate(self.deltas):
            chained = delta.since == "previous" and position > 0
            beneath.append(beneath[-1] + self.sizes[position] if chained else 0)
        return beneath

    def links(self) -> int:
        """Versions that reading the newest takes."""
        chained = 0
        for delta in reversed(self.deltas):
            chained += 1
            if delta.since == "baseline":
                break
        return 1 + chained

    def paid(self, keep_last: int | None) -> list[int]:
        """Bytes written plus bytes kept, if retention kept the last 1, 2, ... versions with all they depend on."""
        everything = sum(self.sizes)
        if keep_last is None:
            return [2 * everything]
        beneath, kept, paid = self.beneath(), self.sizes[0], []
        for position in range(len(self.deltas) - 1, -1, -1):
            kept += self.sizes[1 + position]
            paid.append(everything + kept + beneath[position])
        return [*paid, 2 * everything][:keep_last]


def _weigh(epoch: _Epoch, offer: Offer | None, costs: Costs) -> tuple[bool, Since, str]:
    """What ``auto`` does: the cheaper delta of those with which it never costs more than ``intermittent``.

    It writes a full version whenever ``intermittent`` would, so that the deltas of both depend on the same ones.
    """
    is_full, reason = _predict(epoch.as_intermittent().sizes)
    if is_full or offer is None:
        return is_full, "baseline", reason
    dear, cheap = offer.baseline_bytes, min(offer.previous_bytes, offer.baseline_bytes)
    long, short = epoch.with_delta("previous", cheap, dear), epoch.with_delta("baseline", dear, dear)
    if cheap == dear:
        return False, "baseline", "nothing else changed since the baseline"
    if long.links() > costs.longest_chain:
        return False, "baseline", f"a chain may have {costs.longest_chain} versions"
    allowed = long.as_intermittent().paid(costs.keep_last)
    if any(ours > theirs for ours, theirs in zip(long.paid(costs.keep_last), allowed, strict=True)):
        return False, "baseline", "a longer chain would keep more than intermittent does"
    reads = costs.restores_per_save * _saves_to_come(short.as_intermittent().sizes)
    longer, shorter = (
        one.paid(costs.keep_last)[-1] + reads * (one.sizes[0] + one.sizes[-1] + one.beneath()[-1])
        for one in (long, short)
    )
    if longer < shorter:
        return False, "previous", f"costs {longer:.0f}, since the baseline {shorter:.0f}"
    return False, "baseline", f"costs {shorter:.0f}, since the previous {longer:.0f}"


def _saves_to_come(sizes: tuple[int, ...]) -> int:
    """Saves until a full one is due, if deltas go on growing as they did. At most `_HORIZON_SAVES`."""
    # By a straight line through the first and the last delta.
    growth = (sizes[-1] - sizes[1]) / (len(sizes) - 2) if len(sizes) > 2 else 0.0
    total, last, count = float(sum(sizes)), float(sizes[-1]), len(sizes)
    for save in range(1, _HORIZON_SAVES):
        if total <= count * last:
            return save
        total, last, count = total + last + growth, last + growth, count + 1
    return _HORIZON_SAVES
