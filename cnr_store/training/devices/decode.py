"""Writes stored rows into a table on a device: codes cross to it, and become values there."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs import Scheme, Segment, merge_segments
from cnr_codecs.payload.coded import MANTISSA_BITS
from cnr_codecs.payload.payload import row_bytes
from cnr_store.training.devices import support
from cnr_store.training.devices.support import kernels_on

Places = npt.NDArray[np.int64]
_SCHEMES = (Scheme.ASYMMETRIC, Scheme.SYMMETRIC, Scheme.LATTICE)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_COPIED = {"cnr_rows"}
_DECODED = _COPIED | {"cnr_uniform", "cnr_lattice", "cnr_floating"}
_LARGE_BYTES = 1 << 18
"""Of codes that cross alone: to join them with others would copy them once more."""


class DeviceRows:
    """Rows on a device that decodes what is written to them. Several threads may write.

    Parameters
    ----------
    values
        (rows, columns), as `rows_there` returns it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        # Threads have streams of their own, which would not wait for what the caller has queued.
        self._stream = torch.cuda.current_stream(values.device) if values.is_cuda else None

    def write(self, segments: Sequence[Segment], first_row: int) -> list[Segment]:
        """Write the rows of a chunk, and wait until they are there.

        Parameters
        ----------
        segments
            Validated, of the element type of the rows. No row is in two of them.
        first_row
            Where the chunk begins.

        Returns
        -------
        Segments that the host has to decode.
        """
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            left = [each for each in _joined(segments) if not self._write(each, first_row)]
        if self._stream is not None:
            self._stream.synchronize()
        return left

    def _write(self, segment: Segment, first_row: int) -> bool:
        values, places = self._values, segment.row_set.offsets() + first_row
        if segment.scheme is Scheme.RAW and len(segment.codes):
            _copy(_tensor(segment.codes).view(values.dtype), places, values)
        elif can_decode(segment, values):
            decode(segment, places, values)
        else:
            return False
        return True


def rows_there(tensor: torch.Tensor, codecs: Set[str]) -> torch.Tensor | None:
    """A view of a tensor as (rows, columns), if its device decodes rows of these codecs; None if the host has to."""
    values = tensor.detach()
    values = values[:, None] if values.ndim == 1 else values
    is_plain = values.ndim == 2 and values.shape[1] > 0 and values.stride(1) == 1
    are_known = codecs <= (_DECODED if tensor.dtype in _DTYPES else _COPIED)
    has_kernels = support.is_elsewhere(tensor.device) and kernels_on(tensor.device) is not None
    return values if is_plain and are_known and has_kernels else None


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """The small ones joined: of a long chain there are many, and each of them would take a launch."""
    small = [each for each in segments if each.codes.nbytes < _LARGE_BYTES]
    return [each for each in segments if each.codes.nbytes >= _LARGE_BYTES] + merge_segments(small)


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Contiguous. It may share memory with values that are writable, as torch wants them."""
    return torch.from_numpy(np.require(values, requirements=("C", "W")))


def _copy(rows: torch.Tensor, places: Places, target: torch.Tensor) -> None:
    """Write rows, in host memory, over those at ascending places of a table."""
    first, count = int(places[0]), len(places)
    if places[-1] - first == count - 1:
        target[first : first + count].copy_(rows)
        return
    target.index_copy_(0, torch.from_numpy(places).to(target.device), rows.to(target.device))


def can_decode(segment: Segment, target: torch.Tensor) -> bool:
    """Whether `decode` takes a segment for a table. If not, the host decodes it."""
    is_plain = target.ndim == 2 and target.stride(1) == 1 and target.dtype in _DTYPES
    is_known = segment.scheme in _SCHEMES and segment.coded is None
    return is_known and is_plain and kernels_on(target.device) is not None


def decode(segment: Segment, places: Places, target: torch.Tensor) -> None:
    """Write the rows of a segment into a table, on the stream that is current.

    The segment must be validated: the kernels trust it. No place may be given twice.

    Parameters
    ----------
    segment
        As `can_decode` takes it.
    places
        (count,): which row of the table each of the segment's rows is; -1 for rows that are not wanted.
    target
        (rows, dim), of the element type of the payload.

    Raises
    ------
    ValueError
        A place is no row of the table, or the codes are not as wide as its rows.
    """
    wanted, dim = np.flatnonzero(places >= 0), int(target.shape[1])
    width = row_bytes(segment.scheme, segment.bits, dim)
    if (
        len(places) != len(segment.codes)
        or places.max(initial=-1) >= len(target)
        or segment.codes.shape[1] != width
    ):
        raise ValueError(
            f"codes of shape {segment.codes.shape} can't be written to {len(places)} places of a table of shape "
            f"{tuple(target.shape)}, whose rows take {width} bytes"
        )
    chosen = slice(None) if len(wanted) == len(places) else wanted
    device, kernels = target.device, kernels_on(target.device)
    codes, ids = (_tensor(each[chosen]).to(device) for each in (segment.codes, places))
    with torch.no_grad():
        if segment.scheme is Scheme.LATTICE:
            shift = MANTISSA_BITS - segment.bits if segment.bits else 0
            step = float(segment.parameters[0, 0])
            kernels.decode_integers(codes.view(torch.int16), step, shift, ids, target.detach())
            return
        parameters = _tensor(segment.parameters[:, chosen]).to(device)
        is_symmetric = segment.scheme is Scheme.SYMMETRIC
        kernels.decode_uniform(codes, parameters, segment.bits, is_symmetric, ids, target.detach())
