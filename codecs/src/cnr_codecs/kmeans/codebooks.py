"""Codebooks: their centroids as stored, the thresholds between these, and which rows share one.

A codebook has 2**bits centroids in ascending order. They are float16 where rounding adds little to the error of the
rows that use the codebook, else float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import RowsError
from cnr_codecs.kernels import kmeans as kernels

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Books = npt.NDArray[np.int64]

ITERATIONS = 30
MAX_EXACT_VALUES = 1 << 16
# Sets are fitted in slices of about this many values, so that the work arrays stay in the cache.
_SLICE_VALUES = 1 << 18
# Rounding to float16 may add this share of the squared error, and this share of the squares about the median. The first
# is 1/128 of the error, the second a noise of 1/1024 of the spread.
_MAX_ADDED_ERROR = 2.0**-6
_MAX_NOISE = 2.0**-20


@dataclass(frozen=True, eq=False)
class Codebooks:
    """Codebooks of n sets of values.

    Attributes
    ----------
    centroids
        float32 (n, codes), ascending: the stored values.
    float16
        bool (n,): the codebooks that are stored as float16. It represents their centroids exactly.
    """

    centroids: Float32s
    float16: Flags


def fit_books(
    values: Float32s, order: npt.NDArray[np.intp], book: Books, bits: int, exact: bool
) -> Codebooks:
    """Fit the codebooks of the rows `order` of `values`. The GIL is released.

    Parameters
    ----------
    values
        float32 (n, dim). The rows `order` are finite.
    order
        (m,): rows, at least one.
    book
        int64 (m,): the codebook of each of them. All numbers from 0 to the greatest are used.
    bits
        Bits of a code.
    exact
        Whether to find the least squared error, instead of where Lloyd's iterations end.

    Raises
    ------
    RowsError
        More than 65,536 values share a codebook, and `exact` is true.
    """
    counts = np.bincount(book)
    largest = int(counts.max()) * values.shape[1]
    if exact and largest > MAX_EXACT_VALUES:
        raise RowsError(
            f"{largest} values share a codebook, exact k-means takes at most {MAX_EXACT_VALUES}; "
            f"use exact=False, smaller groups or fewer columns"
        )
    rows = order[np.argsort(book, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(counts)])
    step = max(1, _SLICE_VALUES // largest)
    parts = []
    for first in range(0, len(counts), step):
        last = min(first + step, len(counts))
        ordered, sizes = _sorted_sets(values, rows[starts[first] : starts[last]], counts[first:last])
        parts.append(_fit(ordered, sizes, bits, exact))
    return Codebooks(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _sorted_sets(
    values: Float32s, rows: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]
) -> tuple[Float32s, npt.NDArray[np.int64]]:
    """Return (each set's values, ascending, padded with infinity; how many values each set has)."""
    dim = values.shape[1]
    largest = int(counts.max())
    if len(rows) == largest * len(counts):
        ordered = values[rows].reshape(len(counts), -1)
    else:
        ordered = np.full((len(counts), largest * dim), np.inf, np.float32)
        ordered.reshape(len(counts), largest, dim)[np.arange(largest) < counts[:, None]] = values[rows]
    ordered.sort(axis=1)
    return ordered, counts.astype(np.int64) * dim


def _fit(ordered: Float32s, sizes: npt.NDArray[np.int64], bits: int, exact: bool) -> tuple[Float32s, Flags]:
    """Return the codebooks of sorted sets, as `kernels.kmeans` takes them, and which are float16."""
    count, codes = len(ordered), 1 << bits
    cuts = np.empty((count, codes + 1), np.int64)
    if exact:
        kernels.exact_cuts(ordered, sizes, cuts)
    else:
        kernels.lloyd_cuts(ordered, sizes, ITERATIONS, cuts)
    mean, error, spread = np.empty((count, codes)), np.empty(count), np.empty(count)
    kernels.cluster_means(ordered, sizes, cuts, mean, error, spread)
    narrow = _rounded(mean, np.float16)
    off = narrow - mean
    with np.errstate(all="ignore"):  # centroids of empty clusters may be infinite
        added = (np.diff(cuts, axis=1) * off * off).sum(axis=1)
    fits = np.isfinite(narrow).all(axis=1) & (added <= _MAX_ADDED_ERROR * error + _MAX_NOISE * spread)
    return np.where(fits[:, None], narrow, _rounded(mean, np.float32)), fits


def thresholds(centroids: Float32s) -> Float32s:
    """Return the thresholds (n, codes - 1) between centroids (n, codes).

    A threshold is the greatest float32 that is no nearer to the upper centroid than to the lower one.
    """
    wide = centroids.astype(np.float64)
    middle = (wide[:, :-1] + wide[:, 1:]) / 2
    nearest = middle.astype(np.float32)
    with np.errstate(over="ignore"):  # the number below the least float32 is not used
        below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest > middle, below, nearest)


def _rounded(mean: Float64s, dtype: type[np.floating[Any]]) -> Float32s:
    """Return means rounded to a narrower type, as ascending float32 without negative zeros."""
    with np.errstate(over="ignore"):
        narrow = mean.astype(dtype).astype(np.float32) + np.float32(0)
    return np.maximum.accumulate(narrow, axis=1)


def by_clusters(features: Float32s, clusters: int) -> Books:
    """Cluster rows by their two finite features (n, 2). Return each row's cluster, int64 (n,), below `clusters`.

    `clusters` is a power of two. All clusters are halved repeatedly, each at the median of the feature that varies
    most in it. Rows of equal features are ordered by their place.
    """
    count = len(features)
    book = np.zeros(count, np.int64)
    while len(sizes := np.bincount(book)) < clusters:
        starts = np.cumsum(sizes) - sizes
        wide = features[np.argsort(book, kind="stable")].astype(np.float64)
        spans = np.maximum.reduceat(wide, starts) - np.minimum.reduceat(wide, starts)
        feature = spans.argmax(axis=1)[book]
        order = np.lexsort((features[np.arange(count), feature], book))
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        book = 2 * book + (place - starts[book] >= (sizes[book] + 1) // 2)
    return book
