"""Reads an array whose chain is damaged: rows that are damaged or lost take their newest value that can be read.

A row's value lies in the newest link that holds the row. If that can't be read, the value before it is the one that
the row had in the version that the link's version continued, its `previous`. So a walk takes links newest first, and
sends rows on: those that a link does not hold to its base; those that it may hold and can't give to its previous
version, or to its base where that is gone. Of a damaged fold, rows are first looked for in its version's own chain,
which holds the same values. A row that is relative is composed where it is found, from what lies beneath: it is lost
there if it does not come out as it was written, or if a part of it may be lost and the checksum of its segment does not
prove the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from cnr_codecs import Pending, Segment, raw_segment
from cnr_codecs.elements import element_named
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.objects import list_ids
from cnr_store.chains.allocation import Array, allocate
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.link import PENDING, Link, Strays
from cnr_store.chains.salvage_walk import Ancestry, Distrusted, Mask, RowIds, Visit, Walk
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.layout import RELATIVE
from cnr_store.format.record import STILL, Record

T = TypeVar("T")


@dataclass(frozen=True)
class SalvagedRows:
    """Rows of one array that were damaged or lost, by the version whose value they have instead.

    Attributes
    ----------
    by_version
        Row numbers, (n,) int64 ascending, by version id, newest first.
    """

    by_version: Mapping[str, RowIds]

    @property
    def rows(self) -> RowIds:
        """All of these rows, (n,) int64 ascending."""
        return np.sort(np.concatenate([*self.by_version.values(), np.empty(0, np.int64)]))

    def __str__(self) -> str:
        sources = (f"{len(rows):,} from {version}" for version, rows in self.by_version.items())
        return f"{len(self.rows):,} rows ({', '.join(sources)})"


def salvaged_document(salvaged: SalvagedRows) -> dict[str, list[list[int]]]:
    """By version the runs of rows, each as its first row and its number of rows."""
    return {version: _runs(rows) for version, rows in salvaged.by_version.items()}


def salvaged_from(document: Mapping[str, list[list[int]]]) -> SalvagedRows:
    """The rows of a `salvaged_document`."""
    return SalvagedRows({version: _rows_of(runs) for version, runs in document.items()})


def _runs(rows: RowIds) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(rows, prepend=-2, append=-2) != 1)
    found: list[list[int]] = np.stack([rows[edges[:-1]], np.diff(edges)], axis=1).tolist()
    return found


def _rows_of(runs: list[list[int]]) -> RowIds:
    first, counts = np.array(runs, np.int64).reshape(-1, 2).T
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


def merged(one: SalvagedRows | None, other: SalvagedRows | None) -> SalvagedRows | None:
    """What was salvaged of two arrays, None where nothing was."""
    if one is None or other is None:
        return one or other
    by_version = {
        version: np.union1d(*(each.by_version.get(version, np.empty(0, np.int64)) for each in (one, other)))
        for version in sorted({*one.by_version, *other.by_version}, reverse=True)
    }
    return SalvagedRows(by_version)


def array_label(path: str) -> str:
    """What users call an array of rows: its table's name; of optimizer state, ``TABLE/SLOT``."""
    _, table, slot = path.split("/")
    name, slot = layout.decode_name(table), layout.decode_name(slot)
    return name if slot == "weight" else f"{name}/{slot}"


class SalvageReader(ArrayReader):
    """One array of rows at one version, whose chain may be damaged. Thread-safe.

    Rows that are not damaged are exact.
    """

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self._ancestry = Ancestry(catalog, record, path)
        self._salvaged: dict[str, list[RowIds]] = {}
        try:
            super().__init__(catalog, record, path)
        except CorruptionError as error:
            self._ancestry.note(error)
            self._check_room()

    @property
    def damage(self) -> CorruptionError | None:
        """The first damage met so far."""
        return self._ancestry.damage

    @property
    def links(self) -> list[Link]:
        """The links of the chain; if they can't all be opened, those looked into so far."""
        return self._links or self._ancestry.opened()

    def salvaged(self) -> SalvagedRows | None:
        """The rows that were read with older values so far; None if there are none."""
        with self._lock:
            by_version = {
                version: np.unique(np.concatenate(self._salvaged[version]))
                for version in sorted(self._salvaged, reverse=True)
            }
        return SalvagedRows(by_version) if by_version else None

    def read(
        self, first_row: int, out: Array, need: Array | None = None, *, strays: Strays | None = None
    ) -> Array:
        """As `ArrayReader.read`. Where something is damaged, all rows count as strays written by a delta."""
        changed = self._exactly(partial(super().read, first_row, out, need, strays=strays))
        if changed is not None:
            return changed
        if strays is not None:
            strays.rows[:] = strays.OTHER
        self._fill(first_row, out, np.ones(len(out), np.uint8) if need is None else need)
        return np.ones(len(out), bool)

    def take(self, first_row: int, need: Array) -> tuple[list[Segment], Array]:
        """As `ArrayReader.take`."""
        exact = self._exactly(partial(super().take, first_row, need))
        if exact is not None:
            return exact
        taken, changed = list[Segment](), np.ones(len(need), bool)
        # Older values may be on a grid that has not moved as far, and one segment has one grid.
        if self._record.arrays[self.path].move != STILL:
            values, rows = allocate((len(need), self.columns), self.dtype, self.path), np.flatnonzero(need)
            self._fill(first_row, values, need)
            element = element_named(self.element)
            return [raw_segment(values, np.arange(len(need)), len(need), rows, element)], changed

        def take(link: Link, need: Array, pending: Pending, lost: Mask) -> None:
            taken.extend(link.take(first_row, need, pending, lost=lost))

        self._salvage(first_row, need, take, taken.clear)
        return taken, changed

    def _exactly(self, read: Callable[[], T]) -> T | None:
        """What is read of a sound chain; None, and the damage noted, if this one is not."""
        try:
            return read() if self._links else None
        except CorruptionError as error:
            self._ancestry.note(error)
            return None

    def _fill(self, first_row: int, out: Array, need: Array) -> None:
        def fill(link: Link, need: Array, pending: Pending, lost: Mask) -> None:
            if RELATIVE not in link.record.requires and not (need == PENDING).any():
                with suppress(CorruptionError):  # where all is sound, neighbours come with one request
                    link.fill(first_row, out, need)
                    return
            link.fill(first_row, out, need, pending, lost=lost)

        self._salvage(first_row, need, fill)

    def _salvage(
        self, first_row: int, need: Array, visit: Visit, restart: Callable[[], None] = lambda: None
    ) -> None:
        """Find every row needed; once more if a version was folded meanwhile."""
        backend, distrusted = self._catalog.backend, Distrusted()

        def probe(link: Link, need: Array, pending: Pending, lost: Mask) -> None:
            link.fill(first_row, np.empty((len(need), self.columns), self.dtype), need, pending, lost=lost)

        while True:
            # What a fold replaces may be removed, and must not count as lost.
            folds = list_ids(backend, layout.FOLDS)
            self._catalog.look_for_folds()
            restart()
            walk = Walk(self._ancestry, need, visit, probe, self.columns, distrusted)
            if walk.is_trusted and list_ids(backend, layout.FOLDS) == folds:
                break
        if self._catalog.is_gone(self._record.id):
            raise VersionNotFoundError(
                f"version {self._record.id} of {backend.url} was removed while it was read; read another one"
            )
        if walk.missing.any():
            rows = first_row + np.flatnonzero(walk.missing)
            raise CorruptionError(
                f"version {self._record.id}, {self.path}: {len(rows)} rows, {rows[0]} to {rows[-1]}, are damaged or "
                f"lost, and no older value of them can be read: {self.damage}"
            ) from self.damage
        with self._lock:
            for version, rows in walk.salvaged:
                self._salvaged.setdefault(version, []).append(first_row + rows)

    def _check_room(self) -> None:
        # Before memory is taken: a record may claim any number of rows, its objects can't.
        room = 0
        for link in self._ancestry.links():
            room += link.most_rows
            if room >= self.shape[0]:
                return
        raise CorruptionError(
            f"version {self._record.id}, {self.path}: {self.shape[0]} rows are recorded, and what can be read has room "
            f"for {room}: {self.damage}"
        ) from self.damage


def salvaged_by_label(readers: Iterable[SalvageReader]) -> dict[str, SalvagedRows | None]:
    """What was salvaged of each array, by its label; of all arrays of one label, as slot ``s`` of ``t`` and a table
    ``t/s``, together.
    """
    found: dict[str, SalvagedRows | None] = {}
    for reader in readers:
        label = array_label(reader.path)
        found[label] = merged(found.get(label), reader.salvaged())
    return found
