"""Rows that were quantized, here or on a device, before they are put into payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.payload.payload import PARAMETER_DTYPES, ParameterType

Float32s = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


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
