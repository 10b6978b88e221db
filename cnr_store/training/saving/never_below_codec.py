"""The codec of quantized optimizer state: values that steps divide by never decode below what they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs import Scheme, UniformRows, build_payload, check_rows, parse, raw_segment

Values = npt.NDArray[Any]

QUANTIZABLE = frozenset({"float32", "float16", "bfloat16"})
_RAISE_STEPS = 0.51
"""Half a quantization step, and the part by which rounding its parameters may widen it: at most 1 in 128."""


@dataclass(frozen=True)
class CeilingRows:
    """Quantizes rows of optimizer state uniformly over their range, and never below their values.

    A row without negative values holds sums or means of squares, and optimizers divide by their roots. If one decoded
    to 0 or below, the next update would be huge, or NaN. So half a quantization step is added to such a row first.
    Each value then decodes to at least what it was (but for rounding to its type), and to at most 1.03 quantization
    steps more; a quantization step is the row's range divided by 2**bits - 1. Values of other rows err by half a step
    in either direction. Rows with NaN or infinities, rows too narrow to gain, and rows too large to be raised are
    stored unchanged.
    """

    bits: int  # bits of a code, 1 to 8

    def get_config(self) -> dict[str, Any]:
        """The codec's entry in the commit record. Reading doesn't need it."""
        return {"id": "cnr_raised", "bits": self.bits}

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`: that of uniform codes, because those are what is written."""
        return self._quantizer.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Expected encoded bytes of a row of `dim` values, without the row set."""
        return self._quantizer.bytes_per_row(dim, element)

    def encode_rows(
        self,
        values: Values,
        offsets: npt.NDArray[np.integer[Any]] | None,
        rows: int,
        *,
        element: str,
        seal: int = 0,
    ) -> bytes:
        """The payload of a chunk of `rows` rows that holds these. See `RowCodec.encode_rows`."""
        kind, values, places = check_rows(values, offsets, rows, element)
        raised = _raise_by_half_step(values, element, (1 << self.bits) - 1)
        data = self._quantizer.encode_rows(raised, offsets, rows, element=element, seal=seal)
        if raised is values:
            return data
        segments = parse(data).segments
        if all(segment.scheme is not Scheme.RAW for segment in segments):
            return data
        # Rows that the quantizer kept raw are stored as they were, not raised.
        kept = [
            raw_segment(values, places, rows, np.searchsorted(places, segment.row_set.offsets()), kind)
            if segment.scheme is Scheme.RAW
            else segment
            for segment in segments
        ]
        return build_payload(rows, values.shape[1], kind, kept, seal)

    @property
    def _quantizer(self) -> UniformRows:
        return UniformRows("asymmetric", self.bits)


def _raise_by_half_step(values: Values, element: str, levels: int) -> Values:
    """A copy in which rows without negative values are raised by half a step; `values` itself if there are none.

    A raised value that does not fit the element type becomes infinite, and its row is then stored raw.
    """
    low, high = (each.astype(np.float64) for each in (values.min(axis=1), values.max(axis=1)))
    chosen = (low >= 0) & (high > low) & np.isfinite(high)
    if not chosen.any():
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        by = ((high - low) * (_RAISE_STEPS / levels)).astype(np.float32)[:, None]
        # np.where keeps the bits of rows that are not raised; adding 0 would change negative zeros.
        raised = np.where(chosen[:, None], values + by, values).astype(values.dtype, copy=False)
    if element == "bfloat16":
        bits = raised.view(np.uint32)
        bits[chosen] = (bits[chosen] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return raised
