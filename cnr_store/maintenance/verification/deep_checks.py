"""The reads that prove every byte of one version, or of one fold.

Rows are proven by decoding them through `WrittenLink`, the one way to read; nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnr_codecs import array_dtype
from cnr_store.chains.allocation import allocate
from cnr_store.chains.array_reader import region_rows
from cnr_store.chains.dense import dense_object
from cnr_store.chains.link import WrittenLink
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid
from cnr_store.format.state import decode_state
from cnr_store.maintenance.verification.inspect_version import STATE, Rows, VersionCheck
from cnr_store.maintenance.verification.report import Finding

_BESIDE_STATE = ("dense/optim/", "dense/state/")


@dataclass(frozen=True)
class Proof:
    """What one task found, and how many bytes of the version it has settled.

    Of an array of rows, `rows` were found, `held` of them among those that no older version could hold.
    """

    nbytes: int = 0
    finding: Finding | None = None
    path: str = ""
    rows: int = 0
    held: int = 0


Task = Callable[[], Proof]


class DeepCheck:
    """Reads everything that an inspection found to be there: run `tasks`, `settle` each, then `conclude`.

    Parameters
    ----------
    base_rows
        How many rows the base of one of its deltas has, by path: those beyond them must be in the delta. None if
        that is not known.
    """

    def __init__(self, inspection: VersionCheck, base_rows: Callable[[str], int | None]) -> None:
        self._seen = inspection
        self._record = inspection.record
        self._base_rows = base_rows
        self._found: dict[str, tuple[int, int]] = {}

    def tasks(self) -> Iterator[Task]:
        """One for each region of rows, chunk of a dense array, and document; any order, any thread."""
        seen, record = self._seen, self._record
        if record.prefix == layout.VERSIONS and seen.soundness.state:
            yield self._check_state
        for key in seen.nodes.keys() - seen.missing:
            yield _bind(self._check_node, key)
        for path, cut in seen.dense.items():
            for index in range(cut.chunks):
                if record.key(path, cut.key(index)) not in seen.missing:
                    yield _bind(self._check_dense, path, cut, index)
        for path, link in seen.links.items():
            if isinstance(link, WrittenLink):
                yield from self._row_tasks(path, link)

    def _row_tasks(self, path: str, link: WrittenLink) -> Iterator[Task]:
        """One a region that lies in one row of shards, so that what fails has a key."""
        grid, by_row = link.grid, dict[int, list[int]]()
        for shard in link.parts:
            by_row.setdefault(shard // grid.shard_grid[1], []).append(shard)
        row_bytes = grid.columns * array_dtype(link.entry.element).itemsize
        step = min(region_rows([link], row_bytes), grid.shard_rows)
        for shard_row, shards in by_row.items():
            if any(link.shards.key(shard) in self._seen.missing for shard in shards):
                continue
            begin = shard_row * grid.shard_rows
            end = min(begin + grid.shard_rows, grid.rows)
            nbytes = sum(link.parts[shard].nbytes for shard in shards)
            for first in range(begin, end, step):
                rows = (first, min(first + step, end) - 1)
                yield _bind(self._check_rows, path, link, rows, link.shards.key(shards[0]), nbytes)
                nbytes = 0  # of the whole row of shards, counted once

    def _check_rows(self, path: str, link: WrittenLink, rows: Rows, key: str, nbytes: int) -> Proof:
        entry, count = link.entry, rows[1] + 1 - rows[0]
        need = np.ones(count, np.uint8)
        try:
            shape = (count, (*entry.shape, 1)[1])
            link.fill(
                rows[0], allocate(shape, array_dtype(entry.element), self._seen.at(path, rows, key)), need
            )
        except (CorruptionError, FormatError) as error:
            return Proof(nbytes, Finding(str(error), self._record.id, key, path, rows))
        skipped = min(max(self._held_from(path) - rows[0], 0), count)
        lost = np.flatnonzero(need[skipped:])
        if len(lost):
            place = (rows[0] + skipped + int(lost[0]), rows[1])
            what = self._seen.at(path, place, f"{len(lost)} rows are not in {key}")
            return Proof(nbytes, Finding(what, self._record.id, key, path, place))
        return Proof(nbytes, None, path, count - int(need.sum()), count - skipped)

    def _held_from(self, path: str) -> int:
        """The first row from which on all rows of an array must be in this very record."""
        entry = self._record.arrays[path]
        if entry.base is None:
            return 0
        base_rows = self._base_rows(path)
        return entry.shape[0] if base_rows is None else min(base_rows, entry.shape[0])

    def _check_dense(self, path: str, cut: DenseGrid, index: int) -> Proof:
        try:
            nbytes = len(dense_object(self._seen.catalog, self._record, path, cut, index))
        except CorruptionError as error:
            return Proof(
                0, Finding(str(error), self._record.id, self._record.key(path, cut.key(index)), path)
            )
        return Proof(nbytes)

    def _check_node(self, key: str) -> Proof:
        return Proof(0, self._seen.check_node(key))

    def _check_state(self) -> Proof:
        """Whether the state can be decoded, and refers to arrays of its own."""
        key, referred = self._record.key(STATE), set[str]()

        def read(path: str) -> np.ndarray[Any, Any]:
            entry = self._record.arrays.get(path)
            if entry is None or path in referred or not path.startswith(_BESIDE_STATE):
                raise FormatError(f"it refers to {path[:80]!r}, which is not stored for it, or twice")
            referred.add(path)
            return np.empty(0)

        try:
            decode_state(self._seen.catalog.state(self._record), read=read)
        except (CorruptionError, FormatError) as error:
            return Proof(0, Finding(f"{self._record.home}: {key}: {error}", self._record.id, key))
        return Proof()

    def settle(self, proof: Proof) -> None:
        """Take a task's outcome into account."""
        if proof.finding is not None:
            self._seen.spoil(proof.finding)
            if proof.finding.key == self._record.key(STATE):
                self._seen.soundness.state = False
        rows, held = self._found.get(proof.path, (0, 0))
        self._found[proof.path] = rows + proof.rows, held + proof.held

    def conclude(self) -> None:
        """After all tasks: whether as many rows were found as are recorded."""
        for path, link in self._seen.links.items():
            if path in self._seen.soundness.spoiled:
                continue
            entry, (rows, held) = link.entry, self._found.get(path, (0, 0))
            last = entry.shape[0] - self._held_from(path)
            if (rows, held) != (entry.rows, last):
                what = (
                    f"{entry.rows} rows are recorded, and the last {last} must be here; its {len(link.parts)} objects "
                    f"hold {rows} and {held}"
                )
                finding = self._seen.at(path, None, what)
                self._seen.spoil(Finding(finding, self._record.id, self._record.key(path), path))


def _bind(function: Callable[..., Proof], *arguments: Any) -> Task:
    return lambda: function(*arguments)
