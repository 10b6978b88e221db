"""Reads an array whose chain is damaged: rows that are damaged or lost take their newest value that can be read.

A row's value lies in the newest link that holds the row. If that can't be read, the value before it is the one that
the row had in the version that the link's version continued, its `previous`. So a walk takes links newest first, and
sends rows on: those that a link does not hold to its base; those that it may hold and can't give to its previous
version, or to its base where that is gone. Of a damaged fold, rows are first looked for in its version's own chain,
which holds the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cnr_codecs import Segment, array_dtype
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.objects import list_ids
from cnr_store.chains.allocation import Array
from cnr_store.chains.ancestry import Ancestry, Place
from cnr_store.chains.array_reader import ArrayReader, region_rows
from cnr_store.chains.link import Link
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.record import Record

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_Visit = Callable[[Link, Array], Mask]
"""Takes the rows needed from a link, clears their `need`, and returns those that it may hold and can't give."""


@dataclass(frozen=True)
class SalvagedRows:
    """Rows of one array that were damaged or lost, by the version whose value they have instead.

    Attributes
    ----------
    by_version
        Row numbers, (n,) int64 ascending, by version id, newest first.
    """

    by_version: Mapping[str, Rows]

    @property
    def rows(self) -> Rows:
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


def _runs(rows: Rows) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(rows, prepend=-2, append=-2) != 1)
    found: list[list[int]] = np.stack([rows[edges[:-1]], np.diff(edges)], axis=1).tolist()
    return found


def _rows_of(runs: list[list[int]]) -> Rows:
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


class SalvageReader:
    """One array of rows at one version, whose chain may be damaged. Thread-safe.

    Rows that are not damaged are exact, as `ArrayReader` reads them.

    Attributes
    ----------
    version, path, shape, dtype, element, columns
        As of an `ArrayReader`.
    """

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self._catalog, self._record = catalog, record
        self.version, self.path = record.id, path
        self._ancestry = Ancestry(catalog, record, path)
        self._exact: ArrayReader | None = None
        self._salvaged: dict[str, list[Rows]] = {}
        self._lock = threading.Lock()
        try:
            self._exact = ArrayReader(catalog, record, path)
        except CorruptionError as error:
            self._ancestry.note(error)
        entry = record.arrays[path]
        self.shape, self.element = entry.shape, entry.element
        self.dtype, self.columns = array_dtype(entry.element), (*entry.shape, 1)[1]
        if self._exact is None:
            self._check_room()

    @property
    def damage(self) -> CorruptionError | None:
        """The first damage met so far."""
        return self._ancestry.damage

    @property
    def links(self) -> list[Link]:
        """The links of the chain; if they can't all be opened, those looked into so far."""
        return self._ancestry.opened() if self._exact is None else self._exact.links

    def salvaged(self) -> SalvagedRows | None:
        """The rows that were read with older values so far; None if there are none."""
        with self._lock:
            by_version = {
                version: np.unique(np.concatenate(self._salvaged[version]))
                for version in sorted(self._salvaged, reverse=True)
            }
        return SalvagedRows(by_version) if by_version else None

    def regions(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of pieces that cover the array."""
        rows, rows_each = self.shape[0], region_rows(self.links, self.columns * self.dtype.itemsize)
        for first_row in range(0, rows, rows_each):
            yield first_row, min(rows_each, rows - first_row)

    def read(self, first_row: int, out: Array) -> Array:
        """As `ArrayReader.read`. Where something is damaged, all rows count as written by a delta.

        Raises
        ------
        CorruptionError
            Rows are damaged or lost, and no older value of them can be read.
        VersionNotFoundError
            The version was removed meanwhile.
        """
        if self._exact is not None:
            try:
                return self._exact.read(first_row, out)
            except CorruptionError as error:
                self._ancestry.note(error)
        self._fill(first_row, out, np.ones(len(out), np.uint8))
        return np.ones(len(out), bool)

    def read_rows(self, first_row: int, out: Array, need: Array) -> None:
        """As `ArrayReader.read_rows`.

        Raises
        ------
        CorruptionError, VersionNotFoundError
            As `read` does.
        """
        wanted = need.copy()
        if self._exact is not None:
            try:
                self._exact.read_rows(first_row, out, need)
                return
            except CorruptionError as error:
                self._ancestry.note(error)
        self._fill(first_row, out, wanted)
        need[:] = 0

    def take(self, first_row: int, need: Array) -> list[Segment]:
        """As `ArrayReader.take`.

        Raises
        ------
        CorruptionError, VersionNotFoundError
            As `read` does.
        FormatError
            A link's chunks split columns.
        """
        wanted = need.copy()
        if self._exact is not None:
            try:
                return self._exact.take(first_row, need)
            except CorruptionError as error:
                self._ancestry.note(error)
        taken: list[Segment] = []

        def take(link: Link, need: Array) -> Mask:
            segments, lost = link.take_sound(first_row, need)
            taken.extend(segments)
            return lost

        self._salvage(first_row, wanted, take, taken.clear)
        need[:] = 0
        return taken

    def _fill(self, first_row: int, out: Array, need: Array) -> None:
        def fill(link: Link, need: Array) -> Mask:
            try:
                link.fill(first_row, out, need)
            except CorruptionError as error:
                self._ancestry.note(error)
                return link.fill_sound(first_row, out, need)
            return np.zeros(len(need), bool)

        self._salvage(first_row, need, fill)

    def _salvage(
        self, first_row: int, need: Array, visit: _Visit, restart: Callable[[], None] = lambda: None
    ) -> None:
        """Find every row needed; once more if a version was folded meanwhile."""
        backend = self._catalog.backend
        while True:
            # What a fold replaces may be removed, and must not count as lost.
            folds = list_ids(backend, layout.FOLDS)
            self._catalog.look_for_folds()
            restart()
            walk = _Walk(self._ancestry, need, visit)
            if list_ids(backend, layout.FOLDS) == folds:
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
            for version, rows in walk.salvaged():
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


class _Walk:
    """One walk over an array's links, newest first, until each row needed is found.

    Attributes
    ----------
    missing
        (n,) bool: rows that no link can give.
    """

    def __init__(self, ancestry: Ancestry, need: Array, visit: _Visit) -> None:
        self._ancestry, self._visit = ancestry, visit
        # By place: rows to look for there; lost rows, which may also be looked for there.
        self._pending: dict[Place, Mask] = {ancestry.newest(): need != 0}
        self._spare: dict[Place, Mask] = {}
        self._is_old = np.zeros(len(need), bool)
        self._source = np.full(len(need), -1, np.int64)
        self._versions: list[str] = []
        self.missing: Mask = np.zeros(len(need), bool)
        # Whatever rows are sent on goes to an older place, so each place is visited once, and the walk ends.
        while self._pending:
            place = max(self._pending)
            self._visit_place(place, self._pending.pop(place))

    def salvaged(self) -> Iterator[tuple[str, Rows]]:
        """(version, offsets of the rows that have its value instead of a newer one)."""
        for number, version in enumerate(self._versions):
            rows = np.flatnonzero(self._is_old & (self._source == number))
            if rows.size:
                yield version, rows

    def _visit_place(self, place: Place, rows: Mask) -> None:
        link, need = self._ancestry.link(place), rows.astype(np.uint8)
        lost = rows if link is None else self._visit(link, need)
        absent = (need != 0) & ~lost
        self._source[rows & (need == 0)] = len(self._versions)
        self._versions.append(place[0])
        if not (lost.any() or absent.any()):
            return
        version, is_fold = place
        if is_fold:
            self._send((version, False), lost | absent)
            return
        base, previous = self._ancestry.base(place), self._ancestry.previous(place)
        if base is None:
            lost = lost | absent
        else:
            self._send(base, absent)
            if previous is not None:
                self._spare[base] = self._spare.get(base, False) | lost
        self._is_old |= lost
        self._send_lost(place, previous or base, lost)

    def _send(self, place: Place, rows: Mask) -> None:
        if rows.any():
            self._pending[place] = self._pending.get(place, False) | rows

    def _send_lost(self, place: Place, older: Place | None, lost: Mask) -> None:
        if older is not None:
            self._send(older, lost)
            return
        for spare in sorted(self._spare, reverse=True):
            if spare < place:
                self._send(spare, lost & self._spare[spare])
                lost = lost & ~self._spare[spare]
        self.missing |= lost


def salvaged_by_label(readers: Iterable[SalvageReader]) -> dict[str, SalvagedRows | None]:
    """What was salvaged of each array, by its label; of all arrays of one label, as slot ``s`` of ``t`` and a table
    ``t/s``, together.
    """
    found: dict[str, SalvagedRows | None] = {}
    for reader in readers:
        label = array_label(reader.path)
        found[label] = merged(found.get(label), reader.salvaged())
    return found
