"""One version, or one fold: what storage lists of it, against what its record and its manifest say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cnr_backends import Backend
from cnr_store.catalog.catalog import Catalog, VersionInfo, read_object
from cnr_store.chains.dense import dense_layout
from cnr_store.chains.link import Link, WrittenLink, open_link
from cnr_store.errors import CorruptionError, FormatError, StateError
from cnr_store.format import layout
from cnr_store.format.arrays import DenseGrid, Doc, document_bytes, group_document
from cnr_store.format.manifest import Part
from cnr_store.format.record import Record
from cnr_store.format.state import loads
from cnr_store.maintenance.verification.report import Finding, Leftovers

Rows = tuple[int, int]
STATE = "state/main.json"


@dataclass
class Soundness:
    """What is left of an inspection: little enough to be kept for every version of a store.

    Attributes
    ----------
    findings
        All that is damaged.
    manifest, state
        Whether these are sound; without its manifest no array of a version can be read.
    spoiled
        Paths of arrays that can't be read whole.
    most_rows
        By path of an array of rows, how many its objects have room for.
    leftovers
        Objects in its folder that it does not know.
    objects, nbytes
        What it consists of, its record included.
    """

    findings: list[Finding] = field(default_factory=list)
    manifest: bool = True
    state: bool = True
    spoiled: set[str] = field(default_factory=set)
    most_rows: dict[str, int] = field(default_factory=dict)
    leftovers: Leftovers | None = None
    objects: int = 1
    nbytes: int = 0


class VersionCheck:
    """Compares the objects of one record, by one listing.

    Attributes
    ----------
    soundness
        What was found so far.
    links, dense
        Arrays whose layout is sound, by path.
    nodes
        Metadata documents that must stand as objects of their own, too, by key.
    missing
        Keys of objects that are lost or of another size.
    """

    def __init__(self, backend: Backend, record: Record) -> None:
        self.backend, self.record = backend, record
        # Of its own, so that a manifest is forgotten with the inspection.
        self.catalog = Catalog(backend)
        self.soundness = Soundness(nbytes=record.nbytes)
        self.links: dict[str, Link] = {}
        self.dense: dict[str, DenseGrid] = {}
        self.missing: set[str] = set()
        self.nodes = _nodes(record)

    def look(self) -> None:
        """Compare what is listed with what must be there, and prove the small documents."""
        place = layout.version_key(self.record.id, prefix=self.record.prefix)
        listed = dict(self.backend.list_keys(place))
        listed.pop(self.record.key(), None)
        self._look_at_documents(listed)
        self._look_at_nodes(listed)
        if self.soundness.manifest:
            for path in self.record.arrays:
                self._look_at_array(path, listed)
            self.soundness.leftovers = leftovers(place, listed)

    def _look_at_documents(self, listed: dict[str, int]) -> None:
        self.soundness.manifest = self._is_proven("manifest", self.catalog.manifest, listed)
        if self.record.prefix == layout.VERSIONS:
            self.soundness.state = self._is_proven(STATE, self.catalog.state, listed)
        try:
            VersionInfo.from_record(self.record)
        except FormatError as error:
            self.soundness.state = False
            self.add(Finding(f"{self.record.home}: {error}", self.record.id, self.record.key()))

    def _is_proven(self, name: str, prove: Callable[[Record], Any], listed: dict[str, int]) -> bool:
        key = self.record.key(name)
        if self._take(key, listed) is None:
            return False
        try:
            prove(self.record)
        except (CorruptionError, FormatError) as error:
            self.add(Finding(str(error), self.record.id, key))
            return False
        return True

    def _look_at_nodes(self, listed: dict[str, int]) -> None:
        for key, doc in self.nodes.items():
            nbytes = self._take(key, listed)
            # Another length is another text, which may still say the same.
            if nbytes is not None and nbytes != _document_nbytes(doc):
                self.add(self.check_node(key))

    def check_node(self, key: str) -> Finding | None:
        """Whether the object that plain Zarr readers use says what the record says."""
        try:
            if loads(read_object(self.backend, key, self.record.home), key) == self.nodes[key]:
                return None
        except (CorruptionError, FormatError, RecursionError) as error:
            return Finding(f"{self.record.home}: {key}: {error}", self.record.id, key)
        what = f"{key} is not what was committed; plain Zarr readers need it, this library does not"
        return Finding(f"{self.record.home}: {what}", self.record.id, key)

    def _look_at_array(self, path: str, listed: dict[str, int]) -> None:
        try:
            objects = self._objects(path)
        except (CorruptionError, FormatError) as error:
            self.spoil(Finding(str(error), self.record.id, self.record.key(), path))
            return
        for key, part, rows in objects:
            nbytes = self._take(key, listed, path, rows)
            if nbytes is not None and nbytes != part.nbytes:
                self.missing.add(key)
                what = self.at(path, rows, f"{key} has {nbytes} bytes, {part.nbytes} were committed")
                self.spoil(Finding(what, self.record.id, key, path, rows))

    def _objects(self, path: str) -> Iterator[tuple[str, Part, Rows | None]]:
        """(key, size and tail, first and last row) of every object of an array; proves its layout first."""
        record, parts = self.record, self.catalog.manifest(self.record).parts(path)
        if record.arrays[path].kind == "dense":
            cut = self.dense[path] = dense_layout(self.catalog, record, path)
            return ((record.key(path, cut.key(index)), part, None) for index, part in parts.items())
        link = open_link(self.catalog, record, path)
        self.soundness.most_rows[path] = link.most_rows
        if link.entry.kind == "whole" and link.most_rows < link.entry.shape[0]:
            raise CorruptionError(
                f"{record.home}, {path}: {link.entry.shape[0]} rows are recorded, its objects have room for "
                f"{link.most_rows}"
            )
        self.links[path] = link
        if not isinstance(link, WrittenLink):
            return iter(())
        shards = link.shards
        return ((shards.key(shard), part, shards.rows_of(shard)) for shard, part in parts.items())

    def _take(
        self, key: str, listed: dict[str, int], path: str | None = None, rows: Rows | None = None
    ) -> int | None:
        """Size of an object, taken off the list; None, and noted, where it is lost."""
        self.soundness.objects += 1
        nbytes = listed.pop(key, None)
        if nbytes is None:
            self.missing.add(key)
            what = self.at(path, rows, f"{key} is lost from {self.backend.url}")
            self.spoil(Finding(what, self.record.id, key, path, rows))
        return nbytes

    def add(self, finding: Finding | None) -> None:
        """Note what a check of an object has found, if anything."""
        if finding is not None:
            self.soundness.findings.append(finding)

    def spoil(self, finding: Finding) -> None:
        """Note that the array concerned can't be read whole."""
        self.add(finding)
        if finding.path is not None:
            self.soundness.spoiled.add(finding.path)

    def at(self, path: str | None, rows: Rows | None, what: str) -> str:
        """A message with its place."""
        where = self.record.home + (f", {path}" if path else "")
        return f"{where}{f', rows {rows[0]} to {rows[1]}' if rows else ''}: {what}"


def leftovers(place: str, listed: dict[str, int]) -> Leftovers | None:
    """What remains of a listing once all that is known has been taken off it."""
    return Leftovers(place, len(listed), sum(listed.values()), min(listed)) if listed else None


def _nodes(record: Record) -> dict[str, Doc]:
    groups = {group for path in record.arrays for group in layout.parent_groups(path)}
    nodes = {
        record.key(path, layout.NODE): doc
        for path, doc in record.nodes.items()
        if path in record.arrays or path in groups
    }
    if record.prefix == layout.FOLDS:
        nodes[record.key(layout.NODE)] = group_document()
    return nodes


def _document_nbytes(doc: Doc) -> int | None:
    """Bytes of a document as this library writes it."""
    try:
        return len(document_bytes(doc))
    except StateError:  # nested deeper than can be written: not one of ours
        return None
