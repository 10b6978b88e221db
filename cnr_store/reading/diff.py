"""Compares two versions, array by array."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cnr_backends import Transfer
from cnr_store.catalog.catalog import Catalog, Url, Version, open_record
from cnr_store.chains.allocation import Array
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.errors import CorruptionError
from cnr_store.format.record import Record
from cnr_store.reading.changed_rows import ChangedRows, all_rows, changed_rows, find_unshared

Status = Literal["equal", "changed", "reshaped", "added", "removed"]


@dataclass(frozen=True)
class ArrayDiff:
    """One array in two versions.

    Attributes
    ----------
    path
        Its place in a version, such as ``tables/NAME/weight``.
    status
        ``equal`` bit for bit; ``changed``; ``reshaped``: of another shape or type; ``added`` or ``removed``: in one
        of the versions only.
    rows, rows_changed
        Rows in the newer version (entries of the first axis), and those that differ in any bit. All rows, unless
        both versions have the array, in one shape.
    max_abs
        The largest absolute difference of two values, where both are finite; None unless both are numbers. At most
        the largest float64.
    """

    path: str
    status: Status
    rows: int
    rows_changed: int
    max_abs: float | None = None


def diff(url: Url, older: Version, newer: Version = "latest", **storage_options: Any) -> list[ArrayDiff]:
    """Compare two versions bit for bit.

    Of tables only the rows are read that the versions do not share.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    older, newer
        An id, a `VersionInfo`, a step, or ``latest``, each.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError, CorruptionError
    """
    catalog, before = open_record(url, older, **storage_options)
    after = catalog.find(newer)
    with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
        return [
            _compare(catalog, before, after, path, transfer)
            for path in sorted({*before.arrays, *after.arrays})
        ]


def _compare(catalog: Catalog, before: Record, after: Record, path: str, transfer: Transfer) -> ArrayDiff:
    old, new = before.arrays.get(path), after.arrays.get(path)
    rows = _length((new or before.arrays[path]).shape)
    if old is None or new is None:
        return ArrayDiff(path, "added" if old is None else "removed", rows, rows)
    if (old.shape, old.element) != (new.shape, new.element):
        return ArrayDiff(path, "reshaped", rows, rows)
    if new.kind == "dense":
        return _compare_dense(catalog, before, after, path)
    reader = ArrayReader(catalog, before, path)
    unshared = find_unshared(catalog, after, path, [before])
    if unshared is not None:
        try:
            changed = changed_rows(catalog, after, path, unshared, transfer)
            return _compare_pairs(path, rows, _row_pairs(reader, changed))
        except CorruptionError:
            # An unshared version may have been folded into another and deleted meanwhile. Comparing all rows gives
            # the same result, and raises if one of the two versions is damaged.
            catalog.look_for_folds()
    return _compare_pairs(path, rows, _row_pairs(reader, all_rows(catalog, after, path, transfer)))


def _compare_pairs(path: str, rows: int, pairs: Iterable[tuple[Array, Array]]) -> ArrayDiff:
    changed, largest = 0, 0.0
    for one, other in pairs:
        bits, others = (np.ascontiguousarray(each).view(np.uint8) for each in (one, other))
        differs = (bits != others).any(axis=1)
        changed += int(differs.sum())
        largest = max(largest, _max_abs(one[differs], other[differs]))
    return ArrayDiff(path, "changed" if changed else "equal", rows, changed, largest)


def _row_pairs(before: ArrayReader, blocks: Iterable[ChangedRows]) -> Iterator[tuple[Array, Array]]:
    """The older and the newer values of rows that may differ, (n, columns) each."""
    for ids, values in blocks:
        first, span = int(ids[0]), int(ids[-1] - ids[0]) + 1
        need = np.zeros(span, np.uint8)
        need[ids - first] = 1
        out = before.new_rows(span)
        before.read(first, out, need)
        yield out[ids - first], values


def _compare_dense(catalog: Catalog, before: Record, after: Record, path: str) -> ArrayDiff:
    (one, one_type), (other, other_type) = (read_dense(catalog, record, path) for record in (before, after))
    rows = _length(other.shape)
    if one_type != other_type:
        return ArrayDiff(path, "reshaped", rows, rows)
    pairs = [(one.reshape(rows, -1), other.reshape(rows, -1))] if other.size else []
    compared = _compare_pairs(path, rows, pairs)
    # Types that numpy lacks are read as integers that hold their bits, whose difference means nothing.
    return compared if other_type is None else replace(compared, max_abs=None)


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _max_abs(one: Array, other: Array) -> float:
    # Exact where float64 is not: negative values wrap around, and so does their difference.
    if one.dtype.kind in "biu":
        largest, least = np.maximum(one, other).astype(np.uint64), np.minimum(one, other).astype(np.uint64)
        return float(np.max(largest - least, initial=0))
    kind = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one.astype(kind) - other.astype(kind))
    both = np.isfinite(one) & np.isfinite(other)
    return min(float(np.max(apart, where=both, initial=0.0)), sys.float_info.max)
