"""Finds by how much the rows that are not looked up have decayed, so that the grid of their array moves with them.

Dense optimizers multiply what they keep for such rows by one factor at every step. The ratios of their values now and
at an earlier save are equal, but for rounding, and those of other rows are spread: so the factor is where the ratios of
some rows lie densest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.payload.coded import MAX_CODE, MAX_SHIFT, Grid
from cnr_store.format.record import Move

Array = np.ndarray[Any, Any]
_ROWS = 2048
"""That are looked at, evenly spread over an array."""
_LEAST_RATIOS = 16
_LEAST_SHARE = 1 / 8
"""Of the ratios that lie at the densest place, or it counts as none."""
_WIDTH = 1e-5
"""Of that place, as a logarithm: some steps round differently by some 1e-7 each."""
_SMALL = 2.0**-100
"""Smaller values are left out: some decay no further."""
_SPARE_OCTAVES = 160
"""Of codes that are left to values as large as they may be, up to 2**33."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Values of some rows as they were saved, the largest of each, when the grid stood at `total`.

    `columns`, `values`: (n,): of the rows `sampled_rows`.
    `total`: scale times 2**shift.
    """

    columns: npt.NDArray[np.intp]
    values: npt.NDArray[np.float32]
    total: float

    @classmethod
    def blank(cls, rows: int, move: Move) -> Sample:
        """That of so many rows, all to be `read` yet."""
        count = len(sampled_rows(rows))
        return cls(np.zeros(count, np.intp), np.zeros(count, np.float32), total_of(move))

    def read(self, values: Array, begin: int, rows: int) -> None:
        """Take those of the rows from `begin` on that are sampled of all `rows`."""
        ids = sampled_rows(rows)
        first, end = np.searchsorted(ids, [begin, begin + len(values)]).tolist()
        self.columns[first:end], self.values[first:end] = largest(values[ids[first:end] - begin])


def sampled_rows(rows: int) -> npt.NDArray[np.int64]:
    """The rows that are looked at, ascending."""
    return np.linspace(0, rows - 1, min(rows, _ROWS)).astype(np.int64)


def largest(values: Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Of each row, (n, columns), where its value of the largest magnitude is, and that value."""
    columns = np.argmax(np.abs(values), axis=1)
    return columns, values[np.arange(len(values)), columns]


def total_of(move: Move) -> float:
    """By what values are multiplied where a grid has moved to."""
    return math.ldexp(*move)


def next_move(sample: Sample | None, values: Array, move: Move) -> Move:
    """Where a grid moves to by the values of the sampled rows, (n, columns), now; `move` if nothing tells of more."""
    if sample is None or len(sample.values) != len(values):
        return move
    total = sample.total / _decay(sample.values, values[np.arange(len(values)), sample.columns])
    if total <= total_of(move) * (1 + _WIDTH):  # or it is rounding
        return move
    shift = math.floor(math.log2(total))
    scale = float(np.float32(math.ldexp(total, -shift)))
    return (scale / 2, shift + 1) if scale >= 2 else (max(scale, 1.0), shift)


def has_room(grid: Grid, move: Move) -> bool:
    """Whether the integers of a grid that has moved there have room for values as large as these may be."""
    return move[1] <= min(MAX_SHIFT, (MAX_CODE >> grid.mantissa) - _SPARE_OCTAVES)


def _decay(before: npt.NDArray[np.float32], now: npt.NDArray[np.float32]) -> float:
    """The factor that most rows share which decayed; 1 where too few agree on any."""
    with np.errstate(all="ignore"):
        ratios = now.astype(np.float64) / before
        ratios = ratios[(np.abs(before) > _SMALL) & (np.abs(now) > _SMALL) & (ratios > 0) & (ratios < 2)]
    if len(ratios) < _LEAST_RATIOS:
        return 1.0
    logs = np.sort(np.log(ratios))
    counts = np.searchsorted(logs, logs + _WIDTH, "right") - np.arange(len(logs))
    first = int(np.argmax(counts))
    count = int(counts[first])
    if count < max(_LEAST_RATIOS / 2, _LEAST_SHARE * len(logs)):
        return 1.0
    return float(np.exp(np.median(logs[first : first + count])))
