"""Where things lie in a store: keys, ids and names (see `docs/format.md`)."""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from dataclasses import dataclass

from cnr_store.errors import FormatError, UnsupportedModelError

FORMAT = 1
MAX_GENERATION = 999_999
MAX_SEGMENT_BYTES = 200
FEATURES: frozenset[str] = frozenset()
"""Features that a commit record may list in ``requires`` and this reader knows."""

ROOT_KEY = "zarr.json"
VERSIONS = "versions"
WRITERS = "writers"
FOLDS = "folds"
PINS = "pins"
TOMBSTONES = "tombstones"
NODE = "zarr.json"

_CLAIM = re.compile(r"([0-9]{6})-([0-9a-f]{8})")
_VERSION = re.compile(r"([0-9]{6}-[0-9a-f]{8})\.([0-9]{8})")
_SAFE = "-._"


@dataclass(frozen=True, order=True)
class ClaimId:
    """A writer's generation and its random token; their text sorts as they were made."""

    generation: int
    token: str

    def __str__(self) -> str:
        return f"{self.generation:06d}-{self.token}"

    @classmethod
    def parse(cls, text: str) -> ClaimId | None:
        match = _CLAIM.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


@dataclass(frozen=True, order=True)
class VersionId:
    """A claim and the number of the attempt under it; a failed attempt's number is never used again."""

    claim: ClaimId
    attempt: int

    def __str__(self) -> str:
        return f"{self.claim}.{self.attempt:08d}"

    @classmethod
    def parse(cls, text: str) -> VersionId | None:
        match = _VERSION.fullmatch(text)
        if match is None:
            return None
        claim = ClaimId.parse(match[1])
        return cls(claim, int(match[2])) if claim else None


def writer_key(claim: ClaimId) -> str:
    return f"{WRITERS}/{claim}"


def version_key(version: str, *parts: str, prefix: str = VERSIONS) -> str:
    """Key of something in a version, or in its fold, pin or tombstone by `prefix`.

    Ids come from a store, so they are proven to be ids first.
    """
    if VersionId.parse(version) is None:
        raise FormatError(f"{version!r} is not a version id (like 000001-0123abcd.00000001)")
    return "/".join((prefix, version, *parts))


def record_key(version: str, prefix: str = VERSIONS) -> str:
    """Key of the commit record of a version, or of its fold."""
    return version_key(version, NODE, prefix=prefix)


def encode_name(name: str) -> str:
    """One path segment for a model's name: percent-encoded, and never a name that Zarr or a path reserves."""
    quoted = _quoted(name)
    if quoted.startswith((".", "__")) or quoted == NODE:
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}"
    quoted = quoted.replace("~", "%7E")
    if len(quoted) > MAX_SEGMENT_BYTES:
        raise UnsupportedModelError(
            f"the name {name[:40]}... takes {len(quoted)} bytes in a key, at most {MAX_SEGMENT_BYTES} are portable; "
            "shorten the modules' names"
        )
    return quoted


def _quoted(name: str) -> str:
    try:
        return urllib.parse.quote(name, safe=_SAFE)
    except UnicodeEncodeError as error:
        raise UnsupportedModelError(
            f"the name {name[:40]!r} holds half of a surrogate pair; rename it"
        ) from error


def decode_name(segment: str) -> str:
    return urllib.parse.unquote(segment, errors="strict")


def table_name(parameter: str) -> str:
    """A table's name by that of its parameter: without a trailing `.weight`, unless nothing else is in it."""
    return parameter if _only_weight(parameter) else parameter.removesuffix(".weight")


def table_parameter(table: str) -> str:
    """The name of a table's parameter by the table's: the inverse of `table_name`."""
    return table if _only_weight(table) else f"{table}.weight"


def _only_weight(name: str) -> bool:
    # A bare embedding is `weight`, so a submodule of that name can't be.
    return set(name.split(".")) == {"weight"}


def weight_path(table: str) -> str:
    """Path of a table's rows inside a version."""
    return slot_path(table, "weight")


def slot_path(table: str, slot: str) -> str:
    """Path of a row-following array inside a version: `weight`, or an optimizer's state by its own key."""
    return f"tables/{encode_name(table)}/{encode_name(slot)}"


def dense_path(group: str, name: str) -> str:
    """Path of a whole, lossless array: `group` is `model`, `optim` or `state`.

    Only the state refers to those of `optim` and `state`, so their names may be shortened.
    """
    if group != "model" and len(_quoted(name)) > MAX_SEGMENT_BYTES - 8:
        name = f"{name[:16]}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
    return f"dense/{group}/{encode_name(name)}"


def parent_groups(path: str) -> list[str]:
    """Groups between a version and one of its arrays, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def seal(version: str, path: str, first_row: int, first_column: int, prefix: str = VERSIONS) -> int:
    """The 64 bits that tie a payload to its place, never 0 (which means: written by a plain Zarr writer)."""
    home = version if prefix == VERSIONS else f"{prefix}/{version}"
    text = f"{home}\n{path}\n{first_row}\n{first_column}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
