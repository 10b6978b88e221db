"""Reads and validates every byte of one version, or of one fold.

Rows are decoded through `Link`, the one way to read, and then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cnr_backends import Transfer
from cnr_codecs import Pending, array_dtype
from cnr_store.catalog.catalog import count_parts, read_state_part
from cnr_store.chains.allocation import Array, allocate
from cnr_store.chains.array_reader import ArrayReader, region_rows
from cnr_store.chains.dense import dense_object
from cnr_store.chains.link import PENDING, CompositionError, Link
from cnr_store.errors import CheckpointError, CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid
from cnr_store.format.state import decode_state
from cnr_store.maintenance.verification.inspect_version import STATE, STATES, RowSpan, VersionCheck

_STATE_ARRAYS = ("dense/optim/", "dense/state/")


@dataclass(frozen=True)
class _Outcome:
    """What one task found."""

    nbytes: int = 0  # bytes of the version that are checked now
    # what, key, path, rows, row_count: the message if something is damaged, None otherwise; object, array and rows
    # concerned, and how many at most
    what: str | None = None
    key: str = ""
    path: str | None = None
    rows: RowSpan | None = None
    row_count: int | None = None
    present: int = 0  # of an array of rows, how many were found
    own: int = 0  # how many of these no older version can hold


_Task = Callable[[], _Outcome]


class DeepCheck:
    """Reads everything of a version that its `VersionCheck` found listed.

    `check`: the check, which has run. Findings are added to it.
    `base_rows`: by path of a delta, how many rows its base has: the delta must hold all rows beyond them. None if that
    is not known.
    """

    def __init__(self, check: VersionCheck, base_rows: Callable[[str], int | None]) -> None:
        self._check = check
        self._record = check.record
        self._base_rows = base_rows
        self._counts: dict[str | None, tuple[int, int]] = {}

    def run(self, transfer: Transfer) -> Iterator[int]:
        """Read, and yield bytes of the version as they are checked."""
        for outcome in transfer.map(lambda task: task(), self._tasks()):
            if outcome.what is not None:
                self._check.add(outcome.what, outcome.key, outcome.path, outcome.rows, outcome.row_count)
                if outcome.key.startswith(self._record.key(STATES)):
                    self._check.soundness.state = False
            present, own = self._counts.get(outcome.path, (0, 0))
            self._counts[outcome.path] = present + outcome.present, own + outcome.own
            yield outcome.nbytes
        self._check_counts()

    def _tasks(self) -> Iterator[_Task]:
        """One for each region of rows, chunk of a dense array, and document. They run in any order, in any thread."""
        check, record = self._check, self._record
        if record.prefix == layout.VERSIONS and check.soundness.state:
            yield self._check_state
        for key in check.nodes.keys() - check.missing:
            yield partial(self._check_node, key)
        for path, grid in check.dense.items():
            for index in range(grid.chunks):
                if record.key(path, grid.key(index)) not in check.missing:
                    yield partial(self._check_dense, path, grid, index)
        for path, link in check.links.items():
            yield from self._row_tasks(path, link)

    def _row_tasks(self, path: str, link: Link) -> Iterator[_Task]:
        """One for each region within one row of shards, so that a finding can name an object."""
        grid, by_row = link.grid, dict[int, list[int]]()
        for shard in link.parts:
            by_row.setdefault(shard // grid.shard_grid[1], []).append(shard)
        row_bytes = grid.columns * array_dtype(link.entry.element).itemsize
        step = min(region_rows([link], row_bytes), grid.shard_rows)
        for shard_row, shards in by_row.items():
            if any(link.shards.key(shard) in self._check.missing for shard in shards):
                continue
            begin = shard_row * grid.shard_rows
            end = min(begin + grid.shard_rows, grid.rows)
            nbytes = sum(link.parts[shard].nbytes for shard in shards)
            for first in range(begin, end, step):
                rows = (first, min(first + step, end) - 1)
                yield partial(self._check_rows, path, link, rows, link.shards.key(shards[0]), nbytes)
                nbytes = 0  # bytes of the whole row of shards, counted once

    def _check_rows(self, path: str, link: Link, rows: RowSpan, key: str, nbytes: int) -> _Outcome:
        count = rows[1] + 1 - rows[0]
        need = np.ones(count, np.uint8)
        try:
            what = self._check.at(path, rows, key)
            out = allocate((count, link.grid.columns), array_dtype(link.entry.element), what)
            link.fill(rows[0], out, need, Pending(count, link.grid.columns))
            self._check_composed(path, rows[0], out, need)
        except CorruptionError as error:
            row_count = max(_count_lost(link, rows), int((need == PENDING).sum()))
            row_count = min(row_count, link.entry.rows)
            return _Outcome(nbytes, str(error), key, path, rows, row_count)
        except FormatError as error:
            return _Outcome(nbytes, str(error), key, path, rows)
        shared = min(max(self._first_own_row(path) - rows[0], 0), count)
        lost = np.flatnonzero(need[shared:])
        if len(lost):
            place = (rows[0] + shared + int(lost[0]), rows[1])
            what = self._check.at(path, place, f"{len(lost)} rows are not in {key}")
            return _Outcome(nbytes, what, key, path, place, len(lost))
        return _Outcome(nbytes, path=path, present=count - int(need.sum()), own=count - shared)

    def _check_composed(self, path: str, first_row: int, out: Array, need: Array) -> None:
        """Compose the rows that are relative, and clear their `need`. Damage beneath is another version's."""
        relative = need == PENDING
        if relative.any():
            try:
                ArrayReader(self._check.catalog, self._record, path).read(first_row, out, relative)
            except CompositionError:
                raise
            except CheckpointError:
                pass
            need[relative] = 0

    def _first_own_row(self, path: str) -> int:
        """The first row of an array that no older version can hold."""
        entry = self._record.arrays[path]
        if entry.base is None:
            return 0
        base_rows = self._base_rows(path)
        return entry.shape[0] if base_rows is None else min(base_rows, entry.shape[0])

    def _check_dense(self, path: str, grid: DenseGrid, index: int) -> _Outcome:
        try:
            return _Outcome(len(dense_object(self._check.catalog, self._record, path, grid, index)))
        except CorruptionError as error:
            return _Outcome(0, str(error), self._record.key(path, grid.key(index)), path)

    def _check_node(self, key: str) -> _Outcome:
        return _Outcome(0, self._check.compare_node(key), key)

    def _check_state(self) -> _Outcome:
        """Whether the state and its parts can be decoded, and refer to each of their arrays once."""
        catalog, record, referred = self._check.catalog, self._record, set[str]()
        key = record.key(STATE)

        def read(path: str) -> np.ndarray[Any, Any]:
            entry = record.arrays.get(path)
            if entry is None or path in referred or not path.startswith(_STATE_ARRAYS):
                raise FormatError(f"it refers to {path[:80]!r}, which is not stored for it, or twice")
            referred.add(path)
            return np.broadcast_to(np.uint8(), entry.shape)

        try:
            state = catalog.state(record)
            decode_state(state, read=read, from_leaf=lambda leaf: leaf)
            for rank in range(count_parts(state)):
                key = record.key(layout.state_part(rank))
                part = read_state_part(catalog, record, state, rank)
                decode_state(part, read=read, from_leaf=lambda leaf: leaf)
        except (CorruptionError, FormatError) as error:
            return _Outcome(0, f"{record.home}: {key}: {error}", key)
        return _Outcome()

    def _check_counts(self) -> None:
        """Whether as many rows were found as are recorded."""
        for path, link in self._check.links.items():
            if path in self._check.soundness.unreadable:
                continue
            entry, (present, own) = link.entry, self._counts.get(path, (0, 0))
            last = entry.shape[0] - self._first_own_row(path)
            if (present, own) != (entry.rows, last):
                what = (
                    f"{entry.rows} rows are recorded, and the last {last} must be here; its {len(link.parts)} objects "
                    f"hold {present} and {own}"
                )
                self._check.add(self._check.at(path, None, what), self._record.key(path), path)


def _count_lost(link: Link, rows: RowSpan) -> int:
    """How many of these rows a link may hold and can't give."""
    count = rows[1] + 1 - rows[0]
    try:
        out = allocate((count, link.grid.columns), array_dtype(link.entry.element), link.record.home)
        pending = Pending(count, link.grid.columns)
        lost = np.zeros(count, bool)
        link.fill(rows[0], out, np.ones(count, np.uint8), pending, lost=lost)
        return int(lost.sum())
    except (CorruptionError, FormatError):
        return count
