"""Finds where older values of an array's rows lie: beneath a version in its chain, and in the versions before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.link import Link, empty_link, open_link
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.record import Record

Place = tuple[str, bool]
"""A version, and whether its fold is meant. The greatest is the newest; a fold comes before its version's own rows."""


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
