"""How rows compare with the scale that the step of their lattice was found for: noted of some, as they are encoded."""

from __future__ import annotations

import numpy as np

from cnr_codecs import LatticeRows, RowCodec
from cnr_codecs.lattice.steps import OF_NORMAL
from cnr_store.policies.refits import Sampled
from cnr_store.writing.row_codes import Array, gridded_codec
from cnr_store.writing.rows import Block, CodedRows

_ROWS = 1024
"""Of an array, at least so many of which are looked at, as far as it has them. Where the sizes of rows are log-normal
with a sigma of 2, the median of these is off by 8 %."""


class ScaleSample:
    """What the values of every so many-th row of an array are, as this process has encoded them last.

    A row that it never did counts as one that fits. That is of the values in memory, whatever became of their save.

    `rows`: of the array.
    `columns`, `held`: the columns that this rank has of it, and the rows that it writes of them.
    """

    def __init__(self, rows: int, columns: int, held: range) -> None:
        self.held = held
        self._shape = rows, columns
        # The same rows, however many ranks there are.
        self._every = 1 << max(0, (rows // _ROWS).bit_length() - 1)
        self._first = -(-held.start // self._every)
        self._counts = np.zeros((max(0, -(-held.stop // self._every) - self._first), 3), np.int32)
        self._counts[:, 0] = columns

    def fits(self, rows: int, columns: int, held: range) -> bool:
        """Whether it is of such an array."""
        return (self._shape, self.held) == ((rows, columns), held)

    @property
    def sampled(self) -> Sampled:
        """The sum over its rows."""
        return Sampled(len(self._counts) * self._shape[1], *self._counts.sum(axis=0).tolist())

    def note(self, codec: RowCodec, block: Block, ids: Array | range) -> None:
        """Note rows of these numbers, as they are encoded."""
        lattice = gridded_codec(codec)
        if not isinstance(lattice, LatticeRows) or not lattice.step or not lattice.rms_step:
            return
        if isinstance(ids, range):
            at = np.arange(-ids.start % self._every, len(ids), self._every)
            places = (ids.start + at) // self._every - self._first
        else:
            at = np.flatnonzero((ids & (self._every - 1)) == 0)
            places = ids[at] // self._every - self._first
        median = lattice.step / lattice.rms_step / OF_NORMAL
        sizes = np.abs(_values(block, at, lattice.step))
        counted = (sizes > 0) & np.isfinite(sizes)
        sides = counted, counted & (sizes > 2 * median), counted & (sizes < median / 2)
        self._counts[places] = np.stack([each.sum(axis=1) for each in sides], axis=1)


def _values(block: Block, at: Array, step: float) -> Array:
    if not isinstance(block, CodedRows):
        return block[at].astype(np.float64)
    codes, raw = np.asarray(block.codes), np.flatnonzero(block.is_raw[at])
    values = codes[at] * step
    values[raw] = block.raw_values[(np.cumsum(block.is_raw) - 1)[at[raw]]]
    return values
