"""Checks one version, or one fold: compares what storage lists of it with its record and its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from cnr_backends import Backend
from cnr_store.catalog.catalog import Catalog, count_parts, read_state_part
from cnr_store.catalog.objects import read_object
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.dense import dense_layout
from cnr_store.chains.link import Link, open_link
from cnr_store.errors import CorruptionError, FormatError, StateError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid, Doc, document_bytes
from cnr_store.format.manifest import Part
from cnr_store.format.record import Record
from cnr_store.format.state import loads
from cnr_store.maintenance.verification.report import Finding, Leftovers, find_leftovers

RowSpan = tuple[int, int]
STATE = "state/main.json"
STATES = "state/"
"""What the places of all parts of a state begin with."""


@dataclass
class Soundness:
    """The result of a check. It is small, because that of every version of a store is held."""

    findings: list[Finding] = field(default_factory=list)  # all damage found
    # manifest, state: whether these can be read. Without its manifest no array of a version can be. A state has the
    # parts of all ranks that saved it.
    manifest: bool = True
    state: bool = True
    unreadable: set[str] = field(default_factory=set)  # paths of arrays that can't be read whole
    # max_rows, chunk_rows: by path of an array of rows, how many its objects have room for, and how many a chunk has
    max_rows: dict[str, int] = field(default_factory=dict)
    chunk_rows: dict[str, int] = field(default_factory=dict)
    leftovers: Leftovers | None = None  # objects in its folder that neither record nor manifest names
    objects: int = 1  # objects, nbytes: its objects and their bytes, its record included
    nbytes: int = 0

    def can_read(self, path: str) -> bool:
        """Whether the objects of an array can be read, as far as was checked."""
        return self.manifest and path not in self.unreadable


class VersionCheck:
    """Compares the objects of one record with one listing.

    `soundness`: the result so far.
    `links`, `dense`: arrays whose layout is sound, by path.
    `nodes`: metadata documents that must also be stored as objects of their own, by key: those of dense arrays.
    `missing`: keys of objects that are lost or of another size.
    """

    def __init__(self, backend: Backend, record: Record) -> None:
        self.backend, self.record = backend, record
        # A catalog of its own, so that the manifest's memory is freed with the check.
        self.catalog = Catalog(backend)
        self.soundness = Soundness(nbytes=record.nbytes)
        self.links: dict[str, Link] = {}
        self.dense: dict[str, DenseGrid] = {}
        self.missing: set[str] = set()
        self.nodes = _nodes(record)

    def run(self) -> Self:
        """Compare the listing with what the record names, and validate the small documents. Returns itself."""
        folder = layout.version_key(self.record.id, prefix=self.record.prefix)
        listed = dict(self.backend.list_keys(folder))
        listed.pop(self.record.key(), None)
        self._check_documents(listed)
        self._check_nodes(listed)
        if self.soundness.manifest:
            for path in self.record.arrays:
                self._check_array(path, listed)
            self.soundness.leftovers = find_leftovers(folder, listed)
        return self

    def _check_documents(self, listed: dict[str, int]) -> None:
        self.soundness.manifest = self._is_valid("manifest", self.catalog.manifest, listed)
        if self.record.prefix == layout.VERSIONS:
            self.soundness.state = self._check_state(listed)
        try:
            VersionInfo.from_record(self.record)
        except FormatError as error:
            self.soundness.state = False
            self.add(f"{self.record.home}: {error}", self.record.key())

    def _check_state(self, listed: dict[str, int]) -> bool:
        """Check the state, and the part of each rank that saved it."""
        if not self._is_valid(STATE, self.catalog.state, listed):
            if layout.STATE_PARTS in self.record.requires:
                # Nothing tells which parts it had: none that is there is a leftover.
                for key in [key for key in listed if key.startswith(self.record.key(STATES))]:
                    del listed[key]
            return False
        state, sound = self.catalog.state(self.record), True
        for rank in range(count_parts(state)):
            read = partial(read_state_part, self.catalog, state=state, rank=rank)
            sound &= self._is_valid(layout.state_part(rank), read, listed)
        return sound

    def _is_valid(self, name: str, read: Callable[[Record], Any], listed: dict[str, int]) -> bool:
        key = self.record.key(name)
        if self._take(key, listed) is None:
            return False
        try:
            read(self.record)
        except (CorruptionError, FormatError) as error:
            self.add(str(error), key)
            return False
        return True

    def _check_nodes(self, listed: dict[str, int]) -> None:
        for key, doc in self.nodes.items():
            nbytes = self._take(key, listed)
            # A document of another length has another text, which may still mean the same.
            if nbytes is not None and nbytes != _document_nbytes(doc) and (what := self.compare_node(key)):
                self.add(what, key)

    def compare_node(self, key: str) -> str | None:
        """A message if the object that plain Zarr readers use does not say what the record says."""
        what = f"{key} is not what was committed; plain Zarr readers need it, this library does not"
        try:
            if loads(read_object(self.backend, key, self.record.home), key) == self.nodes[key]:
                return None
        except (CorruptionError, FormatError, RecursionError) as error:
            what = f"{key}: {error}"
        return f"{self.record.home}: {what}"

    def _check_array(self, path: str, listed: dict[str, int]) -> None:
        try:
            objects = self._objects(path)
        except (CorruptionError, FormatError) as error:
            self.add(str(error), self.record.key(), path)
            return
        for key, part, rows in objects:
            nbytes = self._take(key, listed, path, rows)
            if nbytes is not None and nbytes != part.nbytes:
                self.missing.add(key)
                what = f"{key} has {nbytes} bytes, {part.nbytes} were committed"
                self.add(self.at(path, rows, what), key, path, rows)

    def _objects(self, path: str) -> Iterator[tuple[str, Part, RowSpan | None]]:
        """(key, size and tail, first and last row) of every object of an array. Validates its layout first."""
        record, parts = self.record, self.catalog.manifest(self.record).parts(path)
        if record.arrays[path].kind == "dense":
            grid = self.dense[path] = dense_layout(self.catalog, record, path)
            return ((record.key(path, grid.key(index)), part, None) for index, part in parts.items())
        link = open_link(self.catalog, record, path)
        self.soundness.max_rows[path], self.soundness.chunk_rows[path] = link.most_rows, link.chunk_rows
        if link.entry.kind == "whole" and link.most_rows < link.entry.shape[0]:
            raise CorruptionError(
                f"{record.home}, {path}: {link.entry.shape[0]} rows are recorded, its objects have room for "
                f"{link.most_rows}"
            )
        self.links[path] = link
        shards = link.shards
        return ((shards.key(shard), part, shards.rows_of(shard)) for shard, part in link.parts.items())

    def _take(
        self, key: str, listed: dict[str, int], path: str | None = None, rows: RowSpan | None = None
    ) -> int | None:
        """Remove an object from the listing and return its size; None, and a finding, if it is lost."""
        self.soundness.objects += 1
        nbytes = listed.pop(key, None)
        if nbytes is None:
            self.missing.add(key)
            self.add(self.at(path, rows, f"{key} is lost from {self.backend.url}"), key, path, rows)
        return nbytes

    def add(
        self,
        what: str,
        key: str,
        path: str | None = None,
        rows: RowSpan | None = None,
        row_count: int | None = None,
    ) -> None:
        """Add a finding. An array with one can't be read whole. By default it concerns all `rows` that are written."""
        if row_count is None:
            row_count = self._most_rows(key, path, rows)
        self.soundness.findings.append(Finding(what, self.record.id, key, path, rows, row_count))
        if path is not None:
            self.soundness.unreadable.add(path)

    def _most_rows(self, key: str, path: str | None, rows: RowSpan | None) -> int:
        """How many rows a damaged object may hold."""
        if path is not None:
            written = self.record.arrays[path].rows
            return written if rows is None else min(written, rows[1] + 1 - rows[0])
        if key == self.record.key("manifest"):
            return sum(entry.rows for entry in self.record.arrays.values())
        return 0

    def at(self, path: str | None, rows: RowSpan | None, what: str) -> str:
        """A message with its place."""
        where = self.record.home + (f", {path}" if path else "")
        return f"{where}{f', rows {rows[0]} to {rows[1]}' if rows else ''}: {what}"


def _nodes(record: Record) -> dict[str, Doc]:
    dense = (path for path, entry in record.arrays.items() if entry.kind == "dense" and path in record.nodes)
    return {record.key(path, layout.NODE): record.nodes[path] for path in dense}


def _document_nbytes(doc: Doc) -> int | None:
    """Bytes of a document as this library writes it; None if it is nested too deep to be one that it wrote."""
    try:
        return len(document_bytes(doc))
    except StateError:
        return None
