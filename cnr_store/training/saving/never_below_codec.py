"""The codec of optimizer state that a user lets be quantized: no divisor comes back smaller than it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs import Scheme, UniformRows, build_payload, check_rows, parse, raw_segment

Rows = npt.NDArray[Any]

QUANTIZABLE = frozenset({"float32", "float16", "bfloat16"})
_RAISED_STEPS = 0.51
"""Half a step, and what rounding the parameters may widen it by: up to one part in 128."""


@dataclass(frozen=True)
class CeilingRows:
    """Rows of optimizer state quantized uniformly over their whole range.

    A row without negative values holds sums or means of squares, by whose root steps are divided: where one came back
    as 0, or a difference of two lines made it negative, the next step would be huge, or NaN. So such a row is raised
    by half a step first: each of its values decodes to at least what it was (but for rounding to its type) and at most
    1.03 steps more, a step being the row's range by 2**bits - 1. Other rows err by half a step both ways. Rows with NaN
    or infinities, and those too narrow to gain or too large to be raised, are stored as they are.

    Attributes
    ----------
    bits
        Bits of a code, 1 to 8.
    """

    bits: int

    def get_config(self) -> dict[str, Any]:
        """What the commit record says of it; nobody needs it to read."""
        return {"id": "cnr_raised", "bits": self.bits}

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`: what is written are uniform codes."""
        return self._quantizer.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Expected encoded bytes of a row of `dim` values, without its share of the row set."""
        return self._quantizer.bytes_per_row(dim, element)

    def encode_rows(
        self,
        values: Rows,
        offsets: npt.NDArray[np.integer[Any]] | None,
        rows: int,
        *,
        element: str,
        seal: int = 0,
    ) -> bytes:
        """The payload of a chunk of `rows` rows that holds these; see `RowCodec.encode_rows`."""
        kind, values, places = check_rows(values, offsets, rows, element)
        raised = _raised(values, element, (1 << self.bits) - 1)
        data = self._quantizer.encode_rows(raised, offsets, rows, element=element, seal=seal)
        if raised is values:
            return data
        segments = parse(data).segments
        if all(segment.scheme is not Scheme.RAW for segment in segments):
            return data
        # Rows that can't be quantized, or don't gain, are stored as they were.
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


def _raised(values: Rows, element: str, levels: int) -> Rows:
    """The rows with those without negative values raised by half a step; the same array if there are none.

    What no longer fits the element type is infinite.
    """
    low, high = (each.astype(np.float64) for each in (values.min(axis=1), values.max(axis=1)))
    chosen = (low >= 0) & (high > low) & np.isfinite(high)
    if not chosen.any():
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        by = ((high - low) * (_RAISED_STEPS / levels)).astype(np.float32)[:, None]
        # What is not raised keeps its very bits, negative zeros too.
        raised = np.where(chosen[:, None], values + by, values).astype(values.dtype, copy=False)
    if element == "bfloat16":
        bits = raised.view(np.uint32)
        bits[chosen] = (bits[chosen] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return raised
