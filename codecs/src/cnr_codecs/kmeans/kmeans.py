"""k-means: rows as codes of the nearest centroids of a codebook, which a row has to itself or shares.

With group "row" a row's codes depend on that row and the codec alone. Shared codebooks (paper, section on
k-means: by contiguous blocks, and two-tier) depend on every row that shares them: such a row decodes to other
values when it is encoded with other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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

GROUPS = ("row", "block", "cluster")
MAX_CLUSTERS = 256
DEFAULT_BLOCK_ROWS = 64

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class KMeansRows:
    """Rows as codes of their nearest centroids.

    Args:
        bits: bits of a code, 1 to 8: a codebook has 2**bits centroids.
        group: what shares a codebook: each "row" has its own; each "block" of rows, contiguous among those
            given; or each "cluster" of rows whose least and greatest values are alike.
        exact: find the codebooks of least squared error, instead of good ones; many times slower.
        block_rows: for "block" only: rows of a block, 1 to 2**32 - 1; default 64.
        clusters: for "cluster" only: how many at most, a power of two up to 256; default as many as rows
            that have 2**bits rows each.

    Raises:
        CodecConfigError: an option is unknown or out of range.
    """

    bits: int = 4
    group: str = "row"
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
        # Codecs that do the same are equal, and write the same configuration.
        if self.block_rows == DEFAULT_BLOCK_ROWS:
            object.__setattr__(self, "block_rows", None)

    def get_config(self) -> dict[str, Any]:
        """The configuration that `row_codec` takes, as numcodecs writes it; without options left at defaults."""
        return {"id": "cnr_kmeans", **self._options()}

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`."""
        return {"name": "cnr.kmeans", "configuration": self._options()}

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Encoded bytes of a row of `dim` values, without its share of the row set, as most rows have it."""
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
        """The payload of a chunk of `rows` rows that holds these; see `RowCodec.encode_rows`.

        Raises:
            RowsError: as there; or more than 65,536 values share a codebook, too many for `exact`.
        """
        kind, values, offsets = check_rows(values, offsets, rows, quantizable_element(element).name)
        # Rows may hold anything, and the caller's numpy may raise what it only warns of elsewhere.
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
        # Negative zeros become positive, or it would be the sort's choice which of them a centroid is.
        wide = np.ascontiguousarray(values, np.float32) + np.float32(0)
        wide.flags.writeable = False
        least, most = row_extremes(wide)
        order = np.flatnonzero(np.isfinite(least) & np.isfinite(most))
        book = self._books(least, most, order)
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

    def _books(self, least: Float32s, most: Float32s, order: Order) -> Books:
        """Which codebook each of the rows `order` uses; they need not be numbered from 0."""
        if self.group == "row" or len(order) == 0:
            return np.arange(len(order))
        if self.group == "block":
            return order // (self.block_rows or DEFAULT_BLOCK_ROWS)
        most_clusters = min(self.clusters or MAX_CLUSTERS, max(1, len(order) >> self.bits))
        return by_clusters(np.stack([least, most], axis=1)[order], 1 << (most_clusters.bit_length() - 1))

    def _worthwhile(self, book: Books, kind: ParameterType, dim: int, element: Element) -> Flags:
        """Which rows use a codebook, of which `book` is the number, that is smaller than what it saves."""
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
        kernels.assign_pack(wide, order, number, thresholds(centroids), self.bits, codes)
        scheme = Scheme.CODEBOOK if self.group == "row" else Scheme.SHARED
        books = None if scheme is Scheme.CODEBOOK else number.astype(np.uint32)
        return Segment(
            scheme, self.bits, kind, row_set, centroids.astype(PARAMETER_DTYPES[kind]), codes, books
        )


def _is_integer(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most
