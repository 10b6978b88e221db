"""The codec of k-means: rows are stored as codes of the nearest centroids of a codebook.

With group "row" each row has its own codebook, and its codes depend on that row and the codec alone. A shared codebook
(the paper's contiguous blocks and two-tier k-means) depends on every row that shares it: a row then decodes to other
values when it is encoded with other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, quantizable_element
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels import kmeans as kernels
from cnr_codecs.payload.payload import (
    PARAMETER_DTYPES,
    ParameterType,
    Scheme,
    Segment,
    book_dtype,
    build,
    row_bytes,
)
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.protocol import NamedCodec, Offsets, Rows
from cnr_codecs.rows import check_rows, raw_segment
from cnr_codecs.uniform.uniform import row_extremes

GroupName = Literal["row", "block", "cluster"]
GROUPS: tuple[GroupName, ...] = ("row", "block", "cluster")
MAX_CLUSTERS = 256
DEFAULT_BLOCK_ROWS = 64

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class KMeansRows(NamedCodec):
    """Quantizes each value to the nearest centroid of its row's codebook.

    Parameters
    ----------
    bits
        Bits of a code, 1 to 8. A codebook has 2**bits centroids.
    group
        Which rows share a codebook. With "row" each row has its own. With "block" contiguous rows share one, among
        the given rows. With "cluster" rows share one whose least and greatest values are alike.
    exact
        Whether to find the codebooks of least squared error instead of good ones. It is many times slower.
    block_rows
        For "block" only: rows of a block, 1 to 2**32 - 1; default 64.
    clusters
        For "cluster" only: the most clusters, a power of two up to 256, which is the default. There is never more
        than one for every 2**bits rows.

    Raises
    ------
    CodecConfigError
        An option is unknown or out of range.
    """

    _name: ClassVar[str] = "kmeans"

    bits: int = 4
    group: GroupName = "row"
    exact: bool = False
    block_rows: int | None = None
    clusters: int | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise CodecConfigError(f"bits must be an integer from 1 to 8, got {self.bits!r}")
        if self.group not in GROUPS:
            raise CodecConfigError(f"unknown group {self.group!r}; use one of {', '.join(GROUPS)}")
        if type(self.exact) is not bool:
            raise CodecConfigError(f"exact must be true or false, got {self.exact!r}")
        if self.block_rows is not None and self.group != "block":
            raise CodecConfigError(f"block_rows belongs to the group 'block', not to {self.group!r}")
        if self.clusters is not None and self.group != "cluster":
            raise CodecConfigError(f"clusters belongs to the group 'cluster', not to {self.group!r}")
        if self.block_rows is not None and not _is_integer(self.block_rows, (1 << 32) - 1):
            raise CodecConfigError(
                f"block_rows must be an integer from 1 to 2**32 - 1, got {self.block_rows!r}"
            )
        if self.clusters is not None and (
            not _is_integer(self.clusters, MAX_CLUSTERS) or self.clusters & (self.clusters - 1)
        ):
            raise CodecConfigError(
                f"clusters must be a power of two from 1 to {MAX_CLUSTERS}, got {self.clusters!r}"
            )
        # The default is removed, so that codecs that do the same are equal and have the same configuration.
        if self.block_rows == DEFAULT_BLOCK_ROWS:
            object.__setattr__(self, "block_rows", None)

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values with a float16 codebook, as most rows have.

        The row's share of the row set is left out.
        """
        kind = quantizable_element(element)
        book = float(self._book_bytes(ParameterType.FLOAT16))
        if self.group == "block":
            book = 1 + book / (self.block_rows or DEFAULT_BLOCK_ROWS)
        elif self.group == "cluster":
            book = 1 + book / (1 << self.bits)
        return min(book + row_bytes(Scheme.SHARED, self.bits, dim), float(dim * kind.stored.itemsize))

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones; see `RowCodec.encode_rows`.

        Raises
        ------
        RowsError
            As there, or more than 65,536 values share a codebook, which is too many for `exact`.
        """
        kind, values, offsets = check_rows(values, offsets, rows, quantizable_element(element).name)
        # Rows may hold anything, and the caller may have made numpy raise floating-point errors.
        with np.errstate(all="ignore"):
            segments = self._segments(values, offsets, rows, kind) if len(values) else []
        return build(rows, values.shape[1], kind, segments, seal)

    def _options(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if value not in (None, False)}
        return {"bits": self.bits, "group": self.group, **shown}

    def _book_bytes(self, parameter_type: ParameterType) -> int:
        return PARAMETER_DTYPES[parameter_type].itemsize << self.bits

    def _segments(self, values: Rows, offsets: Offsets, rows: int, element: Element) -> list[Segment]:
        # Negative zeros become positive: otherwise the sort would decide which zero a centroid is.
        wide = np.ascontiguousarray(values, np.float32) + np.float32(0)
        wide.flags.writeable = False
        low, high = row_extremes(wide)
        order = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
        book = self._books(low, high, order)
        held = self._worthwhile(book, ParameterType.FLOAT16, wide.shape[1], element)
        order, book = order[held], np.unique(book[held], return_inverse=True)[1]
        raw = np.ones(len(wide), np.bool_)
        segments = []
        if len(order):
            fitted = fit_books(wide, order, book, self.bits, self.exact)
            for kind in ParameterType.FLOAT16, ParameterType.FLOAT32:
                chosen = fitted.float16[book] == (kind is ParameterType.FLOAT16)
                chosen[chosen] = self._worthwhile(book[chosen], kind, wide.shape[1], element)
                if chosen.any():
                    row_set = RowSet.of(offsets[order[chosen]], rows)
                    segments.append(self._segment(wide, order[chosen], book[chosen], fitted, kind, row_set))
                    raw[order[chosen]] = False
        if raw.any():
            segments.append(raw_segment(values, offsets, rows, np.flatnonzero(raw), element))
        return segments

    def _books(self, low: Float32s, high: Float32s, order: Order) -> Books:
        """Return the number of the codebook of each of the rows `order`. Numbers may be left out."""
        if self.group == "row" or len(order) == 0:
            return np.arange(len(order))
        if self.group == "block":
            return order // (self.block_rows or DEFAULT_BLOCK_ROWS)
        max_clusters = min(self.clusters or MAX_CLUSTERS, max(1, len(order) >> self.bits))
        return by_clusters(np.stack([low, high], axis=1)[order], 1 << (max_clusters.bit_length() - 1))

    def _worthwhile(self, book: Books, kind: ParameterType, dim: int, element: Element) -> Flags:
        """Which rows, whose codebooks `book` numbers, have a codebook that is smaller than what it saves."""
        _, number, counts = np.unique(book, return_inverse=True, return_counts=True)
        saved = dim * element.stored.itemsize - row_bytes(Scheme.SHARED, self.bits, dim)
        if self.group != "row":
            saved -= book_dtype(len(counts)).itemsize
        worth: Flags = counts * saved > self._book_bytes(kind)
        return worth[number]

    def _segment(
        self,
        wide: Float32s,
        order: Order,
        book: Books,
        fitted: Codebooks,
        kind: ParameterType,
        row_set: RowSet,
    ) -> Segment:
        used, number = np.unique(book, return_inverse=True)
        centroids = fitted.centroids[used]
        codes = np.empty((len(order), row_bytes(Scheme.SHARED, self.bits, wide.shape[1])), np.uint8)
        kernels.assign_pack(wide, order, number, thresholds(centroids), self.bits, codes.reshape(-1))
        scheme = Scheme.CODEBOOK if self.group == "row" else Scheme.SHARED
        books = None if scheme is Scheme.CODEBOOK else number.astype(np.uint32)
        return Segment(
            scheme, self.bits, kind, row_set, centroids.astype(PARAMETER_DTYPES[kind]), codes, books
        )


def _is_integer(value: Any, maximum: int) -> bool:
    return type(value) is int and 1 <= value <= maximum


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
    """Codebooks of n sets of values."""

    centroids: Float32s  # float32 (n, codes), ascending: the stored values
    # bool (n,): the codebooks that are stored as float16. It represents their centroids exactly.
    float16: Flags


def fit_books(
    values: Float32s, order: npt.NDArray[np.intp], book: Books, bits: int, exact: bool
) -> Codebooks:
    """Fit the codebooks of the rows `order` of `values`. The GIL is released.

    `values`: float32 (n, dim). The rows `order` are finite.
    `order`: (m,): rows, at least one.
    `book`: int64 (m,): the codebook of each of them. All numbers from 0 to the greatest are used.
    `exact`: whether to find the least squared error, instead of where Lloyd's iterations end.
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
