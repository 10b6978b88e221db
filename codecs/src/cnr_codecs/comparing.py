"""Finds the rows whose stored form changed: other integers on their grid than before, or other bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import element_named
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.comparing import (
    OTHER,
    SAME,
    UNKNOWN,
    compare_exact,
    compare_floats,
    compare_steps,
    digest_rows,
    read_floats,
    read_steps,
)
from cnr_codecs.lattice.floating import floating_codes, floating_limits
from cnr_codecs.lattice.lattice import lattice_codes
from cnr_codecs.payload.coded import MANTISSA_BITS, Grid, code_range, grid_values
from cnr_codecs.protocol import Rows

Codes = npt.NDArray[np.signedinteger[Any]]
Digests = npt.NDArray[np.uint64]
_WORD = np.dtype(np.uint64)
_ANY = (1 << 31) - 1


def compare_rows(values: Rows, parent: Codes, grid: Grid, element: str) -> npt.NDArray[np.uint8]:
    """Return of each row whether its codes are those known, as the codec of the grid would find them.

    `values`: (n, dim), C-contiguous, of the array dtype of the element type.
    `parent`: (n, dim) of `code_dtype`: the codes known; a row is unknown whose first one is `unknown_code` of that.

    Returns: uint8 (n,): `SAME`, `OTHER` or `UNKNOWN`.
    """
    count, dim = values.shape
    found, unknown = np.empty(count, np.uint8), unknown_code(parent.dtype)
    if values.dtype == np.float64:
        return _compare_wide(values, parent, grid, element)
    flat, codes = read_only(np.ascontiguousarray(values, np.float32)), read_only(parent)
    if grid.is_exact:
        compare_exact(flat, dim, codes, unknown, found)
    elif grid.mantissa:
        kinds = np.float32(grid.scale), MANTISSA_BITS - grid.mantissa, floating_limits(grid, element)
        compare_floats(flat, dim, *kinds, codes, unknown, found)
    else:
        compare_steps(flat, dim, 1 / grid.step, codes, unknown, found)
    return found


def _compare_wide(values: Rows, parent: Codes, grid: Grid, element: str) -> npt.NDArray[np.uint8]:
    held, raw = floating_codes(values, grid, element)
    found = np.full(len(values), OTHER, np.uint8)
    found[~raw] = np.where((held == parent[~raw]).all(axis=1), SAME, OTHER)
    found[parent[:, 0] == unknown_code(parent.dtype)] = UNKNOWN
    return found


def read_codes(values: Rows, grid: Grid, element: str, codes: Codes) -> npt.NDArray[np.bool_]:
    """Write the codes that rows were decoded from, and return which rows have none: bool (n,).

    `values`, `grid`, `element`: as for `compare_rows`. Those of float64 are not looked at.
    `codes`: (n, dim), of `code_dtype`: as `parent` there.
    """
    dim, found = values.shape[1], np.empty(len(values), np.uint8)
    if values.dtype == np.float64:
        codes[:, 0] = unknown_code(codes.dtype)
        return np.ones(len(values), np.bool_)
    flat, out = read_only(np.ascontiguousarray(values, np.float32)), codes.reshape(-1)
    if grid.is_moved:
        return _read_moved(flat.reshape(values.shape), grid, element, codes)
    if grid.mantissa:
        least, most = (0, _ANY) if grid.is_exact else code_range(grid.mantissa, element)
        shift = MANTISSA_BITS - grid.mantissa
        read_floats(flat, dim, shift, least, most, out, unknown_code(codes.dtype), found)
    else:
        most = int(np.iinfo(codes.dtype).max)
        read_steps(flat, dim, np.float32(grid.step), most, out, unknown_code(codes.dtype), found)
    return found.view(np.bool_)


def _read_moved(values: Rows, grid: Grid, element: str, codes: Codes) -> npt.NDArray[np.bool_]:
    held, lacking = floating_codes(values, grid, element)
    found = np.flatnonzero(~lacking)
    codes[found] = held
    is_other = grid_values(held, grid, element).view(np.uint32) != values[found].view(np.uint32)
    lacking[found[is_other.any(axis=1)]] = True
    codes[lacking, 0] = unknown_code(codes.dtype)
    return lacking


def row_digests(values: Rows, key: int) -> Digests:
    """Return a number of 64 bits for the bits of each row. Rows that differ have different ones, all but surely.

    `values`: (n, columns) of any dtype.
    `key`: of 64 bits: digests of another key are not comparable.
    """
    row_bytes = values.shape[1] * values.itemsize
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), row_bytes)
    if rows.shape[1] % _WORD.itemsize:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _WORD.itemsize)))
    words, digests = rows.view(_WORD), np.empty(len(rows), np.uint64)
    digest_rows(read_only(words), words.shape[1], np.uint64(key), digests)
    return digests


def stored_digests(values: Rows, grid: Grid, element: str, key: int) -> Digests:
    """Return a digest of what is stored of each row: of its codes on a grid, or of its bits if it has none.

    `values`, `grid`, `element`: as for `compare_rows`; `key`: as for `row_digests`.
    """
    if grid.mantissa:
        codes, raw = floating_codes(values, grid, element)
    else:
        codes, raw = lattice_codes(values, grid.step, element_named(element))
    digests = np.empty(len(values), np.uint64)
    digests[~raw] = row_digests(codes, key)
    digests[raw] = row_digests(values[raw], key)
    return digests


def code_dtype(grid: Grid | None) -> np.dtype[np.signedinteger[Any]]:
    """Return the narrowest dtype that most codes on a grid fit into. None: on a lattice whose step is not known yet."""
    return grid.dtype if grid is not None and grid.mantissa else np.dtype(np.int8)


def unknown_code(dtype: npt.DTypeLike) -> int:
    """Return what stands as a row's first code where its codes are not known. Those known are above it."""
    return int(np.iinfo(dtype).min)


__all__ = [
    "OTHER",
    "SAME",
    "UNKNOWN",
    "Codes",
    "Digests",
    "code_dtype",
    "compare_rows",
    "read_codes",
    "row_digests",
    "stored_digests",
    "unknown_code",
]
