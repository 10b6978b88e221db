"""The manifest of a version: every object that holds array data, so that *clean* and *lost* differ.

A zlib stream (RFC 1950) of JSON::

    {"format": 2, "version": ID, "arrays": {PATH: {"index": [...], "bytes": [...], "tail": [...]}}}

Per array three lists of one length: the linear index of each object in the array's grid of shards (dense: of
chunks), ascending; its size in bytes; its last four bytes as a little-endian u32, which are the crc32c of a
shard's index or of a dense chunk. A shard that is not listed was not written: its rows are older.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from cnr_store.errors import CorruptionError, SaveError
from cnr_store.format.layout import FORMAT
from cnr_store.format.state import dumps, loads
from cnr_store.format.validate import member, proven, shown
from cnr_store.policies.checks import Natural

MAX_MANIFEST_BYTES = 64 << 20
"""Inflated. That is about two million objects."""

MAX_RATIO = 32
"""Inflated to compressed bytes, beyond the first MiB. Lists of objects reach 12; one beyond 32 is not compressed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One object: its size in bytes, and its last four bytes as a number."""

    nbytes: int
    tail: int


@dataclass(frozen=True)
class Manifest:
    """Objects by array path and linear index."""

    version: str
    arrays: Mapping[str, Mapping[int, Part]] = field(default_factory=dict)

    def renamed(self, paths: Mapping[str, str]) -> Manifest:
        """The same objects, of arrays by other paths where `paths` has one."""
        return Manifest(self.version, {paths.get(path, path): parts for path, parts in self.arrays.items()})

    def parts(self, path: str) -> Mapping[int, Part]:
        """The objects of one array, by linear index; none for an array that is not listed."""
        return self.arrays.get(path, {})


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes, which `decode_manifest` reads. `SaveError` if there are too many objects."""
    arrays = {}
    for path, parts in manifest.arrays.items():
        indexes = sorted(parts)
        arrays[path] = {
            "index": indexes,
            "bytes": [parts[i].nbytes for i in indexes],
            "tail": [parts[i].tail for i in indexes],
        }
    text = dumps({"format": FORMAT, "version": manifest.version, "arrays": arrays})
    if len(text) > MAX_MANIFEST_BYTES:
        raise SaveError(
            f"the manifest of version {manifest.version} would take {len(text)} bytes; at most "
            f"{MAX_MANIFEST_BYTES >> 20} MiB can be read: keep fewer tables in one store"
        )
    data = zlib.compress(text, 6)
    # A manifest that compresses too well would be refused, so it is stored as it is.
    return data if len(text) <= _max_inflated(len(data)) else zlib.compress(text, 0)


def decode_manifest(data: bytes, version: str) -> Manifest:
    """Parse and prove the manifest of `version`. `CorruptionError` names the version and the defect."""
    what = f"manifest of version {version}"
    doc = loads(_inflate(data, what), what)
    try:
        said = [member(doc, name) for name in ("format", "version")]
        if said != [FORMAT, version]:
            raise ValueError(f"it says format {shown(said[0])}, version {shown(said[1])}")
        arrays = proven(member(doc, "arrays"), dict[str, dict[str, list[Natural]]], "arrays")
        return Manifest(version, {path: _parts(columns) for path, columns in arrays.items()})
    except (KeyError, ValueError) as error:
        raise CorruptionError(f"{what}: {error!r}; the object was altered or swapped") from error


def _parts(columns: dict[str, list[int]]) -> dict[int, Part]:
    index, nbytes, tail = (columns[name] for name in ("index", "bytes", "tail"))
    if any(b <= a for a, b in itertools.pairwise(index)):
        raise ValueError("indexes are not ascending")
    return {i: Part(n, t) for i, n, t in zip(index, nbytes, tail, strict=True)}


def _max_inflated(nbytes: int) -> int:
    """Bytes that a manifest of `nbytes` may inflate to, so that a small object can't take much memory."""
    return min(MAX_MANIFEST_BYTES, (1 << 20) + MAX_RATIO * nbytes)


def _inflate(data: bytes, what: str) -> bytes:
    inflater, max_bytes = zlib.decompressobj(), _max_inflated(len(data))
    try:
        text = inflater.decompress(data, max_bytes)
    except zlib.error as error:
        raise CorruptionError(f"{what}: not a zlib stream: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise CorruptionError(
            f"{what}: cut, followed by other bytes, or larger than the {max_bytes} bytes that {len(data)} may become"
        )
    return text
