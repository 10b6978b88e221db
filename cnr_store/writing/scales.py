"""How rows compare with the scale that the step of their lattice was found for, and when that step no longer fits."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from cnr_codecs import LatticeRows, RowCodec
from cnr_codecs.lattice.segments import RowCounts
from cnr_codecs.lattice.steps import OF_NORMAL
from cnr_store.format.record import ArrayEntry
from cnr_store.writing.row_codes import Array, Block, CodedRows, gridded_codec

_ROWS = 1024
"""Looked at of an array, or more. Where rows' sizes are log-normal, sigma 2, the median of these is off by 8 %."""
_SEEN = 100
"""Values other than 0 without which their median says nothing: more than half of so many have to be on one side."""
_RAW, _MORE_RAW = 0.01, 2
"""Of all rows, those that no code can take; and how many times those of the whole version."""
_MOST, _MORE = 0.5, 0.1
"""Of the values, those on one side of twice, or half, the median that the step was found for: with more than half of
them, so is the median. And how many more than at the whole version, since a sample may be off."""


class ScaleSample:
    """What the values of every so many-th row of an array are, as this process has encoded them last.

    A row that it never did counts as one that fits. That is of the values in memory, whatever became of their save.

    `rows`: of the array, those that this rank writes are `held`, with so many `columns`.
    """

    def __init__(self, rows: int, columns: int, held: range) -> None:
        # The same rows, however many ranks there are.
        self._every = every = 1 << max(0, (rows // _ROWS).bit_length() - 1)
        self._counts = np.zeros((-(-rows // every), 3), np.int32)
        self._counts[-(-held.start // every) : -(-held.stop // every), 0] = columns

    @property
    def counts(self) -> RowCounts:
        """Of all sampled rows."""
        return RowCounts(0, 0, 0, *self._counts.sum(axis=0).tolist())

    def note(self, codec: RowCodec, block: Block, ids: Array) -> None:
        """Note rows of these numbers, as they are encoded."""
        lattice, at = gridded_codec(codec), np.flatnonzero(ids % self._every == 0)
        assert isinstance(lattice, LatticeRows)
        median = (lattice.step or 0.0) / (lattice.rms_step or 1.0) / OF_NORMAL
        values = np.asarray(block.codes) * (lattice.step or 0.0) if isinstance(block, CodedRows) else block
        if isinstance(block, CodedRows):
            values[block.is_raw] = block.raw_values
        sizes = np.abs(values[at].astype(np.float64))
        counted = (sizes > 0) & np.isfinite(sizes)
        sides = counted, counted & (sizes > 2 * median), counted & (sizes < median / 2)
        self._counts[ids[at] // self._every] = np.stack([each.sum(axis=1) for each in sides], axis=1)


class Fit(NamedTuple):
    """How an array fits its step in one version."""

    # Of its whole version the shares of raw rows, and of values beyond twice the median and below half of it
    at_whole: tuple[float, float, float] = (0.0, 0.0, 0.0)
    is_raw: bool = False  # whether it has too many raw rows
    why_whole: str = ""  # why the next version is to hold all of the array; "" if it need not

    @classmethod
    def of(cls, entry: ArrayEntry, before: Fit | None) -> Self:
        """The fit of an array. `before`: in the version before; None where the array is whole.

        Only what grew counts: rows that no step can take, such as of NaN, make an array whole once.
        """
        seen = max(entry.nonzero, _SEEN)
        raw, large, small = entry.raw / max(1, entry.shape[0]), entry.large / seen, entry.small / seen
        if before is None:
            return cls((raw, large, small))
        whole, why = before.at_whole, ""
        is_raw = raw >= max(_RAW, _MORE_RAW * whole[0])
        if is_raw and before.is_raw:
            why = "rows are beyond its step, and were stored as they are"
        elif large > max(_MOST, whole[1] + _MORE):
            why = "its values have doubled since it got its step"
        elif small > max(_MOST, whole[2] + _MORE):
            why = "its values have halved since it got its step"
        return cls(whole, is_raw, why)
