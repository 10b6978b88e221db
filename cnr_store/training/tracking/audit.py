"""Checks by samples that rows without a flag did not change, because hooks can't see every way of changing them.

Each save keeps some rows. At the next one, those of them that were not flagged since must be the same. Rows that change
are the most at risk. So a third of the sample are rows of the last one that were flagged since, which tend to change in
each interval. A third are drawn from all rows that were flagged. The rest are drawn from the whole table, for rows that
never are. Of many tables some are sampled at each save, by turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np

from cnr_store.errors import TrackingError
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import AnyArray
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, are_set, count, rows_of

log = logging.getLogger("cnr_store")
DEFAULT_BYTES = 1 << 20
"""For the samples of all tables: 4,096 rows of 64 floats. If 230 of them change in an interval, 99 of 100 trackers that
forget one changed row in a thousand are caught within 20 saves; of ids with Zipf's distribution a third of a sample
changes."""

_TABLES = 32
"""Sampled at one save: Python code for each of a thousand takes longer than their rows."""
_SHOWN = 5
_SPARSE = 8  # flagged rows are listed if they are fewer than one in so many, and else hit by chance
_LIKELY = (
    "probably by a write through .data or numpy, an operator of your own, an optimizer that changes rows without a "
    "gradient, or replays of a CUDA graph"
)


@dataclass(frozen=True)
class _Sample:
    """Rows held of one table: `ids`, ``(n,)`` ascending, from the first row held on, and their values by array path."""

    rows: int
    ids: RowIds
    values: Mapping[str, AnyArray]


def warn_unflagged(found: Mapping[str, RowIds]) -> None:
    """Log the rows, by path of their array, that a comparison found changed and that nothing flagged."""
    if found:
        log.warning(
            "rows changed since the last save without being tracked, %s: %s. They are saved. Find the code that "
            "writes, and call Checkpointer.touch after it",
            *(_LIKELY, "; ".join(f"{_listed(rows, 'more')} of {path}" for path, rows in found.items())),
        )


class Audit:
    """Samples of rows as they were when the tables were last saved or loaded.

    `limit_bytes`: for the samples of all tables, shared evenly among those that don't fit whole; 0 keeps none.
    `seed`: of the random choice of rows; None for another one in each run.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES, seed: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._random = np.random.default_rng(seed)
        self._samples: dict[str, _Sample] = {}
        self._turn = 0  # the place of the table that is sampled first

    @classmethod
    def from_option(cls, audit: bool | int | str) -> Self:
        """From what a caller gave: True or ``all`` for `DEFAULT_BYTES`, False for none, or the bytes."""
        if isinstance(audit, bool) or audit == "all":
            return cls(DEFAULT_BYTES if audit else 0)
        return cls(int(audit))

    def forget(self) -> None:
        """Compare nothing until the next `renew`."""
        self._samples = {}

    def check(
        self,
        arrays: Sequence[RowArray],
        flagged: Mapping[str, Bitmap],
        make_whole: Callable[[str, str], object],
    ) -> None:
        """Compare the sampled rows that are not flagged with those in the model.

        `arrays`: from `row_arrays`.
        `flagged`: packed, by table name: the rows that may have changed since the samples were taken.
        `make_whole`: called with the name of each table that fails, and the reason why its next version must be whole.
        """
        failures = []
        for name, table_arrays in _by_table([one for one in arrays if one.table.name in self._samples]):
            sample = self._samples[name]
            if sample.rows != table_arrays[0].table.local_rows:
                continue
            changed = _changed(sample, table_arrays, np.flatnonzero(~are_set(flagged[name], sample.ids)))
            first_row = table_arrays[0].table.first_row
            failures += [
                f"table {name!r}: {_listed(first_row + rows, 'more sampled')} of {path}"
                for path, rows in changed.items()
            ]
            if changed:
                make_whole(name, "rows changed without being tracked")
        if failures:
            raise TrackingError(
                f"rows changed since the last save without being tracked, {_LIKELY}: {'; '.join(failures)}. Nothing "
                "was written, and the next save writes these tables whole: call save again. Find the code that writes, "
                "and call Checkpointer.touch after it, or save with full=True"
            )

    def renew(self, arrays: Sequence[RowArray], flagged: Mapping[str, Bitmap] | None = None) -> None:
        """Take new samples of the model, which is being saved or was just loaded.

        `arrays`: from `row_arrays`.
        `flagged`: the rows that are likely to change again; None if that is not known.
        """
        if not self._limit_bytes:
            return
        tables, samples = _by_table(arrays), {}
        if len(tables) > _TABLES:
            first = self._turn % len(tables)
            tables, self._turn = (tables + tables)[first : first + _TABLES], first + _TABLES
        chosen = dict(tables)
        for name, size in _sample_sizes(chosen, self._limit_bytes).items():
            rows = chosen[name][0].table.local_rows
            ids = self._draw(name, rows, size, None if flagged is None else flagged[name])
            samples[name] = _Sample(rows, ids, {array.path: array.rows(ids) for array in chosen[name]})
        self._samples = samples

    def _draw(self, name: str, rows: int, size: int, flagged: Bitmap | None) -> RowIds:
        """At most `size` of a table's rows, ascending."""
        if size >= rows:
            return np.arange(rows)
        parts = []
        dirty = 0 if flagged is None else count(flagged)
        if flagged is not None and 0 < dirty < rows:
            former = self._samples.get(name)
            if former is not None and former.rows == rows:
                again = former.ids[are_set(flagged, former.ids)]
                parts.append(self._random.permutation(again)[: size // 3])
            parts.append(self._draw_flagged(flagged, rows, dirty, size // 3))
        left = size - sum(map(len, parts))
        return np.unique(np.concatenate([*parts, self._random.integers(rows, size=left)]))

    def _draw_flagged(self, flagged: Bitmap, rows: int, dirty: int, size: int) -> RowIds:
        """About `size` of the `dirty` rows that are set, at random."""
        if dirty * _SPARSE < rows:
            return self._random.choice(rows_of(flagged, rows), size)
        tried = self._random.integers(rows, size=2 * _SPARSE * size)
        return tried[are_set(flagged, tried)][:size]


def _by_table(arrays: Iterable[RowArray]) -> list[tuple[str, list[RowArray]]]:
    """The arrays of each table, which are next to each other."""
    return [(name, list(group)) for name, group in groupby(arrays, key=lambda array: array.table.name)]


def _sample_sizes(tables: Mapping[str, Sequence[RowArray]], limit_bytes: int) -> dict[str, int]:
    """Rows to sample of each table. What small tables leave of their share goes to the others."""
    row_bytes = {name: sum(array.row_bytes for array in arrays) for name, arrays in tables.items()}
    table_bytes = {name: arrays[0].table.local_rows * row_bytes[name] for name, arrays in tables.items()}
    sizes = {}
    for position, name in enumerate(sorted(table_bytes, key=table_bytes.__getitem__)):
        share = limit_bytes // (len(table_bytes) - position)
        sizes[name] = max(1, min(table_bytes[name], share) // row_bytes[name])
        limit_bytes = max(0, limit_bytes - sizes[name] * row_bytes[name])
    return sizes


def _changed(sample: _Sample, arrays: Sequence[RowArray], clean: RowIds) -> dict[str, RowIds]:
    """By array path, the rows that differ without a flag: `clean` are the positions in the sample without one."""
    ids, changed = sample.ids[clean], {}
    for array in arrays if ids.size else ():
        before, now = sample.values.get(array.path), array.rows(ids)
        # State that was made since, or got another width or type, is written whole.
        if before is not None and (before.shape[1], before.dtype) == (now.shape[1], now.dtype):
            was = before[clean]
            # Not their bits, as each step gives NaNs of bfloat16 others; and a NaN is not what it is itself.
            differs = ((was != now) & ((was == was) | (now == now))).any(axis=1)
            if differs.any():
                changed[array.path] = ids[differs]
    return changed


def _listed(rows: RowIds, others: str) -> str:
    shown = ", ".join(map(str, rows[:_SHOWN].tolist()))
    beyond = f" and {rows.size - _SHOWN} {others}" if rows.size > _SHOWN else ""
    return f"{'row' if rows.size == 1 else 'rows'} {shown}{beyond}"
