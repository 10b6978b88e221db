"""Allocates memory of a size that a stored document asks for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cnr_store.errors import CorruptionError

Array = np.ndarray[Any, Any]


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Array:
    """A new array, its values undefined.

    `what`: what is to be read into it, for the error.
    """
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise CorruptionError(
            f"{what}: {shape} {dtype} take {math.prod(shape) * dtype.itemsize >> 20} MiB, more than can be allocated; "
            "the store is damaged, or a machine with more memory is needed"
        ) from error
