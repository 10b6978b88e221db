"""What a policy knows of the versions since the last full one: sums, however many there are. Records hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from msgspec import Meta

from cnr_store.policies.checks import MOST, Natural

Since = Literal["baseline", "previous"]
SINCE: tuple[Since, ...] = get_args(Since)
WINDOW = 16
"""Versions whose excess is known one by one. Of those before them only the greatest is."""
MAX_EXCESS = 64
"""Versions whose excess a record may hold one by one."""
Excess = Annotated[int, Meta(ge=-MOST, le=MOST)]


class Delta(NamedTuple):
    """A delta that was written: what it covers, and what ``intermittent`` would have written in its place."""

    since: Since
    intermittent_bytes: int


@dataclass(frozen=True)
class Sums:
    """Sizes of a full version and of the deltas since."""

    full_bytes: Natural  # of the full version
    deltas: Natural = 0  # deltas, deltas_bytes: how many deltas there are, and their bytes together
    deltas_bytes: Natural = 0
    first_bytes: Natural = 0  # first_bytes, last_bytes: of the first and of the last delta; 0 without any
    last_bytes: Natural = 0

    def with_delta(self, nbytes: int) -> Sums:
        """These sums with one more delta."""
        first = self.first_bytes if self.deltas else nbytes
        return Sums(self.full_bytes, self.deltas + 1, self.deltas_bytes + nbytes, first, nbytes)

    @property
    def total_bytes(self) -> int:
        """Of the full version and all deltas."""
        return self.full_bytes + self.deltas_bytes


@dataclass(frozen=True)
class Past:
    """The last full version and the deltas since."""

    # written, intermittent: as they were written, and as ``intermittent`` would have written them
    written: Sums
    intermittent: Sums
    folds_bytes: Natural = 0  # bytes of the folds of these versions
    links: Natural = 1  # versions that reading the newest takes
    beneath_bytes: Natural = 0  # bytes of the other deltas that reading the newest takes
    # For each of the last `WINDOW` deltas, oldest first: if retention kept the versions from it on, how many bytes more
    # were written and kept than by ``intermittent``
    excess_bytes: Annotated[tuple[Excess, ...], Meta(max_length=MAX_EXCESS)] = ()
    # The greatest such number of the deltas before them; None if there are none
    older_excess_bytes: Excess | None = None

    @classmethod
    def of(cls, full_bytes: int) -> Self:
        """The past after a full version."""
        return cls(Sums(full_bytes), Sums(full_bytes))

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Self:
        """The past that a record holds, once it is proven."""
        sums = {name: Sums(**doc[name]) for name in ("written", "intermittent")}
        return cls(**{**doc, **sums, "excess_bytes": tuple(doc["excess_bytes"])})

    @property
    def saved_bytes(self) -> int:
        """Bytes that were written less than by ``intermittent``, folds counted."""
        return self.intermittent.deltas_bytes - self.written.deltas_bytes - self.folds_bytes

    def with_delta(self, nbytes: int, delta: Delta) -> Self:
        """This past with one more delta, which took `nbytes`."""
        chained = delta.since == "previous" and self.written.deltas > 0
        beneath = self.beneath_bytes + self.written.last_bytes if chained else 0
        less = delta.intermittent_bytes - nbytes
        # Each older version keeps this one, too: `less` is saved in writing and in keeping.
        excess = [one - 2 * less for one in self.excess_bytes]
        older = [] if self.older_excess_bytes is None else [self.older_excess_bytes - 2 * less]
        excess.append(beneath + self.folds_bytes - self.saved_bytes - 2 * less)
        older += excess[:-WINDOW]
        return replace(
            self,
            written=self.written.with_delta(nbytes),
            intermittent=self.intermittent.with_delta(delta.intermittent_bytes),
            links=self.links + 1 if delta.since == "previous" else 2,
            beneath_bytes=beneath,
            excess_bytes=tuple(excess[-WINDOW:]),
            older_excess_bytes=max(older, default=None),
        )

    def with_fold(self, nbytes: int, *, newest: bool) -> Self:
        """This past once one of its versions was folded: the fold is written and kept beside them.

        `newest`: whether it is the newest that was folded. Else the chain counts as if it were as long as before.
        """
        older = self.older_excess_bytes
        return replace(
            self,
            folds_bytes=self.folds_bytes + nbytes,
            links=1 if newest else self.links,
            beneath_bytes=0 if newest else self.beneath_bytes,
            excess_bytes=tuple(one + 2 * nbytes for one in self.excess_bytes),
            older_excess_bytes=None if older is None else older + 2 * nbytes,
        )

    def max_excess_bytes(self, keep_last: int | None) -> int:
        """The greatest excess if retention keeps at most the last `keep_last` versions; those before count, too,
        where it keeps more than are known one by one.
        """
        if keep_last is None:
            return -2 * self.saved_bytes
        excess = list(self.excess_bytes[-keep_last:])
        if keep_last > len(self.excess_bytes) and self.older_excess_bytes is not None:
            excess.append(self.older_excess_bytes)
        return max(excess, default=0)


def past_after(policy: Mapping[str, Any], nbytes: int) -> Past:
    """The past after a version that is a delta.

    `policy`: the policy in that version's commit record: the fields of a `Decision`.
    `nbytes`: bytes of that version.
    """
    since: Since = "previous" if policy.get("since") == "previous" else "baseline"
    if policy.get("past") is None:  # no policy wrote it
        return Past.of(nbytes)
    offer = policy.get("offer")
    saved = offer["baseline_bytes"] - offer["previous_bytes"] if offer and since == "previous" else 0
    return Past.from_json(policy["past"]).with_delta(nbytes, Delta(since, nbytes + max(saved, 0)))


_MIN_BYTES = 16 << 10
"""Of smaller deltas, heads and indexes are a large share."""

_NEAR = 0.1
"""An estimate that is off by no more stays: that of codes of fixed widths, beside which stand heads and indexes."""


@dataclass
class DeltaBytes:
    """By what a delta covers, the share of the codecs' estimate that the last one took in this process.

    Sums of all arrays, which every rank of a job knows, so that all decide alike.
    """

    # The version noted last stands beside the shares, so that an interrupt never counts it twice.
    _noted: tuple[str, Mapping[Since, float]] = field(default=("", {}))
    # Whether rows are stored relative to those of the previous version: then only deltas since that one have such.
    is_relative: bool = False

    def note(self, version: str, policy: Mapping[str, Any], nbytes: int) -> None:
        """Take down what a version took. A second call changes nothing.

        `policy`: in its record: the fields of a `Decision`.
        `nbytes`: of its arrays.
        """
        offer, since = policy.get("offer"), policy.get("since")
        if offer is None or policy.get("full") or since not in SINCE or version == self._noted[0]:
            return
        offered = offer[f"{since}_bytes"]
        if self.is_relative and offered != offer["previous_bytes"]:
            return
        if min(offered, nbytes) >= _MIN_BYTES:
            self._noted = version, {**self._noted[1], since: self.share(since) * nbytes / offered}

    def share(self, since: Since) -> float:
        """Of such deltas; where there was none, of the others, so that the two differ by their rows alone; else 1.

        It is 1 where the estimate was near. Of relative rows there is one for both: what ``intermittent`` writes is
        relative to the baseline.
        """
        shares = self._noted[1]
        share = shares.get(since, next(iter(shares.values()), 1.0))
        return 1.0 if abs(share - 1) <= _NEAR else share
