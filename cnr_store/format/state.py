"""State as strict JSON that round-trips exactly: tags for what JSON lacks, references to arrays beside it.

JSON's own values stand for themselves: null, booleans, integers, finite numbers, strings, lists, and objects
whose keys are strings that do not begin with ``$``. Everything else is an object with a single ``$`` key:

=============  ======================================================================
``$float``     ``"nan"``, ``"inf"``, ``"-inf"``
``$tuple``     a list
``$dict``      a list of ``[key, value]`` pairs: keys that are not plain strings
``$ordered``   the same for an ordered dictionary
``$counter``   the same for a counter
``$deque``     ``[maxlen or null, list]``
``$bytes``     base64
``$scalar``    ``[dtype, base64]``: a numpy scalar, little-endian
``$array``     ``{"kind", "dtype", "shape", "data": base64}`` or ``{"kind", "path", ...}``
``$class``     ``[class, value]``: see `OfClass`
=============  ======================================================================

``$array`` holds a numpy array (kind ``numpy``) or a tensor (kind ``torch``, with ``torch_dtype`` where the
element type has no numpy name), with ``strides`` where it did not lie in C order. Arrays of at most 8 KiB stand in the
tree, others beside it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cnr_store.errors import CheckpointError, FormatError, StateError
from cnr_store.format.state_arrays import (
    ArrayLeaf,
    Beside,
    Leaf,
    OfClass,
    decode_leaf,
    decode_scalar,
    encode_leaf,
    encode_scalar,
)

Json = Any
MAX_DEPTH = 200
MAX_DOCUMENT_BYTES = 256 << 20
MAX_INTEGER_BITS = 14_000
"""About 4,200 decimal digits: Python's JSON reads no more than 4,300."""

_SHOWN_PATH = 80
_MAPPINGS: dict[type[Any], str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_OF_TAG = {tag: kind for kind, tag in _MAPPINGS.items()}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def encode_state(
    value: object,
    *,
    beside: Beside,
    as_leaf: Callable[[object], Leaf | None] = lambda _: None,
) -> Json:
    """Turn a state into JSON values.

    `value`: any nesting of the types in this module's table.
    `beside`: called with (path in the tree, leaf) for an array too large to stand in the tree, its values
    little-endian; returns the path of the array it becomes in the version.
    `as_leaf`: recognises other types, such as tensors; ValueError for a value that has no plain ones.
    """
    try:
        return _Encoder(beside, as_leaf).value(value, "", 0)
    except RecursionError as error:
        raise StateError(
            "state: nested deeper than the interpreter's stack has room for; flatten it"
        ) from error


class _Encoder:
    """Takes few frames a level, so that `MAX_DEPTH` levels fit the interpreter's stack."""

    def __init__(self, beside: Beside, as_leaf: Callable[[object], Leaf | None]) -> None:
        self._beside = beside
        self._as_leaf = as_leaf

    def value(self, value: object, path: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise StateError(
                f"state{path[:_SHOWN_PATH]}...: nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it"
            )
        kind = type(value)
        if isinstance(value, list | tuple) and kind in (list, tuple):
            if depth < MAX_DEPTH and _are_plain(value):
                items = list(value)
            else:
                items = [self.value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if isinstance(value, dict) and kind in _MAPPINGS:
            if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
                return {
                    _checked_text(key, path): self.value(item, f"{path}[{key!r}]", depth + 1)
                    for key, item in value.items()
                }
            return {
                _MAPPINGS[kind]: [
                    [
                        self.value(key, f"{path}.key({key!r})", depth + 1),
                        self.value(item, f"{path}[{key!r}]", depth + 1),
                    ]
                    for key, item in value.items()
                ]
            }
        if isinstance(value, deque) and kind is deque:
            return {"$deque": [value.maxlen, self.value(list(value), path, depth + 1)]}
        return self._single(value, path, depth)

    def _single(self, value: object, path: str, depth: int) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, int) and kind is int:
            return _checked_integer(value, path)
        if isinstance(value, str) and kind is str:
            return _checked_text(value, path)
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, bytes) and kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, np.generic) and (scalar := encode_scalar(value)) is not None:
            return {"$scalar": scalar}
        try:
            leaf = value if isinstance(value, OfClass) else self._as_leaf(value)
        except ValueError as error:
            raise StateError(f"state{path}: {error}") from error
        if leaf is None and isinstance(value, np.ndarray) and kind is np.ndarray:
            leaf = ArrayLeaf(value)
        if isinstance(leaf, OfClass):
            return {"$class": [leaf.name, self.value(leaf.value, path, depth + 1)]}
        if leaf is not None:
            return {"$array": encode_leaf(leaf, path, self._beside)}
        raise StateError(
            f"state{path}: a {kind.__module__}.{kind.__qualname__} can't be stored; use None, bool, int, float, str, "
            "bytes, list, tuple, deque, dict, Counter, plain numpy arrays or tensors (give an object's state_dict() "
            "instead of the object, an enum's value, a named tuple as a plain one)"
        )


def decode_state(
    doc: Json,
    *,
    read: Callable[[str], np.ndarray[Any, Any]],
    from_leaf: Callable[[Leaf], object] = lambda leaf: leaf if isinstance(leaf, OfClass) else leaf.laid_out(),
) -> Any:
    """The state that `encode_state` was given.

    `read` returns the array at a path of the version; `from_leaf` turns a leaf into an array or a tensor, and makes the
    values of classes that it knows.
    """
    try:
        return _Decoder(read, from_leaf).value(doc, 0)
    except RecursionError as error:
        raise FormatError("state: nested deeper than the interpreter's stack has room for") from error


class _Decoder:
    """The way back, with as few frames."""

    def __init__(
        self, read: Callable[[str], np.ndarray[Any, Any]], from_leaf: Callable[[Leaf], object]
    ) -> None:
        self._read = read
        self._from_leaf = from_leaf

    def value(self, doc: Json, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"state: nested deeper than {MAX_DEPTH} levels")
        if isinstance(doc, list):
            return [self.value(item, depth + 1) for item in doc]
        if not isinstance(doc, dict):
            return doc
        tag = next((key for key in doc if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item, depth + 1) for key, item in doc.items()}
        if len(doc) != 1:
            raise FormatError(f"state: the tag {tag[:_SHOWN_PATH]} does not stand alone")
        try:
            return self._tagged(tag, doc[tag], depth)
        except CheckpointError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, binascii.Error) as error:
            raise FormatError(f"state: malformed {tag} value: {error}") from error

    def _tagged(self, tag: str, body: Json, depth: int) -> Any:
        if tag == "$tuple" and isinstance(body, list):
            return tuple([self.value(item, depth + 1) for item in body])
        if tag in _OF_TAG and isinstance(body, list):
            pairs = [(self.value(key, depth + 1), self.value(item, depth + 1)) for key, item in body]
            mapping = _OF_TAG[tag](dict(pairs))  # through a dict, because a counter would count pairs
            if len(mapping) != len(pairs):
                raise ValueError("a key stands twice")
            return mapping
        if tag == "$deque":
            maxlen, items = body
            if not isinstance(items, list) or (maxlen is not None and len(items) > maxlen):
                raise ValueError("it has no list, or a longer one than it may have")
            return deque(self.value(items, depth + 1), maxlen)
        if tag == "$class":
            name, value = body
            if type(name) is not str:
                raise ValueError("its class has no name")
            return self._from_leaf(OfClass(name, self.value(value, depth + 1)))
        if tag == "$float" and body in ("nan", "inf", "-inf"):
            return float(body)
        if tag == "$bytes":
            return base64.b64decode(body, validate=True)
        if tag == "$scalar":
            return decode_scalar(body)
        if tag == "$array":
            return self._from_leaf(decode_leaf(body, self._read))
        if tag in ("$tuple", "$float", *_OF_TAG):
            raise ValueError("its body is of another type")
        raise FormatError(f"state: unknown tag {tag[:_SHOWN_PATH]}; a newer cnr-store may have written it")


def dumps(doc: Json) -> bytes:
    """Compact UTF-8 JSON. Refuses NaN and infinities, which JSON lacks."""
    try:
        data = json.dumps(doc, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    except RecursionError as error:
        raise StateError(
            "state: nested deeper than the interpreter's stack has room for; flatten it"
        ) from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise StateError(
            f"a state of {len(data)} bytes; at most {MAX_DOCUMENT_BYTES >> 20} MiB can be read again: put long lists "
            "of numbers into numpy arrays, which are stored beside the state"
        )
    return data


def loads(data: bytes, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Json:
    """The values of strict JSON: no duplicate keys, no NaN, no half of a surrogate pair, at most `max_bytes`."""

    def no_constant(text: str) -> Json:
        raise ValueError(f"{text} is not JSON")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return members

    if len(data) > max_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {max_bytes >> 20} MiB are allowed")
    try:
        doc = json.loads(data, parse_constant=no_constant, object_pairs_hook=unique)
        if _SURROGATE.search(data):  # only an escape can stand for half a pair, and encoding finds it
            json.dumps(doc, ensure_ascii=False).encode()
        return doc
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not sound JSON: {error}") from error


def _are_plain(values: Sequence[Any]) -> bool:
    """Whether all are integers of 64 bits, or all are texts: as they are, they are JSON.

    A random generator's state has hundreds of integers, an optimizer's group thousands of names, and training waits.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) >= -(1 << 63) and max(values) < 1 << 63)
    return kinds == {str} and "".join(values).isascii()


def _checked_integer(value: int, path: str) -> int:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise StateError(
            f"state{path}: an integer of {value.bit_length()} bits; at most {MAX_INTEGER_BITS} are stored, give "
            "its bytes instead"
        )
    return value


def _checked_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"state{path}: a string that is not valid Unicode: {error}") from error
    return value
