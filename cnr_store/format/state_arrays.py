"""Arrays and numpy scalars inside a state: little-endian bytes, inline where small, beside the state where not."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cnr_store.errors import StateError

Array = np.ndarray[Any, Any]
INLINE_BYTES = 8 * 1024
NUMBER_TYPES: Mapping[str, np.dtype[Any]] = {
    dtype.str: dtype
    for dtype in (
        np.dtype(name).newbyteorder("<")
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    )
}
"""Element types that a state may hold, as numpy writes them: those that are the same on every machine."""

SPARSEST = 16
"""How much memory an array may span, for each element that it has."""

_INLINE = frozenset({"kind", "dtype", "shape", "data"})
_BESIDE = frozenset({"kind", "path"})


@dataclass(frozen=True)
class ArrayLeaf:
    """An array in a state."""

    values: Array  # numpy values
    kind: str = "numpy"  # what it was: `numpy` or `torch`
    torch_dtype: str | None = None  # torch's name of the element type where numpy lacks it, else None
    is_beside: bool = False  # whether it stands beside the state however small it is
    strides: tuple[int, ...] | None = None  # in elements, where it did not lie in C order. They may overlap.

    def laid_out(self) -> Array:
        """The values, lying by these strides."""
        if not self.strides:
            return self.values
        memory = np.zeros(span(self.values.shape, self.strides), self.values.dtype)
        laid_out = as_strided(memory, self.values.shape, [n * memory.itemsize for n in self.strides])
        laid_out[...] = self.values
        return laid_out


@dataclass
class OfClass:
    """A value of a class, which readers MUST NOT look up by its name."""

    name: str  # of the class, with its module
    value: Any  # a state of which the class makes it


Leaf = ArrayLeaf | OfClass
Beside = Callable[[str, ArrayLeaf], str]


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first to the last element of an array that has some, how many there is room for."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def encode_leaf(leaf: ArrayLeaf, path: str, beside: Beside) -> dict[str, Any]:
    """The body of a ``$array`` tag; an array too large to stand in the tree goes through `beside`."""
    little = _little(leaf.values)
    if little is None:
        raise StateError(
            f"state{path}: an array of dtype {leaf.values.dtype} can't be stored; use numbers of at most 64 bits "
            "(complex: 128) or booleans"
        )
    doc: dict[str, Any] = {"kind": leaf.kind}
    if leaf.torch_dtype is not None:
        doc["torch_dtype"] = leaf.torch_dtype
    if leaf.strides is not None:
        doc["strides"] = list(leaf.strides)
    if leaf.is_beside or little.nbytes > INLINE_BYTES:
        return doc | {"path": beside(path, replace(leaf, values=little))}
    return doc | {"dtype": little.dtype.str, "shape": list(little.shape), "data": _base64(little)}


def decode_leaf(body: Mapping[str, Any], read: Callable[[str], Array]) -> ArrayLeaf:
    """The leaf that a ``$array`` body stands for; `read` returns the array at a path."""
    leaf = _in_c_order({key: body[key] for key in body if key != "strides"}, read)
    if (strides := body.get("strides")) is None:
        return leaf
    if any(type(n) is not int or n < 0 for n in strides):
        raise ValueError("its strides are no natural numbers")
    if span(leaf.values.shape, strides) > SPARSEST * leaf.values.size:
        raise ValueError("its strides span much more memory than it has elements")
    return replace(leaf, strides=tuple(strides))


def _in_c_order(body: Mapping[str, Any], read: Callable[[str], Array]) -> ArrayLeaf:
    kind, torch_dtype = body["kind"], body.get("torch_dtype")
    if kind not in ("numpy", "torch") or not (torch_dtype is None or type(torch_dtype) is str):
        raise ValueError("its kind or its torch_dtype is unknown")
    if torch_dtype is not None and kind != "torch":
        raise ValueError("it has a torch_dtype and was no tensor")
    members = body.keys() - {"torch_dtype"}
    if members == _BESIDE:
        if type(body["path"]) is not str:
            raise ValueError("its path is no string")
        return ArrayLeaf(read(body["path"]), kind, torch_dtype)
    if members != _INLINE:
        raise ValueError("it has neither a path nor data")
    dtype, shape = NUMBER_TYPES[body["dtype"]], body["shape"]
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("its shape has a size that is no natural number")
    raw = base64.b64decode(body["data"], validate=True)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its {len(raw)} bytes do not fit its shape")
    # Copied, because what comes from a buffer can't be written into, as a state's arrays could.
    return ArrayLeaf(np.frombuffer(raw, dtype).reshape(shape).copy(), kind, torch_dtype)


def encode_scalar(value: np.generic) -> list[str] | None:
    """``[dtype, base64]`` of a numpy scalar, None where its type can't be stored."""
    little = _little(np.asarray(value))
    return None if little is None else [little.dtype.str, _base64(little)]


def decode_scalar(body: Any) -> np.generic:
    """The scalar that `encode_scalar` was given. `ValueError` or `TypeError` or `KeyError` if the body is malformed."""
    dtype, data = body
    (value,) = np.frombuffer(base64.b64decode(data, validate=True), NUMBER_TYPES[dtype])
    scalar: np.generic = value
    return scalar


def _little(values: Array) -> Array | None:
    """The values in little-endian bytes, None where their type can't be stored."""
    dtype = _little_type(values.dtype)
    return None if dtype is None else values.astype(dtype, copy=False)


@functools.cache
def _little_type(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    little = dtype.newbyteorder("<")
    return little if little.str in NUMBER_TYPES else None


def _base64(values: Array) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
