"""The commit record: a version's group metadata, written last, that says everything about the version.

It is ``versions/ID/zarr.json``: a Zarr v3 group with consolidated metadata and ``attributes.cnr``. A version
exists if and only if this object holds ``attributes.cnr``. A *void* record at the same key (``attributes.cnr_void``)
burns the id instead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.arrays import Doc, group_document
from cnr_store.format.layout import FEATURES, FORMAT, VersionId
from cnr_store.format.state import dumps, loads

_NO_DIGEST = "0" * 64
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
KINDS = ("whole", "delta", "dense")


@dataclass(frozen=True)
class ArrayEntry:
    """What a record says of one array.

    Attributes
    ----------
    kind
        ``whole`` (every row is here), ``delta`` (the rows that changed since `base` was saved) or ``dense``.
    base
        Version whose state of this array the delta applies to; None unless a delta.
    shape, element
        Shape, and the payload's element type (dense: the Zarr data type).
    rows
        Rows written in this version; 0 for dense arrays.
    nbytes
        Bytes of the objects that hold the array's data.
    codec
        Configuration of the row codec, None for dense arrays.
    aliases
        Other names of the same tensor in the model.
    """

    kind: str
    shape: tuple[int, ...]
    element: str
    base: str | None = None
    rows: int = 0
    nbytes: int = 0
    codec: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()

    def to_json(self) -> Doc:
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
        return doc

    @classmethod
    def from_json(cls, doc: Doc) -> ArrayEntry:
        kind, base = doc["kind"], doc.get("base")
        if kind not in KINDS or (kind == "delta") != (base is not None):
            raise ValueError(f"an array of kind {kind!r} with base {base!r}")
        if base is not None and VersionId.parse(base) is None:
            raise ValueError(f"{base!r} is not a version id")
        shape = tuple(int(n) for n in doc["shape"])
        if min(shape, default=0) < 0 or (kind != "dense" and len(shape) not in (1, 2)):
            raise ValueError(f"shape {shape}")
        return cls(
            kind=kind,
            shape=shape,
            element=str(doc["element"]),
            base=base,
            rows=int(doc.get("rows", 0)),
            nbytes=int(doc["bytes"]),
            codec=doc.get("codec"),
            aliases=tuple(doc.get("aliases", ())),
        )


@dataclass(frozen=True)
class Record:
    """A committed version.

    Attributes
    ----------
    id, nonce
        The version, and a random id of this very commit (to recognise one's own after a lost response).
    step, time
        The caller's step; seconds since 1970, UTC.
    previous
        The version that training continued from, None for the first.
    needs
        Every other version that reading this one may touch, newest first.
    arrays, nodes
        `ArrayEntry` and Zarr metadata document by path. Arrays without rows written have no document.
    policy
        Name, inputs and decision.
    restores
        Loads that training has been through up to this version.
    objects_bytes
        Bytes of all the version's objects but this one.
    manifest_sha256, state_sha256
        Digests of those objects.
    metadata
        The caller's, as tagged JSON.
    """

    id: str
    nonce: str
    step: int
    time: float
    previous: str | None
    needs: tuple[str, ...]
    arrays: Mapping[str, ArrayEntry]
    nodes: Mapping[str, Doc]
    policy: Mapping[str, Any]
    restores: int
    objects_bytes: int
    manifest_sha256: str
    state_sha256: str
    metadata: Any = None
    requires: tuple[str, ...] = ()
    record_bytes: int = field(default=0, compare=False)

    @property
    def kind(self) -> str:
        """``baseline`` if no array leans on another version, else ``delta``."""
        return "delta" if any(entry.kind == "delta" for entry in self.arrays.values()) else "baseline"

    @property
    def nbytes(self) -> int:
        """Bytes of all its objects, this record included."""
        return self.objects_bytes + self.record_bytes

    @property
    def rows(self) -> int:
        """Table rows written (optimizer state that follows them is not counted again)."""
        return sum(entry.rows for path, entry in self.arrays.items() if path.endswith("/weight"))


def encode_record(record: Record) -> bytes:
    """The record's bytes, with the digest of itself inside."""
    cnr = {
        "digest": _NO_DIGEST,  # first, so that nothing of the caller's can stand before it
        "format": FORMAT,
        "requires": list(record.requires),
        "id": record.id,
        "nonce": record.nonce,
        "step": record.step,
        "time": record.time,
        "previous": record.previous,
        "needs": list(record.needs),
        "arrays": {path: entry.to_json() for path, entry in record.arrays.items()},
        "policy": dict(record.policy),
        "restores": record.restores,
        "bytes": record.objects_bytes,
        "manifest": record.manifest_sha256,
        "state": record.state_sha256,
        "metadata": record.metadata,
    }
    doc = group_document({"cnr": cnr})
    doc["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": dict(record.nodes),
    }
    data = dumps(doc)
    return data.replace(_quoted(_NO_DIGEST), _quoted(hashlib.sha256(data).hexdigest()), 1)


def decode_record(data: bytes, version: str) -> Record | None:
    """Parse and prove the commit record of `version`; None for a void record.

    Raises
    ------
    CorruptionError
        The bytes are not those that were committed.
    FormatError
        A newer format, or a feature this reader lacks.
    """
    what = f"commit record of version {version}"
    try:
        doc = loads(data, what)
    except FormatError as error:
        raise CorruptionError(f"{error}; the object was altered or cut") from error
    attributes = doc.get("attributes") if isinstance(doc, dict) else None
    cnr = attributes.get("cnr") if isinstance(attributes, dict) else None
    if not isinstance(cnr, dict):
        if isinstance(attributes, dict) and isinstance(attributes.get("cnr_void"), dict):
            return None
        raise CorruptionError(f"{what}: it is neither a commit nor a void record; the object was altered")
    if cnr.get("format") != FORMAT:
        raise FormatError(f"{what}: format {cnr.get('format')!r}; this release reads format {FORMAT}")
    _check_digest(data, cnr, what)
    unknown = sorted(set(cnr["requires"]) - FEATURES)
    if unknown:
        raise FormatError(f"{what} requires {', '.join(unknown)}: install a newer cnr-store to read it")
    try:
        return _record(cnr, doc["consolidated_metadata"]["metadata"], version, len(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"{what}: malformed: {error!r}") from error


def _record(cnr: Doc, nodes: dict[str, Doc], version: str, record_bytes: int) -> Record:
    if cnr["id"] != version:
        raise ValueError(f"it is the record of {cnr['id']}: objects were swapped")
    needs = tuple(cnr["needs"])
    if any(VersionId.parse(need) is None for need in needs):
        raise ValueError(f"needs {needs}")
    return Record(
        id=version,
        nonce=str(cnr["nonce"]),
        step=int(cnr["step"]),
        time=float(cnr["time"]),
        previous=cnr["previous"],
        needs=needs,
        arrays={path: ArrayEntry.from_json(entry) for path, entry in cnr["arrays"].items()},
        nodes=nodes,
        policy=dict(cnr["policy"]),
        restores=int(cnr["restores"]),
        objects_bytes=int(cnr["bytes"]),
        manifest_sha256=str(cnr["manifest"]),
        state_sha256=str(cnr["state"]),
        metadata=cnr["metadata"],
        requires=tuple(cnr["requires"]),
        record_bytes=record_bytes,
    )


def _check_digest(data: bytes, cnr: Doc, what: str) -> None:
    digest = cnr.get("digest")
    if not isinstance(digest, str) or _DIGEST.fullmatch(_quoted(digest)) is None:
        raise CorruptionError(f"{what}: its digest is missing or malformed")
    blank = data.replace(_quoted(digest), _quoted(_NO_DIGEST), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise CorruptionError(f"{what}: its digest does not match; the object was altered")


def _quoted(digest: str) -> bytes:
    return f'"digest":"{digest}"'.encode()


def encode_void(by: str, nonce: str) -> bytes:
    """A record that burns an id, so that a late commit under it loses."""
    return dumps(group_document({"cnr_void": {"by": by, "nonce": nonce}}))
