"""Scratch memory of kernels, which is kept for the next call: to allocate it would take as long as a small call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt

Scratch = tuple[npt.NDArray[Any], ...]

_MOST = 16


_LINE_BYTES = 64


def zeros(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin at a line of the cache: vectors that cross lines would take a third more time."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + _LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + nbytes].view(dtype)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.by_arguments: dict[tuple[int, ...], Scratch] = {}


def for_thread(make: Callable[..., Scratch]) -> Callable[..., Scratch]:
    """Keep what `make` returns for the same arguments, separately for each thread: kernels run without the GIL."""
    kept = _Kept()

    @wraps(make)
    def scratch(*arguments: int) -> Scratch:
        made = kept.by_arguments
        found = made.get(arguments)
        if found is None:
            if len(made) == _MOST:
                made.clear()
            found = made[arguments] = make(*arguments)
        return found

    return scratch
