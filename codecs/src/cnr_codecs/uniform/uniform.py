"""The codec of uniform quantization: symmetric, asymmetric, and adaptive, which searches for the best range.

A row's codes depend on that row and on the codec alone, not on the rows that it is encoded with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, quantizable_element
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels import uniform as kernels
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.search import MAX_DIM, NORMAL_STEPS, greedy_walk
from cnr_codecs.payload.payload import (
    PARAMETER_DTYPES,
    PARAMETERS_PER_ROW,
    Draft,
    ParameterType,
    Scheme,
    Segment,
    build,
    encode_head,
    head_bytes,
    row_bytes,
)
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.protocol import NamedCodec, Offsets, Rows, encode_each
from cnr_codecs.rows import LosslessRows, check_offsets, check_values, raw_segment

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SchemeName = Literal["symmetric", "asymmetric", "adaptive"]
SCHEMES: dict[SchemeName, Scheme] = {
    "symmetric": Scheme.SYMMETRIC,
    "asymmetric": Scheme.ASYMMETRIC,
    "adaptive": Scheme.ASYMMETRIC,
}
MAX_BINS = 4096


def default_walk(bits: int) -> tuple[int, float]:
    """Return the default (bins, ratio) of the paper's greedy walk for codes of `bits` bits."""
    return (25, 0.99) if bits <= 3 else (45, 0.5)


@dataclass(eq=False, slots=True)
class QuantizedRows:
    """Parameters and packed codes of n rows, as the kernels leave them; see `kernels.uniform`."""

    # scale, offset: float32 (n,): the parameters. They are read for half steps, and where rows have no float16 ones.
    scale: Float32s
    offset: Float32s
    halves: npt.NDArray[np.uint16]  # uint16 (2, n): the bits of both as float16, for rows that have such
    # uint8 (n,): the `ParameterType` of each row; 0 for rows that must be stored raw, whose codes mean nothing
    kind: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.uint8]  # uint8 (n, bytes a row): packed codes
    float16_rows: int = 0  # how many rows have float16 parameters

    @classmethod
    def for_codes(cls, codes: npt.NDArray[np.uint8]) -> QuantizedRows:
        """Allocate the arrays of n rows, whose codes will be written to `codes`, (n, bytes a row)."""
        count = len(codes)
        scale, offset = np.empty(count, np.float32), np.empty(count, np.float32)
        return cls(scale, offset, np.empty((2, count), np.uint16), np.empty(count, np.uint8), codes)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return what kernels write to."""
        return self.scale, self.offset, self.halves, self.kind, self.codes.reshape(-1)

    def take(self, chosen: Mask | slice) -> QuantizedRows:
        """Return some of the rows."""
        parameters = self.scale[chosen], self.offset[chosen], self.halves[:, chosen]
        return QuantizedRows(*parameters, self.kind[chosen], self.codes[chosen])

    def stored(self, kind: ParameterType, is_symmetric: bool) -> npt.NDArray[Any]:
        """Return the parameters as segments of a kind store them: scale and offset, or of symmetric rows half steps."""
        dtype = PARAMETER_DTYPES[kind]
        if is_symmetric:
            return (self.scale * np.float32(0.5)).astype(dtype)[None]
        if kind is ParameterType.FLOAT16:
            return self.halves.view(np.float16).astype(dtype, copy=False)
        return np.stack([self.scale, self.offset]).astype(dtype, copy=False)


@dataclass(frozen=True)
class UniformRows(NamedCodec):
    """Quantizes each row uniformly, with parameters of its own.

    Parameters
    ----------
    scheme
        "symmetric" stores one parameter a row. "asymmetric" stores two, which cover the row's least and greatest
        value. "adaptive" stores two as well, and searches for those of the least squared error. It equals
        "asymmetric" in rows of more than 2,048 columns, where a search would take much memory, and, without `bins`
        and `ratio`, at 8 bits, where a search gains nothing.
    bits
        Bits of a code, 1 to 8.
    bins, ratio
        For "adaptive" only. With either, the search is the paper's greedy walk: it cuts the range into `bins` parts,
        2 to 4096, and may take off the share `ratio` of them, 0 (none) to 1. The other one defaults to 45 and 0.5, at
        3 bits and fewer to 25 and 0.99. Without both, the search is a faster one that leaves smaller errors.

    Raises
    ------
    CodecConfigError
        An option is unknown or out of range.
    """

    _name: ClassVar[str] = "uniform"

    scheme: SchemeName = "adaptive"
    bits: int = 4
    bins: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise CodecConfigError(f"unknown scheme {self.scheme!r}; use one of {', '.join(SCHEMES)}")
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise CodecConfigError(f"bits must be an integer from 1 to 8, got {self.bits!r}")
        if self.scheme != "adaptive":
            if self.bins is not None or self.ratio is not None:
                raise CodecConfigError(
                    f"bins and ratio belong to the scheme 'adaptive', not to {self.scheme!r}"
                )
            return
        if self.bins is None and self.ratio is None:
            return
        bins, ratio = default_walk(self.bits)
        bins = bins if self.bins is None else self.bins
        ratio = ratio if self.ratio is None else self.ratio
        if type(bins) is not int or not 2 <= bins <= MAX_BINS:
            raise CodecConfigError(f"bins must be an integer from 2 to {MAX_BINS}, got {bins!r}")
        if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
            raise CodecConfigError(f"ratio must be a number from 0 to 1, got {ratio!r}")
        # Defaults are filled in, so that codecs that do the same are equal and have the same configuration.
        object.__setattr__(self, "bins", bins)
        object.__setattr__(self, "ratio", float(ratio))

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values with float16 parameters, as nearly all rows have.

        The row's share of the row set is left out.
        """
        kind = quantizable_element(element)
        return float(min(self._row_bytes(dim, ParameterType.FLOAT16), dim * kind.stored.itemsize))

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones; see `RowCodec.encode_rows`."""
        kind, values = check_values(values, rows, quantizable_element(element).name)
        check_offsets(offsets, len(values), rows)
        count, dim = values.shape
        parameter_types = self._worthwhile(kind, dim)
        if not count or not parameter_types:
            return LosslessRows().encode_rows(values, offsets, rows, element=element, seal=seal)
        row_set = RowSet.first(count, rows) if offsets is None else RowSet.of(offsets, rows)
        # Nearly always all rows have float16 parameters. Their codes are then written to the payload at once.
        scheme, bits = SCHEMES[self.scheme], self.bits
        body_bytes = count * self._row_bytes(dim, ParameterType.FLOAT16)
        width = row_bytes(scheme, bits, dim)
        draft = Draft(head_bytes([row_set]) + body_bytes - count * width, count, width)
        encoded = self._encode(values, kind, draft.codes)
        if encoded.float16_rows == count:
            segment = self._segment(encoded, row_set, ParameterType.FLOAT16)
            head = encode_head(rows, dim, kind, [segment], [body_bytes], seal)
            parameters = segment.stored_parameters()
            del encoded, segment
            return draft.finish(head + parameters)
        places = np.arange(count) if offsets is None else offsets
        raw = values[self.raw_rows(encoded.kind, dim, element)]
        return build(rows, dim, kind, self._segments(encoded, raw, places, rows, kind), seal)

    def encode_chunks(
        self,
        values: Rows,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        element: str,
        seals: Sequence[int],
    ) -> list[bytes]:
        """Return the payloads of several chunks, whose rows one call quantizes; see `ChunksCodec.encode_chunks`."""
        kind, values = check_values(values, rows, quantizable_element(element).name)
        count, dim = values.shape
        # A subclass may encode a chunk in a way of its own.
        if not self._worthwhile(kind, dim) or type(self).encode_rows is not UniformRows.encode_rows:
            return encode_each(self, values, offsets, edges, rows, element=element, seals=seals)
        codes = np.empty((count, row_bytes(SCHEMES[self.scheme], self.bits, dim)), np.uint8)
        encoded = self._encode(values, kind, codes)
        raw = (
            values[:0] if encoded.float16_rows == count else values[self.raw_rows(encoded.kind, dim, element)]
        )
        return self.encode_codes(encoded, raw, offsets, edges, rows, element=element, seals=seals)

    def encode_codes(
        self,
        quantized: QuantizedRows,
        raw_values: Rows,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        element: str,
        seals: Sequence[int],
    ) -> list[bytes]:
        """Return the payloads of several chunks whose rows are quantized already, as `encode_chunks` returns them.

        Parameters
        ----------
        quantized
            What this codec's kernels, or a device's, made of the rows of all chunks.
        raw_values
            (m, dim), of the element type's array dtype: the rows of `raw_rows`, in their order.
        offsets, edges, rows, element, seals
            As for `encode_chunks`.

        Raises
        ------
        RowsError
            An argument is not as above, or rows of this element type and dim are smaller as they are.
        """
        kind, raw_values = check_values(raw_values, rows, quantizable_element(element).name)
        dim, all_float16 = raw_values.shape[1], quantized.float16_rows == len(quantized.kind)
        raw = np.flatnonzero(self.raw_rows(quantized.kind, dim, element))
        width = row_bytes(SCHEMES[self.scheme], self.bits, dim)
        if (
            len(raw) != len(raw_values)
            or quantized.codes.shape[1:] != (width,)
            or not self._worthwhile(kind, dim)
        ):
            raise RowsError(
                f"quantized rows of {dim} {element} values, of which {len(raw)} are raw, can't have codes "
                f"of shape {quantized.codes.shape} and {len(raw_values)} raw rows: codes take {width} bytes a row, and "
                "narrow rows have none"
            )
        payloads = []
        for (begin, end), seal in zip(pairwise(edges), seals, strict=True):
            chunk = quantized.take(slice(begin, end))
            places = np.arange(end - begin) if offsets is None else offsets[begin:end]
            check_offsets(places, end - begin, rows)
            if all_float16 or (chunk.kind == ParameterType.FLOAT16).all():
                segments = [self._segment(chunk, RowSet.of(places, rows), ParameterType.FLOAT16)]
            else:
                first, last = np.searchsorted(raw, (begin, end))
                segments = self._segments(chunk, raw_values[first:last], places, rows, kind)
            payloads.append(build(rows, dim, kind, segments, seal))
        return payloads

    def raw_rows(self, kinds: npt.NDArray[np.uint8], dim: int, element: str) -> npt.NDArray[np.bool_]:
        """Return which rows are stored raw, bool (n,): their values must be at hand.

        Parameters
        ----------
        kinds
            As `QuantizedRows.kind`.
        dim
            Values of a row.
        element
            The element type's name.
        """
        return ~np.isin(kinds, self._worthwhile(quantizable_element(element), dim))

    def is_worthwhile(self, dim: int, element: str) -> bool:
        """Return whether quantized rows are smaller than raw ones. Otherwise all rows are stored raw.

        Parameters
        ----------
        dim
            Values of a row.
        element
            The element type's name.
        """
        return bool(self._worthwhile(quantizable_element(element), dim))

    def _options(self) -> dict[str, Any]:
        searched = {"bins": self.bins, "ratio": self.ratio}
        chosen = {name: value for name, value in searched.items() if value is not None}
        return {"scheme": self.scheme, "bits": self.bits, **chosen}

    def _row_bytes(self, dim: int, parameter_type: ParameterType) -> int:
        scheme = SCHEMES[self.scheme]
        parameters = PARAMETERS_PER_ROW[scheme] * PARAMETER_DTYPES[parameter_type].itemsize
        return parameters + row_bytes(scheme, self.bits, dim)

    def _worthwhile(self, element: Element, dim: int) -> list[ParameterType]:
        """Return the parameter types with which quantized rows are smaller than raw ones. Narrow rows may have none."""
        raw_bytes = dim * element.stored.itemsize
        return [kind for kind in PARAMETER_DTYPES if self._row_bytes(dim, kind) < raw_bytes]

    def _segments(
        self, encoded: QuantizedRows, raw_values: Rows, offsets: Offsets, rows: int, element: Element
    ) -> list[Segment]:
        segments: list[Segment] = []
        raw = np.ones(len(encoded.kind), np.bool_)
        for kind in self._worthwhile(element, raw_values.shape[1]):
            chosen = encoded.kind == kind
            if chosen.any():
                row_set = RowSet.of(offsets[chosen], rows)
                segments.append(self._segment(encoded.take(chosen), row_set, kind))
                raw &= ~chosen
        if raw.any():
            segments.append(raw_segment(raw_values, offsets[raw], rows, np.arange(len(raw_values)), element))
        return segments

    def _segment(self, encoded: QuantizedRows, row_set: RowSet, kind: ParameterType) -> Segment:
        scheme = SCHEMES[self.scheme]
        stored = encoded.stored(kind, scheme is Scheme.SYMMETRIC)
        return Segment(scheme, self.bits, kind, row_set, stored, encoded.codes)

    def _encode(self, values: Rows, element: Element, codes: npt.NDArray[np.uint8]) -> QuantizedRows:
        # Kernels are compiled for read-only rows alone. The flag is set on a view, not on the caller's array.
        wide = np.ascontiguousarray(values, np.float32).view()
        wide.flags.writeable = False
        encoded = QuantizedRows.for_codes(codes)
        dim, flat = wide.shape[1], wide.reshape(-1)
        options = (self.bits, element.overflow, kernels.scratch_for(dim, self.bits))
        arrays = encoded.arrays()
        search = self.scheme == "adaptive" and dim <= MAX_DIM
        if search and self.bins is not None and self.ratio is not None:
            low, high = _walked(wide, self.bits, self.bins, self.ratio)
            float16_rows = kernels.encode_windows(flat, low, high, dim, *options, arrays)
        elif search and self.bins is None and self.bits in NORMAL_STEPS:
            bits, overflow, scratch = options
            step, found = NORMAL_STEPS[bits], kernels.search_scratch(dim)
            float16_rows = kernels.encode_searched(flat, dim, bits, step, overflow, scratch, found, arrays)
        else:
            float16_rows = kernels.encode_ranges(flat, dim, *options, arrays, self.scheme == "symmetric")
        encoded.float16_rows = float16_rows
        return encoded


def _walked(wide: Float32s, bits: int, bins: int, ratio: float) -> tuple[Float64s, Float64s]:
    """Return the ranges, low and high, that the paper's walk leaves."""
    row_low, row_high = row_extremes(wide)
    # Rows may hold anything. Those that are not finite will be stored raw.
    with np.errstate(all="ignore"):
        low, high = row_low.astype(np.float64), row_high.astype(np.float64)
        steps = min(int(bins * ratio), bins - 1)
        if steps == 0:
            return low, high
        left, right = (np.zeros(len(wide), np.int32) for _ in range(2))
        factor = search_factor(row_low, row_high, bins)
        greedy_walk(wide, row_low, factor, bins, steps, (1 << bits) - 1, left, right)
        width = (high - low) / bins
        return np.where(left > 0, low + left * width, low), np.where(right > 0, high - right * width, high)


def row_extremes(values: Float32s) -> tuple[Float32s, Float32s]:
    """Return the least and the greatest value of each row of (n, dim). One is not finite if any value is not."""
    low, high = (np.empty(len(values), np.float32) for _ in range(2))
    kernels.row_extremes(read_only(values), *values.shape, low, high)
    return low, high


def search_factor(low: Float32s, high: Float32s, bins: int) -> Float32s:
    """Return what maps a row's values to bins, or 0 where no float32 does: the search then does nothing."""
    with np.errstate(all="ignore"):
        span = high - low
        factor = np.float32(bins) / span
    return np.where(np.isfinite(span) & np.isfinite(factor), factor, np.float32(0))
