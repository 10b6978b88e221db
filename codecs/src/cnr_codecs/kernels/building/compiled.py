"""How kernels are compiled: so that the first use of each, which waits for the compiler, waits little.

What costs time: each function, each layout of arrays that it is called with, and whatever makes, views or slices an
array or may raise an error with a text. So kernels get their arrays from their callers, flat and contiguous, and
scratch memory too. Functions that only kernels call get no way in from Python: they are compiled by themselves, and
once more in each kernel, so there are few. Neither checks divisors for 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
from numba import njit
from numba.core.caching import FunctionCache

log = logging.getLogger("cnr_codecs")
_folders: set[Path] = set()
_njit: Any = partial(njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
helper: Any = _njit(no_cpython_wrapper=True)
"""A part of kernels. Python must not call it."""


class _Cache(FunctionCache):
    """Compiled kernels on disk. A full disk or damaged files cost the time to compile, and nothing else."""

    # Once in a process: what is wrong with one file is so with all of them.
    is_warned = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]  # numba types a part of itself
        except Exception as error:  # noqa: BLE001 - unpickling a damaged file raises anything
            self._warn("is damaged and compiled anew", error)
            with suppress(OSError):
                # Or the damaged index would stay.
                self.flush()  # type: ignore[no-untyped-call]  # numba types a part of itself
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]  # numba types a part of itself
        except OSError as error:
            self._warn("can't be kept, so each process compiles it anew", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not _Cache.is_warned:
            _Cache.is_warned = True
            log.warning(
                "a compiled kernel in %s %s (%s: %s)", self.cache_path, what, type(error).__name__, error
            )


def kernel(function: Callable[..., Any]) -> Any:
    """A loop that Python calls. What it is compiled to is kept on disk, where there is a place for it."""
    compiled = _njit(function)
    # Without a folder that can be written, numba's own `cache=True` raises an error as the module is imported.
    with suppress(RuntimeError):
        cache: Any = _Cache(compiled.py_func)  # type: ignore[no-untyped-call]  # numba types a part of itself
        compiled._cache = cache
        _folders.add(Path(cache.cache_path))
    return compiled


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array flat. It may not be written to: kernels are compiled for such input alone."""
    flat = array.reshape(-1).view()
    flat.flags.writeable = False
    return flat


def cache_folders() -> list[Path]:
    """Where the kernels that were imported so far are kept once they are compiled. Empty if nothing can be written."""
    return sorted(_folders)
