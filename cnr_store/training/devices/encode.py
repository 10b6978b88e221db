"""Quantizes rows on the device of their table, and makes payloads of what comes to the host.

`encode` runs on the stream that is current. What it returns stays as the rows were then, whatever training does next.
It waits for one byte a row, which tells the rows whose values must be kept. Codes follow while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Semaphore

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.lattice.steps import COUNTED_ROWS, median_scale, no_counts, scale_counts
from cnr_codecs.payload.coded import MAX_MANTISSA
from cnr_codecs.payload.payload import ParameterType, row_bytes
from cnr_codecs.protocol import RowCodec
from cnr_codecs.uniform.uniform import SCHEMES, QuantizedRows, UniformRows
from cnr_store.training.devices.arithmetic import ELEMENTS, Codec, quantize, rows_together
from cnr_store.training.devices.support import failing_saves
from cnr_store.writing.row_codes import Array, CodedRows

Arrays = list[Array]
MOST_PIECES = 32
"""That wait on a device until they are copied. Who brings more waits, too."""


@dataclass(frozen=True)
class Piece:
    """Rows that were quantized together."""

    marks: npt.NDArray[np.uint8]  # uint8 (n,): what `arithmetic.quantize` returns first
    # is_raw, raw_values: bool (n,): which rows are stored as they are, and their values
    is_raw: npt.NDArray[np.bool_]
    raw_values: Array
    arriving: Callable[[], Arrays]  # waits for the rest of what `quantize` returns
    nbytes: int  # the host memory that all of it takes

    def rows(self, begin: int, end: int) -> list[Array]:
        """Of some of these rows: marks, which are raw, these values, and the rest, once it is in host memory."""
        first, last = np.count_nonzero(self.is_raw[:begin]), np.count_nonzero(self.is_raw[:end])
        own = [each[begin:end] for each in (self.marks, self.is_raw, *self.arriving())]
        return [*own[:2], self.raw_values[first:last], *own[2:]]


@dataclass(frozen=True)
class RowsFromDevice:
    """Rows of a table, quantized on `device`, `together` a piece.

    `codec`: that of the write, with the step of a lattice.
    """

    codec: Codec
    device: torch.device
    pieces: Sequence[Piece]
    together: int

    @property
    def nbytes(self) -> int:
        """The host memory that they take."""
        return sum(piece.nbytes for piece in self.pieces)

    def block(self, begin: int, end: int) -> CodedRows:
        """The codes of rows, once they are in host memory: see `writing.row_codes.Rows`."""
        with failing_saves(self.device, "rows that were quantized there"):
            parts = list(self._parts(begin, end))
        marks, is_raw, raw_values, *made = (
            parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        )
        if not isinstance(self.codec, UniformRows):
            return CodedRows(made[0], is_raw, raw_values)
        floats = np.ascontiguousarray(made[0].T)
        halves = torch.from_numpy(floats).half().view(torch.int16).numpy().view(np.uint16)
        float16_rows = int((marks == ParameterType.FLOAT16).sum())
        quantized = QuantizedRows(floats[0], floats[1], halves, marks, made[1], float16_rows)
        return CodedRows(quantized, is_raw, raw_values)

    def _parts(self, begin: int, end: int) -> Iterator[list[Array]]:
        """What each piece has of these rows. Of no rows, those of one piece."""
        first = min(begin // self.together, len(self.pieces) - 1)
        for number in range(first, max(first, (end - 1) // self.together) + 1):
            start = number * self.together
            yield self.pieces[number].rows(max(begin - start, 0), min(end - start, self.together))


def can_encode(codec: RowCodec, values: torch.Tensor, is_whole: bool) -> bool:
    """Whether `encode` takes rows of an array, or all of it, for this codec. If not, the host encodes them."""
    element = ELEMENTS.get(values.dtype)
    if element is None or values.ndim != 2 or not values.shape[1]:
        return False
    # A subclass may encode rows in a way of its own. The paper's walk is left to the host.
    if type(codec) is UniformRows:
        return codec.bins is None and codec.is_worthwhile(int(values.shape[1]), element)
    if type(codec) is FloatingRows:
        # Exact codes are no smaller than rows.
        return codec.mantissa_bits <= MAX_MANTISSA and not codec.grid.is_moved
    return type(codec) is LatticeRows and (is_whole or codec.step is not None)


def least_bytes(codec: RowCodec, dim: int, count: int) -> int:
    """The host memory that so many rows take at least, once they are encoded."""
    if isinstance(codec, UniformRows):
        return count * (row_bytes(SCHEMES[codec.scheme], codec.bits, dim) + 9)
    return count * (2 * dim + 1)


def encode(codec: RowCodec, values: torch.Tensor, ids: torch.Tensor | None) -> RowsFromDevice:
    """Quantize rows of a table piece by piece, and begin to move parameters and codes to the host.

    `codec`, `values`: as `can_encode` takes them: values are (rows, dim).
    `ids`: int64 (n,), also in host memory: the rows; None for all, of which a lattice without a step finds its own.
    """
    assert isinstance(codec, UniformRows | LatticeRows | FloatingRows)
    values = values.detach()
    if isinstance(codec, LatticeRows) and codec.step is None:
        blocks = (values[first : first + COUNTED_ROWS] for first in range(0, len(values), COUNTED_ROWS))
        counts = sum((scale_counts(on_host(block)) for block in blocks), no_counts())
        codec = codec.with_step(codec.step_of(median_scale(counts)))
    count, together = len(values) if ids is None else len(ids), rows_together(values.shape[1])
    pieces = []
    for first in range(0, max(count, 1), together):
        own = slice(first, first + together)
        rows = values[own] if ids is None else values.index_select(0, ids[own].to(values.device))
        pieces.append(_quantized(codec, rows))
    return RowsFromDevice(codec, values.device, pieces, together)


def on_host(values: torch.Tensor) -> Array:
    """Values in host memory, in the array type."""
    found: Array = (values.cpu().float() if values.dtype is torch.bfloat16 else values.cpu()).numpy()
    return found


def _quantized(codec: Codec, rows: torch.Tensor) -> Piece:
    noted, *made = quantize(codec, rows)
    arriving, marks = start_copy(made), noted.cpu().numpy()
    if isinstance(codec, UniformRows):
        is_raw = codec.raw_rows(marks, rows.shape[1], ELEMENTS[rows.dtype])
    else:
        is_raw = marks.view(np.bool_)
    raw_values = on_host(rows[torch.from_numpy(np.flatnonzero(is_raw)).to(rows.device)])
    nbytes = 2 * marks.nbytes + raw_values.nbytes + sum(each.nbytes for each in made)
    return Piece(marks, is_raw, raw_values, arriving, nbytes)


def start_copy(tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
    """Begin to move tensors, as they will be once what is queued on the stream that is current is done.

    `tensors`: contiguous, of one device. Nothing else writes to them, and no one else keeps them.

    Returns: What waits until they are there, on any thread, and returns them.
    """
    if tensors[0].is_cuda:
        return _mover(tensors[0].device).move(tensors)
    found = [each.cpu().numpy() for each in tensors]
    return lambda: found


class _Mover:
    """Moves pieces from a CUDA device through pinned memory, on a stream of its own.

    Of two threads, one waits for the device while the other takes what was copied to ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._room = device, Semaphore(MOST_PIECES)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types a part of itself
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="cnr-move")

    def move(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        moment = torch.cuda.current_stream(self._device).record_event()
        self._room.acquire()
        try:
            return self._threads.submit(self._moved, moment, list(tensors)).result
        except BaseException:
            self._room.release()
            raise

    def _moved(self, moment: torch.cuda.Event, tensors: list[torch.Tensor]) -> Arrays:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._side):
                self._side.wait_event(moment)
                staged = [_pinned_like(each).copy_(each, non_blocking=True) for each in tensors]
                copied = self._side.record_event()
            copied.synchronize()
            return [each.numpy().copy() for each in staged]
        finally:
            tensors.clear()  # whoever still has the future
            self._room.release()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be pinned: copies to other memory are only slower
        return torch.empty_like(tensor, device="cpu")


@cache
def _mover(device: torch.device) -> _Mover:
    return _Mover(device)
