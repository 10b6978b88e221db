"""Uniform quantization, row by row: symmetric, asymmetric, and with the paper's greedy search for the range.

A row's codes depend on that row and on the codec alone, whatever other rows it is encoded with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, element_named
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels import uniform as kernels
from cnr_codecs.parameters import Float32s, Parameters, asymmetric, symmetric
from cnr_codecs.payload import (
    PARAMETER_DTYPES,
    PARAMETERS_PER_ROW,
    ParameterType,
    Scheme,
    Segment,
    build,
    row_bytes,
)
from cnr_codecs.reference import keys_to_floats
from cnr_codecs.rows import Offsets, Rows, check_rows, raw_segment
from cnr_codecs.rowset import RowSet

SCHEMES = {"symmetric": Scheme.SYMMETRIC, "asymmetric": Scheme.ASYMMETRIC, "adaptive": Scheme.ASYMMETRIC}
MAX_BINS = 4096


def default_search(bits: int) -> tuple[int, float]:
    """(bins, ratio) of the greedy search by bits; ratio 0 where a search has nothing to gain (8 bits)."""
    if bits <= 3:
        return 25, 0.99
    return (45, 0.5) if bits < 8 else (45, 0.0)


@dataclass(frozen=True)
class UniformRows:
    """Rows quantized uniformly, each with parameters of its own.

    Args:
        scheme: "symmetric" (one parameter a row), "asymmetric" (the row's least and greatest value) or
            "adaptive" (asymmetric over the range, searched greedily, that has the least squared error).
        bits: bits of a code, 1 to 8.
        bins: adaptive only: parts of the range that the search cuts off, 2 to 4096; default by bits.
        ratio: adaptive only: the share of the bins that it may cut off, 0 (no search) to 1; default by bits.

    Raises:
        CodecConfigError: an option is unknown or out of range.
    """

    scheme: str = "adaptive"
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
                    f"bins and ratio belong to the adaptive scheme, not to {self.scheme!r}"
                )
            return
        bins, ratio = self._search()
        if type(bins) is not int or not 2 <= bins <= MAX_BINS:
            raise CodecConfigError(f"bins must be an integer from 2 to {MAX_BINS}, got {bins!r}")
        if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
            raise CodecConfigError(f"ratio must be a number from 0 to 1, got {ratio!r}")
        # Codecs that do the same are equal, and write the same configuration.
        default_bins, default_ratio = default_search(self.bits)
        object.__setattr__(self, "bins", None if bins == default_bins else bins)
        object.__setattr__(self, "ratio", None if ratio == default_ratio else float(ratio))

    def get_config(self) -> dict[str, Any]:
        """The configuration that `row_codec` takes, as numcodecs writes it; without the search's defaults."""
        return {"id": "cnr_uniform", **self._options()}

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`."""
        return {"name": "cnr.uniform", "configuration": self._options()}

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Encoded bytes of a row of `dim` values, without its share of the row set, as most rows have it."""
        kind = _quantizable(element)
        return float(min(self._row_bytes(dim, ParameterType.FLOAT16), dim * kind.stored.itemsize))

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """The payload of a chunk of `rows` rows that holds these; see `RowCodec.encode_rows`."""
        kind, values, offsets = check_rows(values, offsets, rows, _quantizable(element).name)
        segments = self._segments(values, offsets, rows, kind) if len(values) else []
        return build(rows, values.shape[1], kind, segments, seal)

    def _options(self) -> dict[str, Any]:
        searched = {"bins": self.bins, "ratio": self.ratio}
        chosen = {name: value for name, value in searched.items() if value is not None}
        return {"scheme": self.scheme, "bits": self.bits, **chosen}

    def _search(self) -> tuple[int, float]:
        bins, ratio = default_search(self.bits)
        return (bins if self.bins is None else self.bins, ratio if self.ratio is None else self.ratio)

    def _row_bytes(self, dim: int, parameter_type: ParameterType) -> int:
        scheme = SCHEMES[self.scheme]
        parameters = PARAMETERS_PER_ROW[scheme] * PARAMETER_DTYPES[parameter_type].itemsize
        return parameters + row_bytes(scheme, self.bits, dim)

    def _segments(self, values: Rows, offsets: Offsets, rows: int, element: Element) -> list[Segment]:
        # Rows may hold anything; those whose parameters come out infinite or NaN are stored raw.
        with np.errstate(all="ignore"):
            wide = np.ascontiguousarray(values, np.float32).view()
            # Kernels are compiled once, for read-only rows; the flag is the view's, not the caller's.
            wide.flags.writeable = False
            parameters = self._parameters(wide, element)
        raw = parameters.raw
        raw_bytes = values.shape[1] * element.stored.itemsize
        segments = []
        for kind, chosen in (
            (ParameterType.FLOAT16, parameters.float16 & ~raw),
            (ParameterType.FLOAT32, ~parameters.float16 & ~raw),
        ):
            # Rows too narrow to gain by quantization stay exact.
            if self._row_bytes(values.shape[1], kind) >= raw_bytes:
                raw = raw | chosen
            elif chosen.any():
                segments.append(self._segment(wide, offsets, rows, np.flatnonzero(chosen), parameters, kind))
        if raw.any():
            segments.append(raw_segment(values, offsets, rows, np.flatnonzero(raw), element))
        return segments

    def _segment(
        self,
        wide: Float32s,
        offsets: Offsets,
        rows: int,
        order: npt.NDArray[np.intp],
        parameters: Parameters,
        kind: ParameterType,
    ) -> Segment:
        scheme = SCHEMES[self.scheme]
        codes = np.empty((len(order), row_bytes(scheme, self.bits, wide.shape[1])), np.uint8)
        kernels.quantize_pack(
            wide, order, parameters.scale[order], parameters.offset[order], self.bits, codes
        )
        stored = parameters.stored[:, order].astype(PARAMETER_DTYPES[kind])
        return Segment(scheme, self.bits, kind, RowSet.of(offsets[order], rows), stored, codes)

    def _parameters(self, wide: Float32s, element: Element) -> Parameters:
        least, most = row_extremes(wide)
        low, high = least.astype(np.float64), most.astype(np.float64)
        if self.scheme == "symmetric":
            return symmetric(np.maximum(np.abs(low), np.abs(high)), self.bits, element)
        bins, ratio = self._search()
        steps = min(int(bins * ratio), bins - 1)
        if self.scheme == "adaptive" and steps > 0:
            left, right = (np.zeros(len(wide), np.int32) for _ in range(2))
            factor = search_factor(least, most, bins)
            kernels.greedy_walk(wide, least, factor, bins, steps, (1 << self.bits) - 1, left, right)
            width = (high - low) / bins
            low = np.where(left > 0, low + left * width, low)
            high = np.where(right > 0, high - right * width, high)
        return asymmetric(low, high, self.bits, element)


def row_extremes(values: Float32s) -> tuple[Float32s, Float32s]:
    """Least and greatest value of each row of (n, dim); one is not finite where the row has such a value."""
    low, high = (np.empty(len(values), np.int32) for _ in range(2))
    kernels.row_keys(values.view(np.int32), low, high)
    return keys_to_floats(low), keys_to_floats(high)


def search_factor(low: Float32s, high: Float32s, bins: int) -> Float32s:
    """What maps a row's values to bins; 0, so that the search does nothing, where bins are no float32."""
    with np.errstate(all="ignore"):
        span = high - low
        factor = np.float32(bins) / span
    return np.where(np.isfinite(span) & np.isfinite(factor), factor, np.float32(0))


def _quantizable(element: str) -> Element:
    kind = element_named(element)
    if not kind.quantizable:
        raise RowsError(f"{element} rows can't be quantized; cast them to float32, or use cnr_rows")
    return kind
