"""Proves by samples that rows believed unchanged are: what tracks rows can't see every way of changing them.

At each save the raw bits of some rows are kept. At the next, those of them that nothing flagged since must be the
same. The rows most at risk are those that change: a third of the sample are sampled rows that were flagged in the
last interval (they tend to change in each), a third are drawn from all that were flagged, and the rest from the
whole table, for rows that never are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import TrackingError
from cnr_store.training.model import arguments
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.tracking.bitmap import Bitmap, Rows, count, rows_of
from cnr_store.training.tracking.device_bitmap import as_integers

DEFAULT_BYTES = 1 << 20
"""Of samples of all tables: 4,096 rows of 64 floats. If 230 of them change in an interval, 99 of 100 trackers that
forget one changed row in a thousand are caught within 20 saves; on Zipf's ids a third of a sample does."""

_SHOWN = 5
_SPARSE = 8  # rows flagged are listed if they are fewer than one of so many, and else met by chance
_LIKELY = (
    "likely by a write through .data or numpy, an operator of your own, an optimizer that moves rows without a "
    "gradient, or replays of a CUDA graph"
)


@dataclass(frozen=True)
class _Sample:
    """Rows of one table: `ids` ascending, ``(n,)``, and by array path their bits, ``(n, k)`` integers."""

    rows: int
    ids: Rows
    kept: Mapping[str, torch.Tensor]


class Audit:
    """Samples of rows as they were when the tables were last saved or loaded.

    Parameters
    ----------
    limit_bytes
        For the samples of all tables, shared evenly among those that don't fit whole; 0 keeps none.
    seed
        Of the choice of rows; None for another one in each run.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES, seed: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._random = np.random.default_rng(seed)
        self._samples: dict[str, _Sample] = {}

    @classmethod
    def from_option(cls, audit: bool | int) -> Self:
        """As a caller asks for it: True for `DEFAULT_BYTES`, False for none, or the bytes.

        Raises
        ------
        OptionError
            It is neither a truth value nor such a number.
        """
        if isinstance(audit, bool):
            return cls(DEFAULT_BYTES if audit else 0)
        return cls(arguments.count("audit", audit, least=0))

    def forget(self) -> None:
        """Compare nothing until the next `renew`."""
        self._samples = {}

    def check(
        self,
        arrays: Sequence[RowArray],
        flagged: Mapping[str, Bitmap],
        distrust: Callable[[str, str], object],
    ) -> None:
        """Compare the sampled rows that are not flagged with those in the model.

        Parameters
        ----------
        arrays
            As `row_arrays` gives them.
        flagged
            Packed, by table name: the rows that may have changed since the samples were taken.
        distrust
            Called with the name of each table found wrong, and why its next version must be whole.

        Raises
        ------
        TrackingError
            Some differ. It names all of these tables.
        """
        found = []
        for name, of_table in _by_table(arrays):
            sample = self._samples.get(name)
            if sample is None or sample.rows != of_table[0].table.rows:
                continue
            moved = _moved(sample, of_table, np.flatnonzero(~_are_set(flagged[name], sample.ids)))
            for path, rows in moved.items():
                found.append(f"table {name!r}: {_some(rows)} of {path}")
            if moved:
                distrust(name, "rows that nothing flagged had changed")
        if found:
            raise TrackingError(
                f"changed since the last save although nothing told of it, {_LIKELY}: {'; '.join(found)}. Nothing "
                "was written, and the next save of these tables is whole. Tell of each such change with "
                "Checkpointer.touch after it, or save with full=True"
            )

    def renew(self, arrays: Sequence[RowArray], flagged: Mapping[str, Bitmap] | None = None) -> None:
        """Take new samples of the model as it is: it is being saved, or was just loaded.

        Parameters
        ----------
        flagged
            The rows that are likely to change again; None if that is not known.
        """
        if not self._limit_bytes:
            return
        tables = dict(_by_table(arrays))
        samples = {}
        for name, rows in _sizes(tables, self._limit_bytes).items():
            of_table = tables[name]
            total = of_table[0].table.rows
            ids = self._draw(name, total, rows, None if flagged is None else flagged[name])
            samples[name] = _Sample(total, ids, {array.path: _bits(array.tensor, ids) for array in of_table})
        self._samples = samples

    def _draw(self, name: str, rows: int, wanted: int, flagged: Bitmap | None) -> Rows:
        """At most `wanted` of a table's rows, ascending."""
        if wanted >= rows:
            return np.arange(rows)
        parts = []
        dirty = 0 if flagged is None else count(flagged)
        if flagged is not None and 0 < dirty < rows:
            former = self._samples.get(name)
            if former is not None and former.rows == rows:
                again = former.ids[_are_set(flagged, former.ids)]
                parts.append(self._random.permutation(again)[: wanted // 3])
            parts.append(self._flagged(flagged, rows, dirty, wanted // 3))
        left = wanted - sum(map(len, parts))
        return np.unique(np.concatenate([*parts, self._random.integers(rows, size=left)]))

    def _flagged(self, flagged: Bitmap, rows: int, dirty: int, wanted: int) -> Rows:
        """About `wanted` of the rows that are set, at random."""
        if dirty * _SPARSE < rows:
            return self._random.choice(rows_of(flagged, rows), wanted)
        tried = self._random.integers(rows, size=2 * _SPARSE * wanted)
        return tried[_are_set(flagged, tried)][:wanted]


def _by_table(arrays: Iterable[RowArray]) -> list[tuple[str, list[RowArray]]]:
    """Arrays of a table stand beside each other."""
    return [(name, list(group)) for name, group in groupby(arrays, key=lambda array: array.table.name)]


def _sizes(tables: Mapping[str, Sequence[RowArray]], limit_bytes: int) -> dict[str, int]:
    """Rows to sample of each table: what small tables leave of their share goes to the others."""
    row_bytes = {name: sum(array.row_bytes for array in of_table) for name, of_table in tables.items()}
    whole = {name: of_table[0].table.rows * row_bytes[name] for name, of_table in tables.items()}
    sizes = {}
    for position, name in enumerate(sorted(whole, key=whole.__getitem__)):
        share = limit_bytes // (len(whole) - position)
        sizes[name] = max(1, min(whole[name], share) // row_bytes[name])
        limit_bytes = max(0, limit_bytes - sizes[name] * row_bytes[name])
    return sizes


def _are_set(flagged: Bitmap, ids: Rows) -> npt.NDArray[np.bool_]:
    byte, bit = flagged[ids >> 3], (1 << (ids & 7)).astype(np.uint8)
    found: npt.NDArray[np.bool_] = byte & bit != 0
    return found


def _bits(tensor: torch.Tensor, ids: Rows) -> torch.Tensor:
    """The bits of some rows, on the tensor's own device: the host need not hold them."""
    index = torch.from_numpy(ids).to(tensor.device)
    taken = torch.index_select(as_integers(tensor), 0, index)
    return taken.reshape(ids.size, taken[:1].numel())


def _moved(sample: _Sample, arrays: Sequence[RowArray], clean: Rows) -> dict[str, Rows]:
    """By array path, the rows that differ although they are clean: `clean` are their positions in the sample."""
    ids, found = sample.ids[clean], {}
    for array in arrays:
        kept = sample.kept.get(array.path)
        if kept is None or not ids.size:  # state made since is written whole
            continue
        before, now = kept[torch.from_numpy(clean).to(kept.device)], _bits(array.tensor, ids)
        # Of another width or type it is written whole, too.
        comparable = (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
        if comparable and not torch.equal(before, now):
            differs = _differ(before, now, array.tensor.dtype).any(dim=1).cpu().numpy()
            if differs.any():
                found[array.path] = ids[differs]
    return found


def _differ(before: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where bits differ, but for what steps do to any row: torch gives NaNs of bfloat16 other bits at each one, and
    subnormal numbers become zero at the first one after ``torch.set_flush_denormal(True)``."""
    differs = before != now
    if dtype.is_floating_point:
        differs &= ~(before.view(dtype).isnan() & now.view(dtype).isnan())
        differs &= ~(_magnitude(before) < _least_normal(dtype)) | (_magnitude(now) != 0)
    return differs


def _magnitude(bits: torch.Tensor) -> torch.Tensor:
    """Without the sign; as integers, since subnormal numbers may count as zero in arithmetic."""
    return bits & torch.iinfo(bits.dtype).max


def _least_normal(dtype: torch.dtype) -> int:
    """The bits of the least positive number of a type that is not subnormal: an exponent of 1 above the fraction."""
    return 1 << round(-math.log2(torch.finfo(dtype).eps))


def _some(rows: Rows) -> str:
    shown = ", ".join(map(str, rows[:_SHOWN].tolist()))
    more = f" and {rows.size - _SHOWN} more sampled" if rows.size > _SHOWN else ""
    return f"{'row' if rows.size == 1 else 'rows'} {shown}{more}"
