"""The one way to read rows: composes them from the links of an array's chain.

An array's chain is the version itself, then its `base`, that one's `base`, and so on to a whole one. The value of
a row is the newest one along the chain, so a walk goes newest first and decodes each link's payload at most once. A row
that is relative to its base is added up until a link has its codes. Where a version was folded, its fold is whole and
holds the same rows, so the walk stops there. A version may be folded while it is read, and what it depended on be
removed. So what is missing is looked for in newer folds before it counts as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from cnr_backends import Transfer
from cnr_codecs import ParentError, Pending, Segment, array_dtype
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import Array, allocate
from cnr_store.chains.bounded_cache import PayloadCache
from cnr_store.chains.link import PENDING, CompositionError, Link, Strays, open_link
from cnr_store.errors import CorruptionError, FormatError, VersionNotFoundError
from cnr_store.format.layout import RELATIVE
from cnr_store.format.record import STILL, ArrayEntry, Record

T = TypeVar("T")
REGION_BYTES = 8 << 20
READ_WORKERS = 8
"""Threads of whoever reads a whole version."""


class ArrayReader:
    """One array of rows at one version.

    `payloads`: keeps payloads of the chain, but not of the whole link found first. For readers that ask for less than a
    chunk of a delta at a time; None to keep nothing.

    `shape`: (rows, dim) or (rows,).
    `dtype`, `element`: numpy type of the values; the payload's element type (``bfloat16`` values come as float32).
    """

    def __init__(
        self, catalog: Catalog, record: Record, path: str, payloads: PayloadCache | None = None
    ) -> None:
        self._catalog, self._record, self._payloads = catalog, record, payloads
        self.version, self.path, self._lock = record.id, path, threading.Lock()
        entry = _entry(record, path)
        self.shape, self.element = entry.shape, entry.element
        self.dtype, self.columns = array_dtype(entry.element), (*entry.shape, 1)[1]
        self._links = self._first_links = list[Link]()
        with catalog.reading(record):
            try:
                self._links = self._find_links(is_first=True)
            except CorruptionError:
                catalog.look_for_folds()  # what it depends on may have been removed while it was looked up
                self._links = self._find_links(is_first=True)
        self._first_links = self._links

    @property
    def links(self) -> list[Link]:
        """The chain, newest first; the last one is whole."""
        return self._links

    def new_rows(self, rows: int) -> Array:
        """Memory for rows of the array, (rows, columns), its values undefined."""
        return allocate((rows, self.columns), self.dtype, f"version {self.version}, {self.path}")

    def read(
        self, first_row: int, out: Array, need: Array | None = None, *, strays: Strays | None = None
    ) -> Array:
        """Fill `out`, (n, columns) in `dtype`, with rows first_row ... first_row + n - 1.

        `need`: (n,): the rows to read are those where it is not 0; None for all.
        `strays`: gets those of the rows that are not stored as codes of its grid.

        Returns: (n,) bool: the rows that some delta of the chain wrote, which may differ from those of the whole link
        beneath; all rows, if the chain was folded since this reader was made.
        """

        def fill(link: Link, need: Array, pending: Pending | None) -> None:
            link.fill(first_row, out, need, pending, strays=strays)

        return self._walk(first_row, np.ones(len(out), bool) if need is None else need, fill, out)[1]

    def take(self, first_row: int, need: Array) -> tuple[list[Segment], Array]:
        """The same rows as they are stored: segments of a chunk of those n rows; and what `read` returns."""
        taken, changed = self._walk(
            first_row, need, lambda link, need, pending: link.take(first_row, need, pending)
        )
        return [segment for segments in taken for segment in segments], changed

    def _walk(
        self,
        first_row: int,
        wanted: Array,
        visit: Callable[[Link, Array, Pending | None], T],
        out: Array | None = None,
    ) -> tuple[list[T], Array]:
        """What `visit` returns for each link, newest first, until it has cleared every `need`; and what `read` returns.

        `visit` may fill `out`. Once more if a fold replaced the chain meanwhile.
        """

        def walk(links: Sequence[Link]) -> tuple[list[T], Array]:
            need = (wanted != 0).astype(np.uint8)
            pending, visited, whole = self._pending(links, len(need), out), [], np.zeros(len(need), bool)
            for link in links:
                if link.entry.kind == "whole":
                    whole = need == 1  # a row of 2 is relative in a delta
                if need.any():
                    visited.append(visit(link, need, pending))
            self._check_complete(links, first_row, need)
            try:
                if pending is not None:
                    pending.prove()
            except ParentError as error:
                raise CompositionError(f"{error}; read for version {self.version}") from error
            # A fold does not say which rows the deltas in it wrote, and the caller goes by the chain as it was.
            return visited, ~whole if links is self._first_links else np.ones_like(whole)

        with self._catalog.reading(self._record):
            links = self._links
            try:
                return walk(links)
            except CorruptionError:
                newer = self._look_again(links)
                if newer is links:
                    raise
            return walk(newer)

    def _pending(self, links: Sequence[Link], rows: int, out: Array | None) -> Pending | None:
        """What adds up relative rows, in the memory of `out` where that can hold it; None if no link may have any."""
        if not any(RELATIVE in link.record.requires for link in links):
            return None
        is_moved = links[0].move != STILL
        has_room = out is not None and not is_moved and self.element == "float32" and out.flags.c_contiguous
        return Pending(rows, self.columns, out if has_room else None)

    def _look_again(self, links: list[Link]) -> list[Link]:
        """The links of the chain as it is now; `links` itself if they still are."""
        with self._lock:
            if self._links is links:  # no other thread has looked meanwhile
                self._catalog.look_for_folds()
                newer = self._find_links(is_first=False)
                if [link.record.home for link in newer] != [link.record.home for link in links]:
                    self._links = newer
            return self._links

    def _find_links(self, *, is_first: bool) -> list[Link]:
        """The links of the chain, proven to fit each other."""
        links = []
        for record in chain(self._catalog, self._record, self.path):
            # Readers' chunks are cut as the first whole link is, so that one's are read once; others' are not.
            is_read_once = is_first and record.arrays[self.path].kind == "whole"
            link = open_link(self._catalog, record, self.path, None if is_read_once else self._payloads)
            link.move = self._record.arrays[self.path].move
            links.append(link)
        self._check_links(links)
        return links

    def _check_links(self, links: Sequence[Link]) -> None:
        newest = links[0].entry
        for link in links[1:]:
            if link.entry.shape[1:] != newest.shape[1:] or link.entry.element != newest.element:
                raise CorruptionError(
                    f"version {self.version}, {self.path}: {newest.shape} {newest.element} depends on version "
                    f"{link.version}, which has {link.entry.shape} {link.entry.element}"
                )
        # Before memory is taken: a record may claim any number of rows, its objects can't.
        if sum(link.most_rows for link in links) < newest.shape[0]:
            raise CorruptionError(
                f"version {self.version}, {self.path}: {newest.shape[0]} rows are recorded, more than the objects of "
                f"its chain ({', '.join(link.version for link in links[:3])}) have room for"
            )

    def _check_complete(self, links: Sequence[Link], first_row: int, need: Array) -> None:
        if (need == PENDING).any():
            row = first_row + int(np.flatnonzero(need == PENDING)[0])
            raise CompositionError(
                f"version {self.version}, {self.path}: row {row} is relative to older ones, and is in no link beneath "
                f"({', '.join(link.version for link in links)})"
            )
        if need.any():
            lost = first_row + int(np.flatnonzero(need)[0])
            raise CorruptionError(
                f"version {self.version}, {self.path}: {int((need != 0).sum())} rows from row {lost} on are in no link "
                f"of its chain ({', '.join(link.version for link in links)})"
            )

    def regions(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of pieces that cover the array, cut so that no payload is decoded in two of them."""
        rows, rows_each = self.shape[0], region_rows(self.links, self.columns * self.dtype.itemsize)
        for first_row in range(0, rows, rows_each):
            yield first_row, min(rows_each, rows - first_row)

    def read_regions(self, transfer: Transfer) -> Iterator[tuple[int, Array]]:
        """(first row, values) of regions that cover the array, ascending."""

        def read(region: tuple[int, int]) -> tuple[int, Array]:
            first_row, rows = region
            values = self.new_rows(rows)
            self.read(first_row, values)
            return first_row, values

        return transfer.map(read, self.regions())


def region_rows(links: Iterable[Link], row_bytes: int) -> int:
    """Rows of a region: as many as the largest chunk of `links` has, and at least `REGION_BYTES` of them."""
    rows = max((link.chunk_rows for link in links), default=1)
    while rows * row_bytes < REGION_BYTES:
        rows *= 2
    return rows


def chain(catalog: Catalog, record: Record, path: str) -> Iterator[Record]:
    """The records whose objects hold an array's rows, newest first: versions, or the fold that ends the walk."""
    entry = _entry(record, path)
    while entry.base is not None:
        fold = _fold(catalog, record, path)
        if fold is None and catalog.find_record(entry.base) is None:
            catalog.look_for_folds()  # it may have been folded, and its base removed, since they were listed
            fold = _fold(catalog, record, path)
        if fold is not None:
            yield fold
            return
        yield record
        record, entry = _base(catalog, record, path, entry.base)
    yield record


def own_chain(catalog: Catalog, version: str, path: str) -> Iterator[tuple[str, Record | None]]:
    """The ids of a version and of those beneath it in an array's chain, whatever was folded, newest first.

    The record is None of the last one, if that is damaged, lost, or lacks the array.
    """
    base: str | None = version
    while base is not None:
        version, record = base, find_readable(catalog, base)
        entry = None if record is None else record.arrays.get(path)
        yield version, None if entry is None else record
        base = None if entry is None or entry.base is None or entry.base >= version else entry.base


def find_readable(catalog: Catalog, version: str) -> Record | None:
    """The record of a version, None if it is missing or damaged."""
    try:
        return catalog.find_record(version)
    except (CorruptionError, FormatError):
        return None


def _entry(record: Record, path: str) -> ArrayEntry:
    entry = record.arrays.get(path)
    if entry is None or entry.kind == "dense":
        raise VersionNotFoundError(f"version {record.id} has no array of rows {path}")
    return entry


def _fold(catalog: Catalog, record: Record, path: str) -> Record | None:
    fold = catalog.find_fold(record.id)
    if fold is None or path not in fold.arrays:
        return None
    folded, entry = fold.arrays[path], record.arrays[path]
    if (folded.kind, *_kind(folded)) != ("whole", *_kind(entry)):
        raise CorruptionError(
            f"{fold.home}, {path}: {folded.kind} {_kind(folded)}; the version has {_kind(entry)}"
        )
    return fold


def _kind(entry: ArrayEntry) -> tuple[object, ...]:
    """What a version and its fold have in common."""
    return entry.shape, entry.element, *entry.move


def _base(catalog: Catalog, record: Record, path: str, base: str) -> tuple[Record, ArrayEntry]:
    # A base is always older, so a chain that was forged into a circle ends here.
    if base >= record.id:
        raise CorruptionError(f"version {record.id}, {path}: depends on {base}, which is not older")
    older = catalog.find_record(base)
    if older is None or path not in older.arrays:
        raise CorruptionError(f"version {record.id}, {path}: its base {base} is lost")
    return older, older.arrays[path]
