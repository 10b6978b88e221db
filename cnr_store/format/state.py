"""State as strict JSON that round-trips exactly: tags for what JSON lacks, references to arrays beside it.

JSON's own values stand for themselves: null, booleans, integers, finite numbers, strings, lists, and objects
whose keys are strings that do not begin with ``$``. Everything else is an object with a single ``$`` key:

=============  ======================================================================
``$float``     ``"nan"``, ``"inf"``, ``"-inf"``
``$tuple``     a list
``$dict``      a list of ``[key, value]`` pairs: keys that are not plain strings
``$ordered``   the same for an ordered dictionary
``$bytes``     base64
``$scalar``    ``[dtype, base64]``: a numpy scalar, little-endian
``$array``     ``{"kind", "dtype", "shape", "data": base64}`` or ``{"kind", "path", ...}``
=============  ======================================================================

``$array`` holds a numpy array (kind ``numpy``) or a tensor (kind ``torch``, with ``torch_dtype`` where the
element type has no numpy name). Arrays of at most `INLINE_BYTES` stand in the tree, others beside it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnr_store.errors import CheckpointError, FormatError, StateError

Json = Any
INLINE_BYTES = 8 * 1024
MAX_DEPTH = 200
_SHOWN_PATH = 80


@dataclass(frozen=True)
class ArrayLeaf:
    """An array found in a state: numpy values, what it was (`numpy` or `torch`), and torch's name of its type."""

    values: np.ndarray[Any, Any]
    kind: str = "numpy"
    torch_dtype: str | None = None


def encode_state(
    value: object,
    *,
    beside: Callable[[str, ArrayLeaf], str],
    as_leaf: Callable[[object], ArrayLeaf | None] = lambda _: None,
) -> Json:
    """Turn a state into JSON values.

    Parameters
    ----------
    value
        Any nesting of the types in this module's table.
    beside
        Called with (path in the tree, leaf) for an array too large to stand in the tree; returns the path of
        the array it becomes in the version.
    as_leaf
        Recognises other array types, such as tensors.

    Raises
    ------
    StateError
        For a value that can't be carried exactly, with its path.
    """
    return _encode(value, "", beside, as_leaf, 0)


def _encode(
    value: object,
    path: str,
    beside: Callable[[str, ArrayLeaf], str],
    as_leaf: Callable[[object], ArrayLeaf | None],
    depth: int,
) -> Json:
    if depth > MAX_DEPTH:
        raise StateError(
            f"state{path[:_SHOWN_PATH]}...: nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it"
        )

    def inner(item: object, step: str) -> Json:
        return _encode(item, f"{path}{step}", beside, as_leaf, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return _checked_text(value, path) if kind is str else value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list) and kind is list:
        return [inner(item, f"[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": [inner(item, f"[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict) and kind in (dict, OrderedDict):
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {_checked_text(key, path): inner(item, f"[{key!r}]") for key, item in value.items()}
        pairs = [[inner(key, f".key({key!r})"), inner(item, f"[{key!r}]")] for key, item in value.items()]
        return {"$dict" if kind is dict else "$ordered": pairs}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": _base64(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$scalar": [value.dtype.newbyteorder("<").str, _base64(_little(np.asarray(value)).tobytes())]}
    leaf = as_leaf(value)
    if leaf is None and type(value) is np.ndarray:
        leaf = ArrayLeaf(value)
    if leaf is not None:
        return _encode_array(leaf, path, beside)
    raise StateError(
        f"state{path}: a {kind.__module__}.{kind.__qualname__} can't be stored; use None, bool, int, float, str, "
        "bytes, list, tuple, dict, numpy arrays or tensors (give an object's state_dict() instead of the object)"
    )


def _encode_array(leaf: ArrayLeaf, path: str, beside: Callable[[str, ArrayLeaf], str]) -> Json:
    values = leaf.values
    if values.dtype.kind not in "biufc":
        raise StateError(
            f"state{path}: an array of dtype {values.dtype} can't be stored; use numbers or booleans"
        )
    doc: dict[str, Json] = {"kind": leaf.kind}
    if leaf.torch_dtype is not None:
        doc["torch_dtype"] = leaf.torch_dtype
    if values.nbytes > INLINE_BYTES:
        doc["path"] = beside(path, leaf)
    else:
        little = _little(values)
        doc |= {"dtype": little.dtype.str, "shape": list(values.shape), "data": _base64(little.tobytes())}
    return {"$array": doc}


def decode_state(
    doc: Json,
    *,
    read: Callable[[str], np.ndarray[Any, Any]],
    from_leaf: Callable[[ArrayLeaf], object] = lambda leaf: leaf.values,
) -> Any:
    """The state that `encode_state` was given.

    `read` returns the array at a path of the version; `from_leaf` turns a leaf of kind ``torch`` into a tensor.

    Raises
    ------
    FormatError
        For a tag that is unknown or malformed.
    """
    if isinstance(doc, list):
        return [decode_state(item, read=read, from_leaf=from_leaf) for item in doc]
    if not isinstance(doc, dict):
        return doc
    tag = next(iter(doc), "")
    if not tag.startswith("$"):
        return {key: decode_state(item, read=read, from_leaf=from_leaf) for key, item in doc.items()}
    if len(doc) != 1:
        raise FormatError(f"state: the tag {tag} does not stand alone")
    body = doc[tag]
    try:
        return _decode_tag(tag, body, read, from_leaf)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, binascii.Error) as error:
        raise FormatError(f"state: malformed {tag} value: {error}") from error


def _decode_tag(
    tag: str,
    body: Json,
    read: Callable[[str], np.ndarray[Any, Any]],
    from_leaf: Callable[[ArrayLeaf], object],
) -> Any:
    def inner(item: Json) -> Any:
        return decode_state(item, read=read, from_leaf=from_leaf)

    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "$tuple":
        return tuple(inner(item) for item in body)
    if tag == "$dict":
        return {inner(key): inner(item) for key, item in body}
    if tag == "$ordered":
        return OrderedDict((inner(key), inner(item)) for key, item in body)
    if tag == "$bytes":
        return base64.b64decode(body, validate=True)
    if tag == "$scalar":
        dtype, data = body
        return np.frombuffer(base64.b64decode(data, validate=True), _number_type(dtype))[0]
    if tag == "$array":
        if "path" in body:
            values = read(body["path"])
        else:
            raw = base64.b64decode(body["data"], validate=True)
            values = np.frombuffer(raw, _number_type(body["dtype"])).reshape(body["shape"]).copy()
        leaf = ArrayLeaf(values, body["kind"], body.get("torch_dtype"))
        return from_leaf(leaf) if leaf.kind == "torch" else values
    raise FormatError(f"state: unknown tag {tag}; a newer cnr-store may have written it")


def dumps(doc: Json) -> bytes:
    """Compact UTF-8 JSON; refuses NaN and infinities, which JSON lacks."""
    return json.dumps(doc, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def loads(data: bytes, what: str) -> Json:
    """Strict JSON: no duplicate keys, no NaN.

    Raises
    ------
    FormatError
        Naming `what`.
    """

    def no_constant(text: str) -> Json:
        raise ValueError(f"{text} is not JSON")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    try:
        return json.loads(data, parse_constant=no_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not sound JSON: {error}") from error


def _number_type(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {text!r} is not a number type")
    return dtype


def _little(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _checked_text(value: Any, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"state{path}: a string that is not valid Unicode: {error}") from error
    return str(value)
