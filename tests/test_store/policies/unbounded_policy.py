"""The policy ``auto`` with every size at hand, as its proof has it: what `cnr_store.policies` must decide from sums."""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store.policies.past import Delta, Since
from cnr_store.policies.policy import Costs, Offer

_HORIZON_SAVES = 64


@dataclass(frozen=True)
class Epoch:
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

    def with_delta(self, since: Since, nbytes: int, intermittent_bytes: int) -> Epoch:
        return Epoch((*self.sizes, nbytes), (*self.deltas, Delta(since, intermittent_bytes)))

    def as_intermittent(self) -> Epoch:
        """The same versions, each as ``intermittent`` would have written it."""
        sizes = (self.sizes[0], *(delta.intermittent_bytes for delta in self.deltas))
        return Epoch(sizes, tuple(Delta("baseline", size) for size in sizes[1:]))

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


def weigh(epoch: Epoch, offer: Offer, costs: Costs) -> tuple[bool, Since]:
    """What ``auto`` does: the cheaper delta of those with which it never costs more than ``intermittent``.

    It writes a full version whenever ``intermittent`` would, so that the deltas of both depend on the same ones.
    """
    if _full_is_due(epoch.as_intermittent().sizes):
        return True, "baseline"
    dear, cheap = offer.baseline_bytes, min(offer.previous_bytes, offer.baseline_bytes)
    long, short = epoch.with_delta("previous", cheap, dear), epoch.with_delta("baseline", dear, dear)
    if cheap == dear:
        return False, "baseline"
    if long.links() > costs.longest_chain:
        return False, "baseline"
    allowed = long.as_intermittent().paid(costs.keep_last)
    if any(ours > theirs for ours, theirs in zip(long.paid(costs.keep_last), allowed, strict=True)):
        return False, "baseline"
    reads = costs.restores_per_save * _saves_to_come(short.as_intermittent().sizes)
    longer, shorter = (
        one.paid(costs.keep_last)[-1] + reads * (one.sizes[0] + one.sizes[-1] + one.beneath()[-1])
        for one in (long, short)
    )
    return False, "previous" if longer < shorter else "baseline"


def _full_is_due(sizes: tuple[int, ...]) -> bool:
    return len(sizes) > 1 and sum(sizes) <= len(sizes) * sizes[-1]


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
