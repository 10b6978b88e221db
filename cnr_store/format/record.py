"""The commit record: all that a version says about itself, and that its readers need to know before they read it.

Each version has one, and so has each fold, which is the same version's rows without a chain. `record_document` has
what is stored of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from cnr_store.format.arrays import Doc
from cnr_store.format.layout import (
    COLUMN_BOUNDARIES,
    FLOATING,
    FOLDS,
    LATTICE,
    MOVING,
    RELATIVE,
    VERSIONS,
    is_shared,
    moved_nodes,
    record_key,
    seal,
    version_key,
)
from cnr_store.format.validate import Percent, Sizes, Time, VersionText
from cnr_store.policies.checks import Natural

# Features that readers of a codec's payloads must know, by its id.
_CODEC_FEATURES = {
    "cnr_lattice": frozenset({LATTICE}),
    "cnr_floating": frozenset({FLOATING, LATTICE}),
}
COUNTS = ("raw", "finer", "zero")
Move = tuple[float, int]
"""Where the floating grids of an array have moved to: scale and shift."""
STILL: Move = (1.0, 0)


@dataclass(frozen=True)
class ArrayEntry:
    """What a record says about one array."""

    # ``whole`` (every row is here), ``delta`` (the rows that changed since `base` was saved) or ``dense``
    kind: str
    shape: Sizes  # shape, element: shape, and the payload's element type (dense: the Zarr data type)
    element: str
    # Version whose state of this array the delta applies to; None unless a delta
    base: VersionText | None = None
    rows: Natural = 0  # rows written in this version; 0 for dense arrays
    nbytes: Natural = 0  # bytes of the objects that hold the array's data
    codec: Mapping[str, Any] | None = None  # configuration of the row codec, None for dense arrays
    aliases: tuple[str, ...] = ()  # other names of the same tensor in the model
    # Of optimizer state with a column for each column shard of its table: where in the table each begins, and behind
    # them the table's columns. Else empty.
    boundaries: tuple[Natural, ...] = ()
    # Path that its objects lie under, if that is not the plain path of its name (`layout`)
    stored: str | None = None
    # Of the rows written on a grid: how many are stored as they are, how many on a finer step than that of the array,
    # and how many are zeros there. Folds, whose rows were moved, have no counts.
    raw: Natural = 0
    finer: Natural = 0
    zero: Natural = 0
    # Of sampled values, those that are not 0, and how they compare with the base of a step: see `RowCounts`. Not stored
    nonzero: int = field(default=0, compare=False)
    large: int = field(default=0, compare=False)
    small: int = field(default=0, compare=False)
    # What readers must know of its payloads, beyond what `codec` asks for: of rows that were moved. Not stored.
    features: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def payload_features(self) -> frozenset[str]:
        """Features that a reader of its payloads must know."""
        codec = self.codec or {}
        is_relative = self.kind == "delta" and codec.get("relative") is True
        features = self.features | _CODEC_FEATURES.get(str(codec.get("id")), frozenset())
        features |= {MOVING} if self.move != STILL else frozenset()
        return features | {RELATIVE} if is_relative and codec.get("id") in _CODEC_FEATURES else features

    @property
    def move(self) -> Move:
        """Where the floating grids of all its rows have moved to in this version, also of those beneath a delta."""
        codec = self.codec or {}
        return codec.get("scale", 1.0), codec.get("shift", 0)

    @property
    def counts(self) -> dict[str, int]:
        """`raw`, `finer` and `zero` by their names."""
        return {name: getattr(self, name) for name in COUNTS}

    def to_json(self) -> Doc:
        """The entry as it is stored."""
        doc: Doc = {
            "kind": self.kind,
            "shape": list(self.shape),
            "element": self.element,
            "bytes": self.nbytes,
        }
        if self.kind != "dense":
            doc |= {"base": self.base, "rows": self.rows, "codec": dict(self.codec or {})}
        if self.aliases:
            doc["aliases"] = list(self.aliases)
        if self.boundaries:
            doc["boundaries"] = list(self.boundaries)
        return doc | {name: count for name, count in self.counts.items() if count}


def required_features(arrays: Mapping[str, ArrayEntry]) -> tuple[str, ...]:
    """Features that a reader must know of a version, or a fold, that is written now with these arrays."""
    bounded = {COLUMN_BOUNDARIES for entry in arrays.values() if entry.boundaries}
    return tuple(sorted(bounded.union(*(entry.payload_features for entry in arrays.values()))))


@dataclass(frozen=True)
class Record:
    """A committed version, or the fold of one."""

    # id, nonce: the version, and a random id of this very commit, by which a writer knows its own after a lost response
    id: VersionText
    nonce: str
    step: Natural  # step, time: the caller's step; seconds since 1970, UTC
    time: Time
    previous: VersionText | None  # the version that training continued from, None for the first
    needs: tuple[VersionText, ...]  # every other version that reading this one may touch, newest first
    # arrays, nodes: `ArrayEntry` and Zarr metadata document by path. Arrays of which no row was written have no
    # document.
    arrays: Mapping[str, ArrayEntry]
    nodes: Mapping[str, Doc]
    policy: Mapping[str, Any]  # name, inputs and decision
    restores: Natural  # loads that training has been through up to this version
    objects_bytes: Natural  # bytes of all the version's objects but this one
    manifest_sha256: str  # manifest_sha256, state_sha256: digests of those objects
    state_sha256: str
    metadata: Any = None  # the caller's, as tagged JSON
    requires: tuple[str, ...] = ()  # features that a reader must know
    spent: Percent = 0.0  # what its `restores` cost at most, in per cent of the loss
    # Bytes of the record's own object; 0 before it is encoded
    record_bytes: int = field(default=0, compare=False)
    prefix: str = VERSIONS  # where its objects lie: ``versions``, or ``folds``

    @property
    def home(self) -> str:
        """What holds its objects, for messages."""
        return f"version {self.id}" if self.prefix == VERSIONS else f"fold of version {self.id}"

    def key(self, *parts: str) -> str:
        """Key of one of its objects; of the record itself without parts."""
        if not parts:
            return record_key(self.id, self.prefix)
        # Several attempts at a fold may run at once, and only one record tells which of them is the fold.
        folder = (self.nonce,) if self.prefix == FOLDS else ()
        return version_key(self.id, *folder, self.stored(parts[0]), *parts[1:], prefix=self.prefix)

    def seal(self, path: str, first_row: int, first_column: int) -> int:
        """What ties a payload of this record to its place."""
        return seal(self.id, self.stored(path), first_row, first_column, self.prefix)

    def stored(self, path: str) -> str:
        """What lies under the plain `path` of an array or a group lies under this one."""
        return self.moved.get(path, path)

    @cached_property
    def moved(self) -> Mapping[str, str]:
        """Stored paths of arrays and groups by their plain ones, where the two differ."""
        return moved_nodes(self.stored_paths) if any(entry.stored for entry in self.arrays.values()) else {}

    @property
    def stored_paths(self) -> dict[str, str]:
        """Stored paths of all arrays, by their plain ones."""
        return {path: entry.stored or path for path, entry in self.arrays.items()}

    @property
    def kind(self) -> str:
        """``baseline`` if no array depends on another version, else ``delta``."""
        return "delta" if any(entry.kind == "delta" for entry in self.arrays.values()) else "baseline"

    @property
    def nbytes(self) -> int:
        """Bytes of all its objects, this record included."""
        return self.objects_bytes + self.record_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the arrays that do not depend on the number of ranks that saved it."""
        return sum(entry.nbytes for path, entry in self.arrays.items() if is_shared(path))

    @property
    def rows(self) -> int:
        """Table rows written (optimizer state that follows them is not counted again)."""
        return sum(entry.rows for _, entry in self._tables())

    @property
    def table_rows(self) -> int:
        """Rows of all tables."""
        return sum(entry.shape[0] for _, entry in self._tables())

    @property
    def full_bytes(self) -> int:
        """Bytes of all arrays as a model has them in memory, which is about what a full copy takes."""
        return sum(prod(entry.shape) * _element_bytes(entry.element) for entry in self.arrays.values())

    @property
    def stalled_seconds(self) -> float | None:
        """How long the save held training; None if the record does not say."""
        stalled: float | None = self.policy.get("seconds", {}).get("stalled")
        return stalled

    def _tables(self) -> Iterator[tuple[str, ArrayEntry]]:
        return ((path, entry) for path, entry in self.arrays.items() if path.endswith("/weight"))


def _element_bytes(element: str) -> int:
    """Bytes of a number of this type, whose name ends with its bits; those of a boolean are not named."""
    bits = re.search(r"\d+$", element)
    return int(bits[0]) // 8 if bits else 1
