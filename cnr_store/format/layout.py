"""Where things lie in a store: keys, ids and names (see `docs/format.md`).

An array goes by its plain path, its names percent-encoded. Its objects lie under its *stored* path, which is the plain
one, unless a segment of it is too long for a key, meets another one on disks that fold case, or is a device's name.
Such a segment is *escaped*: followed by ``~`` and a hash of the name. ASCII is all that an encoded name has, so
two of them meet if they are equal in lower case.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cnr_store.errors import FormatError, UnsupportedModelError

FORMAT = 2
MAX_GENERATION = 999_999
MAX_SEGMENT_BYTES = 200
"""Of a name's segment in a key. Every file system takes that many in a file's name; most allow 255."""
MAX_NAME_BYTES = 1 << 14
"""Of an encoded name. What takes more than a segment is stored under a shorter one."""
MAX_RANKS = 1 << 16
"""That save one version."""

ESCAPED_NAMES = "escaped-names"
"""The feature of a version in which an array lies under another path than the plain one of its name."""
LATTICE, RELATIVE = "lattice", "relative"
"""Features of versions and folds with rows on a lattice; of versions with rows that are relative to their base."""
FLOATING = "floating"
"""The feature of versions and folds with values on a floating grid. They require those of lattices, too."""
MOVING = "moving"
"""The feature of versions and folds with floating grids that have moved."""
STATE_PARTS, COLUMN_BOUNDARIES = "state-parts", "column-boundaries"
"""Features of versions that several ranks saved, and in which slots follow column shards."""

FEATURES = frozenset({COLUMN_BOUNDARIES, ESCAPED_NAMES, FLOATING, LATTICE, MOVING, RELATIVE, STATE_PARTS})
"""Features that this reader knows, of those that a commit record may list in ``requires``."""

ROOT_KEY = "zarr.json"
VERSIONS = "versions"
WRITERS = "writers"
FOLDS = "folds"
PINS = "pins"
TAGS = "tags"
TOMBSTONES = "tombstones"
NODE = "zarr.json"
CLOSED = ".closed"
"""Ends the name of the object that marks a claim closed."""

_CLAIM = re.compile(r"([0-9]{6})-([0-9a-f]{8})")
_WRITER = re.compile(r"[0-9]{6}")
VERSION_ID = re.compile(r"([0-9]{6})-([0-9a-f]{8})\.([0-9]{8})")
_TAG = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
_SAFE = "-._"
_HASH_BYTES, _CUT_HASH_BYTES = 4, 16
"""Of a name that its key has whole, which tells it from those that differ in case; and of one that is cut there."""
_CUT = re.compile(r"%[0-9A-F]?\Z")
"""What is left of a percent-encoded byte where a segment was cut."""
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices, also with an extension."""


@dataclass(frozen=True, order=True)
class ClaimId:
    """A claim's number, called generation, and its random token. Their texts sort in the order of the numbers."""

    generation: int
    token: str

    def __str__(self) -> str:
        return f"{self.generation:06d}-{self.token}"

    @classmethod
    def parse(cls, text: str) -> ClaimId | None:
        """The claim that a name in a listing stands for, None if it is another object's."""
        match = _CLAIM.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


@dataclass(frozen=True, order=True)
class VersionId:
    """A claim and the number of an attempt under it. The number of a failed attempt is never used again."""

    claim: ClaimId
    attempt: int

    def __str__(self) -> str:
        return f"{self.claim}.{self.attempt:08d}"

    @classmethod
    def parse(cls, text: str) -> VersionId | None:
        """The version that a name stands for, None if it is no version's id."""
        match = VERSION_ID.fullmatch(text)
        return cls(ClaimId(int(match[1]), match[2]), int(match[3])) if match else None


def is_version(text: str) -> bool:
    """Whether it is a version's id."""
    return VERSION_ID.fullmatch(text) is not None


def is_claim(name: str) -> bool:
    """Whether a name under ``writers/`` is a claim's, and not another object's."""
    return _WRITER.fullmatch(name) is not None


def claim_name(number: int) -> str:
    """Name of a claim under ``writers/``."""
    return f"{number:06d}"


def store_text(token: str) -> str:
    """What the root says of its store: 8 random hex digits, and 8 that prove them."""
    return token + hashlib.blake2b(token.encode(), digest_size=4).hexdigest()


def is_tag(text: str) -> bool:
    """Whether it may name a version: 1 to 100 of ``a-z 0-9 _ . -``, and neither a step, an id nor ``latest``."""
    return (
        _TAG.fullmatch(text) is not None
        and not (text.isdecimal() or text.endswith(".") or is_version(text))
        and text not in ("latest", NODE)
    )


def tag_key(name: str) -> str:
    """Key of a tag."""
    return f"{TAGS}/{name}"


def writer_key(name: str, suffix: str = "") -> str:
    """Key of a claim by its name, or with a suffix of its mark."""
    return f"{WRITERS}/{name}{suffix}"


def version_key(version: str, *parts: str, prefix: str = VERSIONS) -> str:
    """Key of something in a version, or in its fold, pin or tombstone by `prefix`."""
    if not is_version(version):
        raise FormatError(f"{version!r} is not a version id (like 000001-0123abcd.00000001)")
    return "/".join((prefix, version, *parts))


def record_key(version: str, prefix: str = VERSIONS) -> str:
    """Key of the commit record of a version, or of its fold."""
    return version_key(version, NODE, prefix=prefix)


def encode_name(name: str) -> str:
    """A model's name in a plain path: percent-encoded, and never a name that Zarr or a path reserves."""
    quoted = _quoted(name)
    if quoted.startswith((".", "__")) or quoted == NODE:
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}"
    quoted = quoted.replace("~", "%7E")
    if len(quoted) > MAX_NAME_BYTES:
        raise UnsupportedModelError(
            f"the name {name[:40]}... takes {len(quoted)} bytes, percent-encoded; at most {MAX_NAME_BYTES} can be "
            "stored; shorten the modules' names"
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
    """The model's name that `encode_name` was given."""
    return urllib.parse.unquote(segment, errors="strict")


def table_name(parameter: str) -> str:
    """A table's name, from its parameter's: without a trailing `.weight`, unless that is all of it."""
    return parameter if _only_weight(parameter) else parameter.removesuffix(".weight")


def table_parameter(table: str) -> str:
    """The name of a table's parameter, from the table's: the inverse of `table_name`."""
    return table if _only_weight(table) else f"{table}.weight"


def _only_weight(name: str) -> bool:
    # The parameter of a bare embedding is `weight`, and a module can't have a submodule of the same name.
    return set(name.split(".")) == {"weight"}


def state_part(rank: int) -> str:
    """Place in a version of what one rank alone has of its state."""
    return f"state/ranks/{rank:06d}.json"


def weight_path(table: str) -> str:
    """Path of a table's rows inside a version."""
    return slot_path(table, "weight")


def slot_path(table: str, slot: str) -> str:
    """Path of an array of rows inside a version: `weight`, or row-wise optimizer state by the optimizer's own key."""
    return f"tables/{encode_name(table)}/{encode_name(slot)}"


def dense_path(group: str, name: str) -> str:
    """Path of a dense array: `group` is `model`, `optim` or `state`.

    Long names in `optim` and `state` are shortened: only the state document refers to these arrays, by their paths.
    """
    if group != "model" and len(_quoted(name)) > MAX_SEGMENT_BYTES - 8:
        name = f"{name[:16]}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
    return f"dense/{group}/{encode_name(name)}"


def is_shared(path: str) -> bool:
    """Whether any number of ranks stores the same under a path: not what each has of readers and random numbers."""
    return not path.startswith(dense_path("state", "")) or path.startswith(dense_path("state", "objects."))


def parent_groups(path: str) -> list[str]:
    """Groups between a version and one of its arrays, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def seal(version: str, path: str, first_row: int, first_column: int, prefix: str = VERSIONS) -> int:
    """The 64 bits that tie a payload to its place. Never 0, which marks payloads written through plain Zarr."""
    home = version if prefix == VERSIONS else f"{prefix}/{version}"
    text = f"{home}\n{path}\n{first_row}\n{first_column}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def place(paths: Iterable[str], parent: Mapping[str, str]) -> dict[str, str]:
    """The stored paths of a version's arrays, by their plain ones.

    Of names that meet, the later one is escaped. What the parent has stays where it is, because a chain is read under
    one path.

    `paths`: plain paths of the version's arrays.
    `parent`: stored paths by plain ones, of the version that this one continues.
    """
    nodes = _nodes(parent)
    taken = {stored.lower(): node for node, stored in nodes.items()}
    found = {}
    for path in paths:
        segments = path.split("/")
        stored = segments[0]
        for depth, segment in enumerate(segments[1:], 2):
            node = "/".join(segments[:depth])
            stored = nodes[node] if node in nodes else _new(stored, segment, taken)
            nodes[node] = stored
            taken[stored.lower()] = node
        found[path] = stored
    return found


def _new(folder: str, segment: str, taken: Mapping[str, str]) -> str:
    stored = f"{folder}/{segment}"
    if _is_portable(segment) and stored.lower() not in taken:
        return stored
    stored = f"{folder}/{escape(segment)}"
    if other := taken.get(stored.lower()):
        names = " and ".join(repr(decode_name(each)[:40]) for each in (other.rpartition("/")[2], segment))
        raise UnsupportedModelError(f"the names {names} have one key in {folder}: rename one of them")
    return stored


def escape(segment: str) -> str:
    """An encoded name, cut if it is long, with a hash behind it: no other name's, nor a name that disks keep."""
    name = decode_name(segment).encode()
    if _DEVICE.fullmatch(segment):  # Windows goes by what stands before the first dot
        segment = f"%{ord(segment[0]):02X}{segment[1:]}"
    is_cut = len(segment) + 1 + 2 * _HASH_BYTES > MAX_SEGMENT_BYTES
    digest = hashlib.blake2b(name, digest_size=_CUT_HASH_BYTES if is_cut else _HASH_BYTES).hexdigest()
    whole = _CUT.sub("", segment[: MAX_SEGMENT_BYTES - len(digest) - 1])
    return f"{whole}~{digest}"


def check_stored(stored: str, path: str) -> None:
    """Prove that objects of an array of this plain path may lie under `stored`; ValueError if not."""
    ours, plain = stored.split("/"), path.split("/")
    if len(ours) != len(plain) or ours[0] != plain[0]:
        raise ValueError(f"{stored[:60]!r} is no place of {path[:60]!r}")
    for found, segment in zip(ours[1:], plain[1:], strict=True):
        if len(found) > MAX_SEGMENT_BYTES or (found != segment and found != escape(segment)):
            raise ValueError(f"{found[:60]!r} is no segment for the name {decode_name(segment)[:60]!r}")


def moved_nodes(paths: Mapping[str, str]) -> dict[str, str]:
    """Stored paths of arrays, and of the groups above them, by their plain ones, where the two differ."""
    nodes = _nodes(paths)
    if len(set(nodes.values())) != len(nodes):
        raise ValueError("two names have one path")
    return {node: stored for node, stored in nodes.items() if node != stored}


def _nodes(paths: Mapping[str, str]) -> dict[str, str]:
    """Stored paths of arrays, and of the groups above them, by plain ones."""
    nodes: dict[str, str] = {}
    for path, stored in paths.items():
        plain, ours = path.split("/"), stored.split("/")
        for depth in range(2, len(plain) + 1):
            node, lies = "/".join(plain[:depth]), "/".join(ours[:depth])
            if nodes.setdefault(node, lies) != lies:
                raise ValueError(f"{node[:60]!r} lies in two places")
    return nodes


def _is_portable(segment: str) -> bool:
    return (
        len(segment) <= MAX_SEGMENT_BYTES
        and _DEVICE.fullmatch(segment) is None
        and not segment.endswith(".")
        and segment.lower() != NODE  # which `encode_name` never makes itself
    )
