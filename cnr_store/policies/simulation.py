"""Runs a policy over a trace of changed rows, without training: what it would write, keep and read; how often to save.

`cnr_store.policies.policy.decide` decides, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cnr_store.errors import OptionError
from cnr_store.policies.checks import MOST, integer, number
from cnr_store.policies.past import Past, past_after
from cnr_store.policies.policy import MAX_CHAIN, Costs, Decision, Offer, PolicyName, check_policy, decide


@dataclass(frozen=True)
class Trace:
    """How many rows change between saves.

    Attributes
    ----------
    rows
        Rows of the model.
    changed
        (saves, saves) int64: ``changed[j, b]`` rows changed after save b and up to save j, for b < j; 0 elsewhere.
        Saves count from 0.

    Raises
    ------
    OptionError
        Counts that no rows can have: beyond `rows`, or fewer rows changed in a longer time.
    """

    rows: int
    changed: NDArray[np.int64]

    def __post_init__(self) -> None:
        rows = integer("a trace: rows", self.rows, minimum=1)
        changed: Any = self.changed
        if not isinstance(changed, np.ndarray) or changed.dtype.kind not in "iu":
            raise OptionError("a trace: give its counts as a numpy array of integers")
        if changed.ndim != 2 or changed.shape[0] != changed.shape[1] or not len(changed):
            raise OptionError(
                f"a trace of {rows} rows and counts of shape {changed.shape}: give (saves, saves)"
            )
        saves = np.arange(len(changed))
        past = saves[:, None] > saves  # where b < j
        if changed[~past].any() or (changed < 0).any() or (changed > rows).any():
            raise OptionError(
                f"a trace of {rows} rows: counts lie within 0 ... {rows}, and are 0 from a save on"
            )
        if (np.diff(changed, axis=1)[past[:, 1:]] > 0).any():
            raise OptionError("a trace: more rows changed since a later save than since an earlier one")
        if (changed[1:] < changed[:-1])[past[:-1]].any():
            raise OptionError("a trace: fewer rows changed since a save as time went on")

    @property
    def saves(self) -> int:
        """How many saves there are, the first one included."""
        return len(self.changed)

    @classmethod
    def of_rows(cls, rows: int, intervals: Iterable[ArrayLike]) -> Self:
        """A trace from the rows that changed in each interval between saves.

        Parameters
        ----------
        rows
            Rows of the table.
        intervals
            Ids of rows, which may repeat, for each interval.

        Raises
        ------
        OptionError
            An id that is no integer, or out of range.
        """
        # For each row, the save before which it changed last; 0 if it never did.
        last = np.zeros(integer("rows", rows, minimum=1), np.int64)
        counts = []
        for save, ids in enumerate(intervals, start=1):
            last[_row_numbers(ids, rows, save)] = save
            counts.append(np.bincount(last, minlength=save + 1)[1:])
        changed = np.zeros((len(counts) + 1,) * 2, np.int64)
        for save, count in enumerate(counts, start=1):
            changed[save, :save] = count[::-1].cumsum()[::-1]
        return cls(rows, changed)

    @classmethod
    def of_growth(cls, rows: int, shares: Sequence[float], saves: int | None = None) -> Self:
        """A trace from how changed rows add up, wherever one begins to count.

        Parameters
        ----------
        rows
            Rows of the table.
        shares
            ``shares[i]`` of the rows change within i + 1 intervals. The last one stands for longer times, too.
        saves
            How many saves there are; by default one more than there are shares.

        Raises
        ------
        OptionError
            A number out of range.
        """
        rows, known = (
            integer("rows", rows, minimum=1),
            [number("a share of the rows", share, 1) for share in shares],
        )
        intervals = len(known) if saves is None else integer("saves", saves, minimum=1) - 1
        if not known and intervals:
            raise OptionError("a trace of growth needs a share for the first interval")
        grown = np.minimum(np.round(np.asarray([0, *known]) * rows).astype(np.int64), rows)
        at = np.arange(intervals + 1)
        return cls(rows, grown[np.clip(at[:, None] - at, 0, len(known))])

    @classmethod
    def zipf(cls, rows: int, saves: int, accesses: int, exponent: float = 1.05, seed: int = 0) -> Self:
        """A trace of rows looked up by Zipf's law: the r-th most popular one in proportion to r**-exponent.

        Parameters
        ----------
        rows
            Rows of the table.
        saves
            How many intervals there are.
        accesses
            Lookups in an interval.
        exponent
            Of the law: the greater, the more of the lookups go to few rows.
        seed
            Of what is drawn.

        Raises
        ------
        OptionError
            A number out of range.
        """
        rows, saves = integer("rows", rows, minimum=1), integer("saves", saves, minimum=1)
        accesses = integer("accesses", accesses)
        random = np.random.default_rng(integer("seed", seed))
        popularity = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -number("exponent", exponent))
        draws = (random.random(accesses) * popularity[-1] for _ in range(saves - 1))
        return cls.of_rows(rows, (np.searchsorted(popularity[:-1], draw) for draw in draws))


def _row_numbers(ids: ArrayLike, rows: int, interval: int) -> NDArray[Any]:
    try:
        numbers = np.asarray(ids).ravel()
    except ValueError as error:  # lists of several lengths, which are no array
        raise OptionError(f"interval {interval}: its ids are no array: {error}") from error
    if not len(numbers):  # whose type may be float64
        return np.zeros(0, np.int64)
    if numbers.dtype.kind not in "iu":
        raise OptionError(f"interval {interval}: its ids are {numbers.dtype}; give integers")
    if not 0 <= numbers.min() <= numbers.max() < rows:
        raise OptionError(
            f"interval {interval}: its ids reach from {numbers.min()} to {numbers.max()} of {rows} rows"
        )
    return numbers


@dataclass(frozen=True)
class SimulatedSave:
    """One save of a simulation.

    Attributes
    ----------
    save
        Its number, from 0.
    decision
        As in training.
    bytes
        Written by this save.
    written_bytes, kept_bytes
        Written by all saves up to here; kept after this one by the retention simulated. Folds count in both.
    chain
        Versions that this one needs, itself included. With more than `max_chain` it is folded.
    restore_bytes
        Bytes of the versions that restoring this one reads: once it is folded, its own and those of its fold.
    fold_bytes
        Written by the fold of this version; 0 if it is not folded.
    """

    save: int
    decision: Decision
    bytes: int
    written_bytes: int
    kept_bytes: int
    chain: int
    restore_bytes: int
    fold_bytes: int = 0


def simulate(
    trace: Trace,
    policy: PolicyName = "auto",
    *,
    keep_last: int | None = None,
    restores_per_save: float = 0.1,
    row_bytes: float = 64.0,
    delta_row_bytes: float | None = None,
    fixed_bytes: int = 0,
    max_chain: int | None = MAX_CHAIN,
) -> list[SimulatedSave]:
    """What a policy does on a trace, save by save.

    Parameters
    ----------
    trace
        The rows that change between saves.
    policy
        As for `Checkpointer`.
    keep_last
        Versions that are kept, with all that they depend on; None keeps everything.
    restores_per_save
        Restores that ``auto`` expects between two saves.
    row_bytes
        Encoded bytes of a row, its optimizer state included.
    delta_row_bytes
        Those of a row in a delta, where they are others: relative rows take fewer. None for `row_bytes`.
    fixed_bytes
        Bytes of each version beside its rows: dense arrays, state, metadata.
    max_chain
        As for `Checkpointer`. Each fold is complete before the next save.

    Raises
    ------
    OptionError
        An unknown policy, or a number out of range.
    """
    row_bytes, fixed_bytes = number("row_bytes", row_bytes, MOST), integer("fixed_bytes", fixed_bytes)
    delta_row_bytes = (
        row_bytes if delta_row_bytes is None else number("delta_row_bytes", delta_row_bytes, MOST)
    )
    if max_chain is not None:
        max_chain = integer("max_chain", max_chain, minimum=1)
    costs, name = Costs(keep_last, restores_per_save).limited(max_chain), check_policy(policy)
    found: list[SimulatedSave] = []
    written: list[int] = []  # by each save up to now, with its fold
    chains: list[tuple[int, ...]] = []  # the saves that restoring each of them reads
    baseline, past = 0, None
    for save, changed in enumerate(trace.changed):
        sizes = (fixed_bytes + round(delta_row_bytes * int(changed[since])) for since in (baseline, save - 1))
        offer = Offer(*sizes) if save else None
        decision = decide(name, past, offer=offer, costs=costs)
        if decision.full or offer is None:
            nbytes = fixed_bytes + round(row_bytes * trace.rows)
            baseline, past = save, Past.of(nbytes)
            chains.append((save,))
        else:
            consecutive = decision.since == "previous"
            nbytes = offer.previous_bytes if consecutive else offer.baseline_bytes
            chains.append((*chains[save - 1 if consecutive else baseline], save))
            past = past_after(asdict(decision), nbytes)
        chain = chains[save]
        folds = max_chain is not None and len(chain) > max_chain
        fold_bytes = round(row_bytes * trace.rows) if folds else 0
        written.append(nbytes + fold_bytes)
        kept = set().union(*(chains if keep_last is None else chains[-keep_last:]))
        found.append(
            SimulatedSave(
                save=save,
                decision=decision,
                bytes=nbytes,
                written_bytes=sum(written),
                kept_bytes=sum(written[each] for each in kept),
                chain=len(chain),
                restore_bytes=sum(written[each] for each in ((save,) if fold_bytes else chain)),
                fold_bytes=fold_bytes,
            )
        )
        if folds:
            baseline, past = save, past.with_fold(fold_bytes, newest=True)
            chains[save] = (save,)
    return found


@dataclass(frozen=True)
class Interval:
    """A time between two saves, and what it costs."""

    seconds: float  # from the beginning of one save to that of the next
    lost: float  # the share of a run's time that saves, steps made again and restores take, expected


def best_interval(
    failure_seconds: float, stall_seconds: float, restore_seconds: float = 0.0, write_seconds: float = 0.0
) -> Interval:
    """The time between saves at which the least is lost, by Daly's estimate of higher order.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), equation 37; its first term is Young's.

    `failure_seconds`: mean time between two failures.
    `stall_seconds`: how long a save holds training.
    `restore_seconds`: from a failure to the first new step.
    `write_seconds`: how long a save is written in the background. No save begins earlier than the one before it is
    committed, and a failure meanwhile costs the steps since that one, too.
    """
    failure = number("failure_seconds", failure_seconds)
    stall = number("stall_seconds", stall_seconds)
    restore, write = number("restore_seconds", restore_seconds), number("write_seconds", write_seconds)
    if not failure:
        raise OptionError("failure_seconds=0: a run that fails all the time makes no step")
    share = stall / (2 * failure)
    best = (
        math.sqrt(2 * stall * failure) * (1 + math.sqrt(share) / 3 + share / 9)
        if share < 1
        else failure + stall
    )
    seconds = max(best, write)
    lost = (stall / seconds if seconds else 0.0) + (seconds / 2 + write + restore) / failure
    return Interval(seconds, min(1.0, lost))
