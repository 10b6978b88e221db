"""Walks the links of an array whose chain is damaged, and sends each row on to where it can be read.

Older values of a row lie beneath a version in its chain, and in the versions before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from cnr_codecs import Pending
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import Array
from cnr_store.chains.link import PENDING, Link, empty_link, open_link
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.record import Move, Record

Place = tuple[str, bool]
"""A version, and whether its fold is meant. The greatest is the newest; a fold comes before its version's own rows."""
RowIds = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Visit = Callable[[Link, Array, Pending, Mask], None]
"""Takes the rows needed from a link, clears their `need`, and marks those that it may hold and can't give."""
Distrusted = dict[Place, Mask]
"""Rows that a place has relative to what does not lie beneath it."""


class Ancestry:
    """The places that may hold rows of one array of a version, or older values of them. Thread-safe.

    `damage`: the first damage found; None as long as there is none.
    """

    def __init__(self, catalog: Catalog, record: Record, path: str) -> None:
        self._catalog, self._record, self._path = catalog, record, path
        self._links: dict[Place, Link | None] = {}
        self._lock = threading.Lock()
        self.damage: CorruptionError | None = None

    def note(self, error: CorruptionError) -> None:
        """Remember damage, if it is the first."""
        self.damage = self.damage or error

    def newest(self) -> Place:
        """Where the version's rows are read first."""
        return self._place(self._record.id) or (self._record.id, False)

    def link(self, place: Place) -> Link | None:
        """The link of a place; None if it can't be read at all, so that nobody knows which rows it holds."""
        with self._lock:
            if place in self._links:
                return self._links[place]
        record, link = self._home(place), None
        if record is not None:
            try:
                entry = record.arrays[self._path]
                # Without rows there is nothing to lose, whatever became of the manifest.
                is_empty = entry.kind == "delta" and entry.rows == 0
                link = (empty_link if is_empty else open_link)(self._catalog, record, self._path)
            except CorruptionError as error:
                self.note(error)
        with self._lock:
            return self._links.setdefault(place, link)

    def base(self, place: Place) -> Place | None:
        """Where the rows are that a version does not hold. None if it is whole, or if its base is lost."""
        record = self._home(place)
        base = None if record is None else record.arrays[self._path].base
        return None if base is None or base >= place[0] else self._place(base)

    def previous(self, place: Place) -> Place | None:
        """Where all rows are as they were before a version. None if it continued none, or if that is gone."""
        record = self._home(place)
        previous = None if record is None else record.previous
        return None if previous is None or previous >= place[0] else self._place(previous)

    def links(self) -> Iterator[Link]:
        """Every link that can be read, newest first, as they are asked for."""
        places = {self.newest()}
        while places:
            place = max(places)
            places.remove(place)
            link = self.link(place)
            if link is not None:
                yield link
            version, is_fold = place
            beneath = [(version, False)] if is_fold else [self.base(place), self.previous(place)]
            places.update(each for each in beneath if each is not None)

    def opened(self) -> list[Link]:
        """The links that were read so far."""
        with self._lock:
            return [link for link in self._links.values() if link is not None]

    def _place(self, version: str) -> Place | None:
        record = self._find(self._catalog.find_record, version)
        if record is None:
            return None
        is_folded = record.arrays[self._path].kind == "delta" and self._find(self._catalog.find_fold, version)
        return version, bool(is_folded)

    def _home(self, place: Place) -> Record | None:
        version, is_fold = place
        return self._find(self._catalog.find_fold if is_fold else self._catalog.find_record, version)

    def _find(self, find: Callable[[str], Record | None], version: str) -> Record | None:
        """The record of a version or a fold, if it is sound and has the array with the same columns and type."""
        try:
            record = find(version)
        except CorruptionError as error:
            self.note(error)
            return None
        except FormatError:
            return None
        here = self._record.arrays[self._path]
        entry = None if record is None else record.arrays.get(self._path)
        if entry is None or entry.kind == "dense":
            return None
        return record if (entry.shape[1:], entry.element) == (here.shape[1:], here.element) else None


class Walk:
    """One walk over an array's links, newest first, until each row needed is found.

    `move`: where floating grids have moved to in the version that is read. Older values go by that of the version that
    they stand for, which is the first one that a lost row is sent on to, or that one's own.
    `visit`, `probe`: what takes rows, and what does the same for proofs alone, so that nothing is kept of it.

    `missing`: (n,) bool: rows that no link can give.
    `is_trusted`: whether no row was composed that does not come out as it was written. Such rows were added to
    `distrusted`, and must be looked for again.
    """

    def __init__(
        self,
        ancestry: Ancestry,
        move: Move,
        need: Array,
        visit: Visit,
        probe: Visit,
        columns: int,
        distrusted: Distrusted,
    ) -> None:
        self._ancestry, self._visit, self._probe = ancestry, visit, probe
        self._columns, self._distrusted = columns, distrusted
        self.is_trusted = True
        # By place: rows to look for there; lost rows, which may also be looked for there.
        self._pending: dict[Place, Mask] = {ancestry.newest(): need != 0}
        self._spare: dict[Place, Mask] = {}
        self._is_old = np.zeros(len(need), bool)
        # Of each row, as whose value it is read: versions, and where grids had moved to in them.
        self._as_of = np.zeros(len(need), np.int64)
        self._readings: list[tuple[str, Move]] = [(ancestry.newest()[0], move)]
        self._source = np.full(len(need), -1, np.int64)
        self._versions: list[str] = []
        self.missing: Mask = np.zeros(len(need), bool)
        # Whatever rows are sent on goes to an older place, so each place is visited once, and the walk ends.
        while self._pending:
            place = max(self._pending)
            self._visit_place(place, self._pending.pop(place))

    def salvaged(self) -> Iterator[tuple[str, RowIds]]:
        """(version, offsets of the rows that have its value instead of a newer one)."""
        for number, version in enumerate(self._versions):
            rows = np.flatnonzero(self._is_old & (self._source == number))
            if rows.size:
                yield version, rows

    def _visit_place(self, place: Place, rows: Mask) -> None:
        link = self._ancestry.link(place)
        if link is None:
            self._visit_link(place, place[0], None, rows)
            return
        for number in np.unique(self._as_of[rows]).tolist():
            version, move = self._readings[number]
            version = place[0] if move == link.move else version
            self._visit_link(place, version, link.at(move), rows & (self._as_of == number))

    def _visit_link(self, place: Place, version: str, link: Link | None, rows: Mask) -> None:
        distrusted = rows & self._distrusted.get(place, False)
        need = (rows & ~distrusted).astype(np.uint8)
        pending = Pending(len(need), self._columns)
        lost = rows if link is None else _visited(link, need, pending, self._visit) | distrusted
        lost = lost | self._compose(place, link, need, lost, pending)
        absent = (need != 0) & ~lost
        self._source[rows & (need == 0) & ~lost] = len(self._versions)
        self._versions.append(version)
        if not (lost.any() or absent.any()):
            return
        if place[1]:
            self._send((place[0], False), lost | absent)
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

    def _compose(self, place: Place, link: Link | None, need: Array, lost: Mask, pending: Pending) -> Mask:
        """Compose the rows that a place has relative, and clear their `need`. Returns those that can't be composed."""
        relative: Mask = (need == PENDING) & ~lost
        found, skipped = np.zeros_like(relative), np.zeros_like(relative)
        if link is not None:
            found, skipped = self._add_up(place, link.move, relative, pending, self._visit)
        unproven = np.zeros_like(found)
        for where, rows, is_right in pending.checked(~found | skipped):
            if not is_right:
                unproven[rows] = True
                self._ancestry.note(
                    CorruptionError(f"{where}: relative rows do not come out as they were written")
                )
        if skipped.any():
            unproven |= skipped & ~self._proven(place)
        self._distrust(place, unproven)
        found &= ~unproven
        need[found] = 0
        relative &= ~found
        return relative

    def _add_up(
        self, place: Place, move: Move, relative: Mask, pending: Pending, visit: Visit
    ) -> tuple[Mask, Mask]:
        """Add up the rows that a place has relative, link by link. Returns the rows that come to an end, and which of
        these a damaged link may hold: they were looked for beneath it, as if it did not.
        """
        found, skipped = np.zeros_like(relative), np.zeros_like(relative)
        # These are read apart, since what they do not fit must not cost others their values.
        sure, unsure = np.where(relative, PENDING, 0).astype(np.uint8), np.zeros(len(relative), np.uint8)
        beneath = self._ancestry.base(place)
        while beneath is not None and (sure.any() or unsure.any()):
            link = self._ancestry.link(beneath)
            link = link and link.at(move)
            failed, again = (_descend(link, still, found, pending, visit) for still in (sure, unsure))
            if beneath[1] and (failed.any() or again.any()):
                beneath = beneath[0], False  # the version's own chain has the same rows
                continue
            sure[failed], unsure[failed] = 0, PENDING
            skipped |= failed
            beneath = self._ancestry.base(beneath)
        return found, skipped & found

    def _proven(self, place: Place) -> Mask:
        """The rows of the relative segments of a place that come out as they were written, by their checksums."""
        link, proven = self._ancestry.link(place), np.zeros_like(self.missing)
        need, pending = np.ones(len(proven), np.uint8), Pending(len(proven), self._columns)
        if link is not None:
            lost = _visited(link, need, pending, self._probe)
            found, _ = self._add_up(place, link.move, (need == PENDING) & ~lost, pending, self._probe)
            for _, rows, is_right in pending.checked(~found):
                proven[rows] = is_right
        return proven

    def _distrust(self, place: Place, rows: Mask) -> None:
        if rows.any():
            self._distrusted[place] = self._distrusted.get(place, False) | rows
            self.is_trusted = False

    def _send(self, place: Place, rows: Mask) -> None:
        if rows.any():
            self._pending[place] = self._pending.get(place, False) | rows

    def _send_lost(self, place: Place, older: Place | None, lost: Mask) -> None:
        if older is not None:
            self._send_old(older, lost)
            return
        for spare in sorted(self._spare, reverse=True):
            if spare < place:
                self._send_old(spare, lost & self._spare[spare])
                lost = lost & ~self._spare[spare]
        self.missing |= lost

    def _send_old(self, place: Place, rows: Mask) -> None:
        """Send rows on to be read as that place has them."""
        link = self._ancestry.link(place)
        if link is not None and rows.any():
            self._as_of[rows] = len(self._readings)
            self._readings.append((place[0], link.move))
        self._send(place, rows)


def _visited(link: Link, need: Array, pending: Pending, visit: Visit) -> Mask:
    """The rows that a link may hold and can't give."""
    lost: Mask = np.zeros(len(need), bool)
    visit(link, need, pending, lost)
    return lost


def _descend(link: Link | None, still: Array, found: Mask, pending: Pending, visit: Visit) -> Mask:
    """Add up what a link has of pending rows, and note those that it ends. Returns those that it can't give."""
    before: Mask = still != 0
    if link is None or not before.any():
        return before
    sums = pending.sums.copy()
    failed = _visited(link, still, pending, visit) & before
    found |= before & (still == 0) & ~failed
    still[failed], pending.sums[failed] = PENDING, sums[failed]
    return failed
