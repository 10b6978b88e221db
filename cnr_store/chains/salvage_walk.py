"""Walks the links of an array whose chain is damaged, and sends each row on to where it can be read.

Older values of a row lie beneath a version in its chain, and in the versions before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Self

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

    def chain(self, place: Place) -> Iterator[Place]:
        """A place, and those beneath it. A version's own rows come after its fold, in case that is damaged."""
        beneath: Place | None = place
        while beneath is not None:
            yield beneath
            beneath = (beneath[0], False) if beneath[1] else self.base(beneath)

    def move(self, place: Place) -> Move:
        """Where floating grids have moved to in a version that is there."""
        record = self._find(self._catalog.find_record, place[0]) or self._record
        return record.arrays[self._path].move

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


class Descent:
    """The way of rows down a chain, each to the link that gives it.

    `places`, `versions`: where rows were looked for, and as which version's values a place gives them: its own, or,
    where floating grids have moved since, the first one's.
    `origin`: (n,): the number of the place that gives a row, has it relative, or loses it; -1 of rows not asked for.
    `lost`: (n,) bool: rows that their origin may hold and can't give.
    `composed`, `doubtful`: (n,) bool: relative rows that came to an end; those that a damaged link may hold, which were
    looked for beneath it as if it did not.
    `pending`: what relative rows add up to, with the checksums of their segments.
    """

    def __init__(self, ancestry: Ancestry, start: Place, rows: Mask, columns: int) -> None:
        self._ancestry, self._start, self._rows = ancestry, start, rows
        self.places: list[Place] = []
        self.versions: list[str] = []
        self.origin = np.full(len(rows), -1, np.int64)
        self.lost, self.composed, self.doubtful = np.zeros((3, len(rows)), bool)
        self.pending = Pending(len(rows), columns)

    def go(self, visit: Visit, distrusted: Distrusted, *, only_relative: bool = False) -> Self:
        """Have `visit` take the rows. Those that the first place lacks only unless `only_relative`. Returns itself."""
        wanted = self._rows.astype(np.uint8)
        # These are read apart, since what they do not fit must not cost others their values.
        sure, unsure = np.zeros((2, len(wanted)), np.uint8)
        move = self._ancestry.move(self._start)
        for number, place in enumerate(self._ancestry.chain(self._start)):
            link = self._ancestry.link(place)
            self.places.append(place)
            self.versions.append(place[0] if link is None or link.move == move else self._start[0])
            link = link and link.at(move)
            skipped = self._visited(link, sure, visit) | self._visited(link, unsure, visit)
            asked, untrusted = wanted == 1, (wanted == 1) & distrusted.get(place, False)
            wanted[untrusted] = 0
            lost = self._visited(link, wanted, visit) | untrusted
            if place[1]:  # the version's own chain has the same rows
                lost[:], skipped[:] = False, False
            sure[skipped], unsure[skipped] = 0, PENDING
            self.doubtful |= skipped
            self.origin[asked & ((wanted != 1) | lost)] = number
            self.lost |= lost
            self.composed |= (relative := wanted == PENDING)
            sure[relative] = PENDING
            wanted[relative | lost | only_relative] = 0
            if not (wanted.any() or sure.any() or unsure.any()):
                break
        absent = wanted == 1
        self.origin[absent] = number
        uncomposed = (sure != 0) | (unsure != 0)
        self.composed &= ~uncomposed
        self.lost |= absent | uncomposed
        return self

    def _visited(self, link: Link | None, need: Array, visit: Visit) -> Mask:
        """Have rows taken of a link. Returns those that it may hold and can't give, which are needed as before."""
        asked: Mask = need != 0
        if link is None or not asked.any():
            return asked
        before, lost = need.copy(), np.zeros_like(asked)
        sums = self.pending.sums.copy() if (before == PENDING).any() else self.pending.sums
        visit(link, need, self.pending, lost)
        lost &= asked
        need[lost], self.pending.sums[lost] = before[lost], sums[lost]
        return lost


class Walk:
    """Finds each row needed along a version's chain or, where it is lost there, along that of an older version.

    `visit`, `probe`: what takes rows, and what does the same for proofs alone, so that nothing is kept of it.

    `missing`: (n,) bool: rows that no link can give.
    `salvaged`: (version, offsets of the rows that have its value instead of a newer one).
    `is_trusted`: whether no row was composed that does not come out as it was written. Such rows were added to
    `distrusted`, and must be looked for again.
    """

    def __init__(
        self,
        ancestry: Ancestry,
        need: Array,
        visit: Visit,
        probe: Visit,
        columns: int,
        distrusted: Distrusted,
    ) -> None:
        self._ancestry, self._visit, self._probe = ancestry, visit, probe
        self._columns, self._distrusted = columns, distrusted
        self.is_trusted = True
        self.missing: Mask = np.zeros(len(need), bool)
        self.salvaged: list[tuple[str, RowIds]] = []
        # By place: rows to look for from there on; lost rows, which may also be looked for from there on.
        self._todo: dict[Place, Mask] = {ancestry.newest(): need != 0}
        self._spare: dict[Place, Mask] = {}
        # Rows that are lost at a place go on from an older one, so each is gone on from once, and the walk ends.
        while self._todo:
            start = max(self._todo)
            self._go_on_from(start, self._todo.pop(start))

    def _go_on_from(self, start: Place, rows: Mask) -> None:
        """Look for rows along a chain, as they are in its first version, and send on those that are lost there."""
        found = Descent(self._ancestry, start, rows, self._columns).go(self._visit, self._distrusted)
        wrong = self._wrong(found)
        lost = found.lost | wrong
        for number, place in enumerate(found.places):
            here = found.origin == number
            if (here & wrong).any():
                self._distrusted[place] = self._distrusted.get(place, False) | (here & wrong)
                self.is_trusted = False
            given = np.flatnonzero(here & ~lost)
            if given.size and start != self._ancestry.newest():
                self.salvaged.append((found.versions[number], given))
            self._send_lost(place, here & lost)

    def _wrong(self, found: Descent) -> Mask:
        """The rows that were composed and do not come out as they were written, or may not."""
        wrong, doubtful = np.zeros_like(self.missing), found.composed & found.doubtful
        for where, rows, is_right in found.pending.checked(~found.composed | doubtful):
            if not is_right:
                wrong[rows] = True
                self._ancestry.note(
                    CorruptionError(f"{where}: relative rows do not come out as they were written")
                )
        for number in np.unique(found.origin[doubtful]).tolist():
            wrong |= doubtful & (found.origin == number) & ~self._proven(found.places[number])
        return wrong

    def _proven(self, place: Place) -> Mask:
        """The rows of the relative segments of a place that come out as they were written, by their checksums."""
        proven = np.zeros_like(self.missing)
        found = Descent(self._ancestry, place, ~proven, self._columns)
        found.go(self._probe, {}, only_relative=True)
        for _, rows, is_right in found.pending.checked(~found.composed):
            proven[rows] = is_right
        return proven

    def _send_lost(self, place: Place, lost: Mask) -> None:
        """Look for rows that are lost at a place from the version before it on, or from its base on."""
        base, previous = self._ancestry.base(place), self._ancestry.previous(place)
        if previous is not None and base is not None:
            self._spare[base] = self._spare.get(base, False) | lost
        if (older := previous or base) is not None:
            self._send(older, lost)
            return
        for spare in sorted(self._spare, reverse=True):
            if spare < place:
                self._send(spare, lost & self._spare[spare])
                lost = lost & ~self._spare[spare]
        self.missing |= lost

    def _send(self, place: Place, rows: Mask) -> None:
        if rows.any():
            self._todo[place] = self._todo.get(place, False) | rows
