"""Which rows are quantized and decoded on their device, how those are decoded, and the proof that it does as the host.

Before the first rows of a codec, a device encodes and decodes `PROOF_ROWS` rows that break quantizers, beside the host.
Where a bit differs, or anything fails (Apple's MPS has no float64), the host does it from then on, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs import (
    CodecError,
    Scheme,
    Segment,
    decode_into,
    merge_segments,
    parse,
    row_codec,
    take_rows,
)
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.lattice.steps import lattice_step
from cnr_codecs.payload.coded import MAX_MANTISSA
from cnr_codecs.payload.payload import row_bytes
from cnr_codecs.protocol import RowCodec
from cnr_codecs.uniform.uniform import UniformRows
from cnr_store.errors import SaveError
from cnr_store.training.devices import support
from cnr_store.training.devices.arithmetic import ELEMENTS, Codec, grid_values, rows_together, uniform_values
from cnr_store.training.devices.encode import RowsFromDevice, can_encode, encode, least_bytes, on_host
from cnr_store.writing.row_codes import encode_block

log = logging.getLogger("cnr_store")
PROOF_ROWS, _DIM = 512, 37
_QUANTIZED = (Scheme.ASYMMETRIC, Scheme.SYMMETRIC, Scheme.LATTICE)


def encode_staged(
    path: str, codec: RowCodec | None, tensor: torch.Tensor, ids: npt.NDArray[np.int64] | None, room: int
) -> RowsFromDevice | None:
    """Quantize rows of an array where they are, as they are now.

    `path`: of the array, for the log.
    `codec`: None if its rows are needed as they are.
    `tensor`, `ids`: what holds them; which ones, None for all.
    `room`: bytes that they may take in host memory.

    Returns: None if the host has to: they are in its memory, or the device can't. The log says why, once for each
    array.
    """
    if not support.is_elsewhere(tensor.device):
        return None
    if tensor.ndim == 1:  # state of one number a row
        tensor = tensor[:, None]
    if codec is None:
        return _left_to_host(path, "ranks share its rows, and it is whole or in columns")
    if not can_encode(codec, tensor, ids is None) or not _does_as_host(codec, tensor):
        return _left_to_host(path, f"{tensor.device} takes no {codec.get_config()['id']} of {tensor.dtype}")
    if least_bytes(codec, tensor.shape[1], len(tensor) if ids is None else len(ids)) > room:
        return _left_to_host(path, "they exceed snapshot_bytes")
    try:
        found = encode(codec, tensor, None if ids is None else torch.from_numpy(ids))
    except RuntimeError as error:
        # Whatever it was, memory that was short among others: if the device is lost, the host's way says so.
        log.warning(
            "%s: its rows could not be quantized on %s (%s: %s), so the host does",
            *(path, tensor.device, type(error).__name__, error),
        )
        return None
    return found if found.nbytes <= room else _left_to_host(path, "they exceed snapshot_bytes")


def rows_there(tensor: torch.Tensor, codecs: Iterable[Mapping[str, Any] | None]) -> torch.Tensor | None:
    """A view of a tensor as (rows, columns), if its device decodes rows of such codecs; None if the host has to."""
    values = tensor.detach()
    values = values[:, None] if values.ndim == 1 else values
    if not support.is_elsewhere(tensor.device) or values.ndim != 2 or not values.shape[1]:
        return None
    try:
        kinds = [row_codec(each or {}) for each in codecs if each != {"id": "cnr_rows"}]
    except CodecError:  # of a newer release: readers go by what payloads say
        return None
    return values if all(_does_as_host(each, values) for each in kinds) else None


class DeviceRows:
    """Rows on a device that decodes what is written to them. Several threads may write.

    `values`: (rows, columns), as `rows_there` returns it.
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


def _does_as_host(codec: RowCodec, values: torch.Tensor) -> bool:
    if values.dtype not in ELEMENTS or not isinstance(codec, UniformRows | LatticeRows | FloatingRows):
        return False
    if isinstance(codec, FloatingRows) and codec.mantissa_bits > MAX_MANTISSA:
        return False
    if isinstance(codec, LatticeRows):  # any step is as good
        codec = LatticeRows(step=lattice_step(0.35))
    return _is_proven(codec, values.dtype, values.device)


@cache
def _is_proven(codec: Codec, dtype: torch.dtype, device: torch.device) -> bool:
    try:
        why = "a bit differs" if _differs(codec, dtype, device) else ""
    except (RuntimeError, TypeError, SaveError) as error:  # a type that the device lacks, say
        why = f"{type(error).__name__}: {error}"
    if why:
        tried = device, codec.get_config(), dtype, why
        log.warning("%s: a trial of %s for %s failed (%s), so the host does it", *tried)
    return not why


def _differs(codec: Codec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether payloads, or what they decode to, are other than the host's."""
    rows = torch.from_numpy(_hard_rows()).to(dtype)
    count, values, element, there = PROOF_ROWS, on_host(rows), ELEMENTS[dtype], rows.to(device)
    payload = codec.encode_rows(values, None, count, element=element)
    wanted, found, need = np.empty_like(values), torch.zeros_like(there), np.ones(count, np.uint8)
    decode_into(parse(payload), wanted, need.copy())
    is_same = DeviceRows(found).write(take_rows(parse(payload), need), 0)
    if can_encode(codec, there, True):
        made = encode_block(
            *(codec, encode(codec, there, None).block(0, count), None, [0, count], count),
            element=element,
            seals=[0],
        )
        is_same &= made == [payload]
    return not is_same or on_host(found).tobytes() != wanted.tobytes()


def _hard_rows() -> npt.NDArray[np.float32]:
    """Rows that break quantizers: of all magnitudes, with offsets, ties, outliers, no range, NaN and infinities."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((PROOF_ROWS, _DIM))
    sizes = 2.0 ** random.uniform(-149, 128, (PROOF_ROWS // 8, 1))
    rows[1::8] *= sizes
    rows[2::8] = rows[2::8] * sizes**0.1 + sizes
    rows[3::8] = np.rint(rows[3::8] * 8) / 8
    rows[4::8] **= 3
    rows[5::8] = rows[5::8, :1] * sizes
    rows[6::16] *= 65504
    rows[14::16] = np.copysign(0.0, rows[14::16])
    rows[7::8][random.random((PROOF_ROWS // 8, _DIM)) < 1 / _DIM] = np.nan
    rows[15::32] = np.where(np.isnan(rows[15::32]), np.inf, rows[15::32])
    with np.errstate(over="ignore"):
        return rows.astype(np.float32)


@cache
def _left_to_host(path: str, why: str) -> None:
    log.debug("%s: the host quantizes its rows: %s", path, why)
