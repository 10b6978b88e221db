"""Where arrays lie in a version, if names are too long for a key, meet on disks that fold case, or are devices' names.

Everywhere else an array goes by its plain path, its names percent-encoded. Its objects lie under its *stored* path,
which is the plain one, unless a segment of it is *escaped*: followed by ``~`` and a hash of the name. ASCII is all
that an encoded name has, so two of them meet if they are equal in lower case.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from cnr_store.errors import UnsupportedModelError
from cnr_store.format.layout import MAX_SEGMENT_BYTES, NODE, decode_name

_HASH_BYTES, _CUT_HASH_BYTES = 4, 16
"""Of a name that its key has whole, which tells it from those that differ in case; and of one that is cut there."""
_CUT = re.compile(r"%[0-9A-F]?\Z")
"""What is left of a percent-encoded byte where a segment was cut."""
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices, also with an extension."""


def place(paths: Iterable[str], parent: Mapping[str, str]) -> dict[str, str]:
    """The stored paths of a version's arrays, by their plain ones.

    Of names that meet, the later one is escaped. What the parent has stays where it is, because a chain is read under
    one path.

    `paths`: plain paths of the version's arrays.
    `parent`: stored paths by plain ones, of the version that this one continues.
    """
    nodes = _nodes(parent)
    taken = {_folded(stored): node for node, stored in nodes.items()}
    found = {}
    for path in paths:
        segments = path.split("/")
        stored = segments[0]
        for depth, segment in enumerate(segments[1:], 2):
            node = "/".join(segments[:depth])
            stored = nodes[node] if node in nodes else _new(stored, segment, taken)
            nodes[node] = stored
            taken[_folded(stored)] = node
        found[path] = stored
    return found


def _new(folder: str, segment: str, taken: Mapping[str, str]) -> str:
    stored = f"{folder}/{segment}"
    if _is_portable(segment) and _folded(stored) not in taken:
        return stored
    stored = f"{folder}/{escape(segment)}"
    if other := taken.get(_folded(stored)):
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


def _folded(path: str) -> str:
    return path.lower()
