"""Element types: how one number of a table is stored in a payload, and how numpy holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import RowsError

# The smallest magnitudes that round to infinity, ties to even, in the two 16-bit floats.
_FLOAT16_OVERFLOW = 65520.0
_BFLOAT16_OVERFLOW = math.ldexp(511, 119)


@dataclass(frozen=True)
class Element:
    """One element type.

    Attributes
    ----------
    code
        The number that stands for the type in a payload.
    name
        The type's name, such as "float32".
    array
        The dtype of decoded arrays.
    stored
        The little-endian dtype of a value in a raw segment.
    overflow
        The smallest magnitude that becomes infinite when it is rounded to this type; 0 where rows can't be
        quantized.
    """

    code: int
    name: str
    array: np.dtype[Any]
    stored: np.dtype[Any]
    overflow: float = 0.0

    @property
    def quantizable(self) -> bool:
        """Whether rows of this type can be stored as codes."""
        return self.overflow > 0


def _element(code: int, name: str, stored: str, array: str | None = None, overflow: float = 0.0) -> Element:
    return Element(code, name, np.dtype(array or stored), np.dtype(stored).newbyteorder("<"), overflow)


ELEMENTS = (
    _element(1, "float32", "f4", overflow=math.inf),
    _element(2, "float16", "f2", overflow=_FLOAT16_OVERFLOW),
    _element(3, "bfloat16", "u2", array="f4", overflow=_BFLOAT16_OVERFLOW),
    _element(4, "float64", "f8"),
    _element(5, "int8", "i1"),
    _element(6, "int16", "i2"),
    _element(7, "int32", "i4"),
    _element(8, "int64", "i8"),
    _element(9, "uint8", "u1"),
    _element(10, "uint16", "u2"),
    _element(11, "uint32", "u4"),
    _element(12, "uint64", "u8"),
    _element(13, "bool", "?"),
)
BY_NAME = {element.name: element for element in ELEMENTS}
BY_CODE = {element.code: element for element in ELEMENTS}


def element_named(name: str) -> Element:
    """Return the element type of that name. `RowsError` if the name is unknown."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise RowsError(f"unknown element type {name!r}; use one of {', '.join(BY_NAME)}") from None


def quantizable_element(name: str) -> Element:
    """Return the element type of that name, if its rows can be stored as codes."""
    element = element_named(name)
    if not element.quantizable:
        raise RowsError(f"{name} rows can't be quantized; cast them to float32, or use cnr_rows")
    return element


@lru_cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which numpy puts together anew each time


def element_of(dtype: npt.DTypeLike) -> str:
    """Return the name of the element type that holds arrays of `dtype`, in any byte order.

    Parameters
    ----------
    dtype
        A dtype, or what numpy takes as one.

    Raises
    ------
    RowsError
        No element type holds that dtype.
    """
    name = _name(np.dtype(dtype))
    if name not in BY_NAME:
        raise RowsError(f"arrays of dtype {name} can't be stored; use one of {', '.join(BY_NAME)}")
    return name


def array_dtype(element: str) -> np.dtype[Any]:
    """Return the numpy dtype of decoded arrays of an element type. bfloat16 is decoded to float32.

    Parameters
    ----------
    element
        The element type's name, such as "float32".

    Raises
    ------
    RowsError
        The name is unknown.
    """
    return element_named(element).array


def fill_value(element: str) -> np.generic:
    """Return the value that absent rows decode to: NaN for floats, 0 for integers, False for bool.

    Parameters
    ----------
    element
        The element type's name, such as "float32".

    Raises
    ------
    RowsError
        The name is unknown.
    """
    dtype = array_dtype(element)
    fill: np.generic = dtype.type(np.nan if dtype.kind == "f" else 0)
    return fill


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return values without NaN rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
