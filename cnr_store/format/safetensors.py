"""The header of a safetensors file: u64 length, JSON of every tensor's type, shape and place, then the tensors' bytes.

Plain data, without I/O. Bytes are little-endian, in C order, one tensor after the other without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnr_store.errors import FormatError, OptionError, option
from cnr_store.format import validate
from cnr_store.format.state import loads
from cnr_store.policies.checks import Natural

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

VERSION_NOTE = "cnr_version"
"""Name, in the metadata of an exported file, of the version it holds."""

_METADATA = "__metadata__"
_ALIASES = "cnr_aliases"
_TAGS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "complex64": ("C64", 8),
}
_ELEMENTS = {tag: (element, itemsize) for element, (tag, itemsize) in _TAGS.items()}


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: its torch element type, its shape, and its bytes begin ... end - 1 after the header."""

    element: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return _TAGS[self.element][1]


@dataclass(frozen=True)
class Header:
    """What a header says."""

    tensors: Mapping[str, TensorPlace]  # by name
    aliases: Mapping[str, str]  # by name, the other tensor whose further name it is, as the writer says
    # Whether the file holds a version that was exported, so that names are those of the version
    is_ours: bool = False


def itemsize_of(element: str) -> int | None:
    """Bytes of a value of a torch element type; None if the format has no such type."""
    return _TAGS[element][1] if element in _TAGS else None


def place_tensors(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, TensorPlace]:
    """Where each tensor goes: wide types first, so that all are aligned.

    `tensors`: (element type, shape) by name.
    """
    for name, (element, _) in tensors.items():
        if element not in _TAGS or name == _METADATA:
            raise OptionError(
                f"safetensors can't hold {name!r} of type {element}; choose {option('format', 'zarr')}, or convert it "
                "in the model"
            )
    places, at = {}, 0
    for name in sorted(tensors, key=lambda name: (-_TAGS[tensors[name][0]][1], name)):
        element, shape = tensors[name]
        end = at + math.prod(shape) * _TAGS[element][1]
        places[name] = TensorPlace(element, tuple(shape), at, end)
        at = end
    return places


def encode_header(header: Header, metadata: Mapping[str, str]) -> bytes:
    """What comes before the tensors' bytes, a multiple of 8 bytes long.

    The format has no aliases, so they go into the metadata, as JSON, for `decode_header`.
    """
    noted = {**metadata, _ALIASES: json.dumps(dict(header.aliases))} if header.aliases else dict(metadata)
    doc: dict[str, Any] = {_METADATA: noted}
    for name, place in header.tensors.items():
        tag = _TAGS[place.element][0]
        doc[name] = {"dtype": tag, "shape": list(place.shape), "data_offsets": [place.begin, place.end]}
    text = json.dumps(doc, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise OptionError(
            f"the header would take {len(text)} bytes, more than safetensors allows: {MAX_HEADER_BYTES}"
        )
    return LENGTH.pack(len(text)) + text


def decode_header(text: bytes, nbytes: int, what: str) -> Header:
    """The header of a file, proven.

    `text`: its JSON.
    `nbytes`: bytes of the file after the header.
    `what`: the file's name, for errors.
    """
    doc = loads(text, what, MAX_HEADER_BYTES)
    try:
        tensors = {
            name: _place(validate.proven(entry, dict, validate.shown(name)), validate.shown(name))
            for name, entry in validate.proven(doc, dict, "the header").items()
            if name != _METADATA
        }
        metadata = validate.proven(doc.get(_METADATA, {}), dict, _METADATA)
        aliases = _aliases(metadata, tensors, what)
    except (KeyError, ValueError) as error:
        raise FormatError(f"{what}: it is no sound safetensors file: {error}") from error
    # Without gaps or overlaps, so that no byte is read twice and none is hidden.
    at = 0
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            raise FormatError(
                f"{what}: tensor {validate.shown(name)} begins at byte {place.begin}, not at {at}"
            )
        at = place.end
    if at != nbytes:
        raise FormatError(
            f"{what}: its tensors take {at} bytes, there are {nbytes}; the file is cut or altered"
        )
    return Header(tensors, aliases, VERSION_NOTE in metadata)


def _aliases(metadata: Mapping[str, Any], tensors: Mapping[str, TensorPlace], what: str) -> dict[str, str]:
    noted = metadata.get(_ALIASES, "{}")
    # Aliases only say which tensors to share, so each must be one that could be the same.
    doc = loads(validate.proven(noted, str, _ALIASES).encode(), what)
    aliases: dict[str, str] = validate.proven(doc, dict[str, str], _ALIASES)
    for alias, name in aliases.items():
        same = [(tensors[each].element, tensors[each].shape) for each in (alias, name)]
        if same[0] != same[1] or name in aliases:
            raise ValueError(f"{validate.shown(alias)} can't be another name of {validate.shown(name)}")
    return aliases


def _place(entry: Mapping[str, Any], name: str) -> TensorPlace:
    tag = validate.proven(entry["dtype"], str, f"{name}.dtype")
    if tag not in _ELEMENTS:
        raise ValueError(f"{name} has the type {validate.shown(tag)}, which this release does not know")
    element, itemsize = _ELEMENTS[tag]
    shape = validate.sizes(entry["shape"], f"{name}.shape", 0, range(65))
    begin, end = validate.proven(entry["data_offsets"], tuple[Natural, Natural], f"{name}.data_offsets")
    nbytes = math.prod(shape) * itemsize
    if end - begin != nbytes:
        raise ValueError(f"{name} has {end - begin} bytes, {shape} of {element} takes {nbytes}")
    return TensorPlace(element, shape, begin, end)
