"""Writes stored rows into a table on a device: codes cross to it, and become values there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs import Scheme, Segment, merge_segments
from cnr_codecs.payload.payload import row_bytes
from cnr_store.training.devices.arithmetic import ELEMENTS, grid_values, rows_together, uniform_values

_QUANTIZED = (Scheme.ASYMMETRIC, Scheme.SYMMETRIC, Scheme.LATTICE)


class DeviceRows:
    """Rows on a device that decodes what is written to them. Several threads may write.

    `values`: (rows, columns), as `staging.rows_there` returns it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        # Threads have streams of their own, which would not wait for what the caller has queued.
        self._stream = torch.cuda.current_stream(values.device) if values.is_cuda else None

    def write(self, segments: Sequence[Segment], first_row: int) -> bool:
        """Write the rows of a chunk, and wait until they are there.

        `segments`: validated, of the element type of the rows. No row is in two of them.
        `first_row`: where the chunk begins.

        Returns: Whether they were written; False, and nothing is written, if the host has to decode some of them.
        """
        if not all(self._takes(each) for each in segments):
            return False
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext(), torch.no_grad():
            for each in merge_segments(segments):  # a long chain has many
                self._write(each, first_row)
        if self._stream is not None:
            self._stream.synchronize()
        return True

    def _takes(self, segment: Segment) -> bool:
        is_known = segment.scheme in _QUANTIZED and segment.coded is None and self._values.dtype in ELEMENTS
        grid = segment.grid if segment.scheme is Scheme.LATTICE else None
        is_own = grid is None or not (grid.is_exact or grid.is_moved)  # exact codes are no smaller than rows
        return (is_known and is_own) or segment.scheme is Scheme.RAW

    def _write(self, segment: Segment, first_row: int) -> None:
        target, places = self._values, segment.row_set.offsets() + first_row
        dim, is_raw = int(target.shape[1]), segment.scheme is Scheme.RAW
        width = dim * target.element_size() if is_raw else row_bytes(segment.scheme, segment.bits, dim)
        # A device that writes out of bounds takes nothing more.
        if segment.codes.shape != (len(places), width) or places.max(initial=-1) >= len(target):
            raise RuntimeError(
                f"codes of shape {segment.codes.shape} can't be written to {len(places)} places of a table of shape "
                f"{tuple(target.shape)}, whose rows take {width} bytes"
            )
        together = rows_together(dim)
        for first in range(0, len(places), together):
            own = slice(first, first + together)
            made, at = self._made(segment, own), places[own]
            if at[-1] - at[0] == len(at) - 1:
                target[at[0] : at[-1] + 1].copy_(made)
            else:
                index = torch.from_numpy(at).to(target.device)
                target.index_copy_(0, index, made.to(target.device, target.dtype))

    def _made(self, segment: Segment, own: slice) -> torch.Tensor:
        """The values of some rows of a segment, on the device but for those stored as they are."""
        target, codes = self._values, _tensor(segment.codes[own])
        if segment.scheme is Scheme.RAW:
            return codes.view(target.dtype)
        codes = codes.to(target.device)
        if segment.scheme is Scheme.LATTICE:
            return grid_values(codes.view(torch.int16), segment.bits, float(segment.parameters[0, 0]))
        parameters = _tensor(segment.parameters[:, own]).to(target.device)
        return uniform_values(codes, parameters, segment.bits, int(target.shape[1]))


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Contiguous. It may share memory with values that are writable, as torch wants them."""
    return torch.from_numpy(np.require(values, requirements=("C", "W")))
