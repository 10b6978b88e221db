"""The codec of k-means: rows are stored as codes of the nearest centroids of a codebook.

With group "row" each row has its own codebook, and its codes depend on that row and the codec alone. A shared codebook
(the paper's contiguous blocks and two-tier k-means) depends on every row that shares it: a row then decodes to other
values when it is encoded with other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, quantizable_element
from cnr_codecs.errors import CodecConfigError
from cnr_codecs.kernels import kmeans as kernels
from cnr_codecs.kmeans.codebooks import Books, Codebooks, Flags, Float32s, by_clusters, fit_books, thresholds
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
from cnr_codecs.protocol import Offsets, Rows
from cnr_codecs.rows import check_rows, raw_segment
from cnr_codecs.uniform.uniform import row_extremes

GroupName = Literal["row", "block", "cluster"]
GROUPS: tuple[GroupName, ...] = ("row", "block", "cluster")
MAX_CLUSTERS = 256
DEFAULT_BLOCK_ROWS = 64

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class KMeansRows:
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

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that `row_codec` takes, without options that have their default."""
        return {"id": "cnr_kmeans", **self._options()}

    def zarr_codec(self) -> dict[str, Any]:
        """Return the entry of a Zarr v3 array's `codecs`."""
        return {"name": "cnr.kmeans", "configuration": self._options()}

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
