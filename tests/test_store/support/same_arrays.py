"""Arrays compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def differing(found: Array, expected: Array) -> str | None:
    """How two arrays differ in type, shape or bits; None if they don't."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}"
    left, right = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (found, expected))
    places = np.flatnonzero(left != right)
    return None if not places.size else f"{places.size} bytes, the first at {places[0]} of {left.size}"


def assert_same_arrays(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Both hold the same names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    different = {name: difference for name in found if (difference := differing(found[name], expected[name]))}
    assert not different, different
