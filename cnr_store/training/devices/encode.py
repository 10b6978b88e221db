"""Quantizes rows on the device of their table, and makes payloads of what comes to the host.

`encode` runs on the stream that is current. What it returns stays as the rows were then, whatever training does next.
It waits for one byte a row, which tells the rows whose values must be kept. Codes follow while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.elements import element_named
from cnr_codecs.kernels.windows import MAX_DIM, NORMAL_STEPS
from cnr_codecs.lattice.lattice import LatticeRows, most_code
from cnr_codecs.payload.payload import ParameterType, Scheme, row_bytes
from cnr_codecs.protocol import Offsets, RowCodec, Rows
from cnr_codecs.uniform.quantized import QuantizedRows
from cnr_codecs.uniform.uniform import SCHEMES, UniformRows
from cnr_store.training.devices.moving import Arrays, start_copy
from cnr_store.training.devices.support import failing_saves, kernels_on
from cnr_store.writing.plan import EncodedRows

Mask = npt.NDArray[np.bool_]
_ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def can_encode(codec: RowCodec, values: torch.Tensor) -> bool:
    """Whether `encode` takes rows of this table for this codec. If not, the host encodes them."""
    element = _ELEMENTS.get(values.dtype)
    if element is None or values.ndim != 2 or values.stride(1) != 1 or values.stride(0) < values.shape[1]:
        return False
    # A subclass may encode rows in a way of its own.
    is_known = (
        codec.is_worthwhile(int(values.shape[1]), element)
        if type(codec) is UniformRows
        else type(codec) is LatticeRows and codec.step is not None
    )
    return is_known and kernels_on(values.device) is not None


def least_bytes(codec: RowCodec, values: torch.Tensor, count: int) -> int:
    """The host memory that so many rows take at least, once they are encoded."""
    dim = int(values.shape[1])
    if isinstance(codec, UniformRows):
        # Two float16 parameters, and their kind.
        return count * (row_bytes(SCHEMES[codec.scheme], codec.bits, dim) + 5)
    return count * (2 * dim + 1)


def encode(codec: RowCodec, values: torch.Tensor, ids: torch.Tensor | None) -> EncodedRows:
    """Quantize rows of a table, and begin to copy parameters and codes to the host.

    Parameters
    ----------
    codec, values
        As `can_encode` takes them: values are (rows, dim).
    ids
        int64 (n,), on the same device: the rows; None for all.
    """
    source = kernels_on(values.device).Source(values.detach(), ids)
    return _uniform(codec, source) if isinstance(codec, UniformRows) else _lattice(codec, source)


def _uniform(codec: UniformRows, source: Any) -> EncodedRows:
    kernels, scheme, bits = kernels_on(source.values.device), SCHEMES[codec.scheme], codec.bits
    count, dim, empty = source.count, source.dim, source.values.new_empty
    element = _ELEMENTS[source.values.dtype]
    overflow, width = element_named(element).overflow, row_bytes(scheme, bits, dim)
    floats, halves = (empty((2, count), dtype=dtype) for dtype in (torch.float32, torch.float16))
    kind, codes = (empty(shape, dtype=torch.uint8) for shape in ((count,), (count, width)))
    out = floats, halves, kind, codes
    is_searched = codec.scheme == "adaptive" and dim <= MAX_DIM
    if is_searched and codec.bins is not None and codec.ratio is not None:
        steps = min(int(codec.bins * codec.ratio), codec.bins - 1)
        kernels.quantize_walked(source, bits, codec.bins, steps, overflow, out)
    elif is_searched and codec.bins is None and bits in NORMAL_STEPS:
        kernels.quantize_searched(source, bits, float(NORMAL_STEPS[bits]), overflow, out)
    else:
        kernels.quantize_ranges(source, bits, scheme is Scheme.SYMMETRIC, overflow, out)

    kinds = kind.cpu().numpy()
    float16_rows = int((kinds == ParameterType.FLOAT16).sum())
    # Nearly always all rows have float16 parameters, and the others stay where they are.
    are_needed = float16_rows < count or scheme is Scheme.SYMMETRIC
    moving = start_copy((halves, codes, floats) if are_needed else (halves, codes))
    none = np.empty(0, np.float32)
    known = QuantizedRows(none, none, np.empty((2, 0), np.uint16), kinds, np.empty((0, width), np.uint8))
    raw = codec.raw_rows(known, dim, element)
    values = _values(source, raw)
    nbytes = count * (width + 5 + 8 * are_needed) + values.nbytes
    return _Uniform(codec, element, kinds, moving, np.flatnonzero(raw), values, nbytes, codes.device)


def _lattice(codec: RowCodec, source: Any) -> EncodedRows:
    assert isinstance(codec, LatticeRows)
    assert codec.step is not None
    element, count, dim = _ELEMENTS[source.values.dtype], source.count, source.dim
    codes = source.values.new_empty((count, dim), dtype=torch.int16)
    raw = source.values.new_empty(count, dtype=torch.uint8)
    limit = most_code(codec.step, element_named(element))
    kernels_on(source.values.device).quantize_lattice(source, codec.step, limit, codes, raw)
    moving, is_raw = start_copy((codes,)), raw.cpu().numpy().view(np.bool_)
    values = _values(source, is_raw)
    nbytes = count * (2 * dim + 1) + values.nbytes
    return _Lattice(codec, element, is_raw, moving, values, nbytes, codes.device)


def _values(source: Any, chosen: Mask) -> Rows:
    """Copy the values of rows to the host, in the array type."""
    places = torch.from_numpy(np.flatnonzero(chosen)).to(source.values.device)
    taken = source.values[places if source.ids is None else source.ids[places]].cpu()
    found: Rows = (taken.float() if taken.dtype is torch.bfloat16 else taken).numpy()
    return found


def _arrived(moving: Callable[[], Arrays], device: torch.device) -> Arrays:
    with failing_saves(device, "rows that were quantized there"):
        return moving()


@dataclass(frozen=True)
class _Uniform:
    codec: UniformRows
    element: str
    kinds: npt.NDArray[np.uint8]
    moving: Callable[[], Arrays]
    raw: npt.NDArray[np.intp]
    raw_values: Rows
    nbytes: int
    device: torch.device

    def payloads(
        self,
        begin: int,
        end: int,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        seals: Sequence[int],
    ) -> list[bytes]:
        halves, codes, *floats = _arrived(self.moving, self.device)
        kinds, own = self.kinds[begin:end], slice(begin, end)
        scale, offset = floats[0][:, own] if floats else np.zeros((2, len(kinds)), np.float32)
        float16_rows = int((kinds == ParameterType.FLOAT16).sum())
        halves = halves.view(np.uint16)[:, own]
        chosen = QuantizedRows(scale, offset, halves, kinds, codes[own], float16_rows)
        first, last = np.searchsorted(self.raw, (begin, end))
        values = self.raw_values[first:last]
        return self.codec.encode_codes(
            chosen, values, offsets, edges, rows, element=self.element, seals=seals
        )


@dataclass(frozen=True)
class _Lattice:
    codec: LatticeRows
    element: str
    raw: Mask
    moving: Callable[[], Arrays]
    raw_values: Rows
    nbytes: int
    device: torch.device

    def payloads(
        self,
        begin: int,
        end: int,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        seals: Sequence[int],
    ) -> list[bytes]:
        first, last = np.count_nonzero(self.raw[:begin]), np.count_nonzero(self.raw[:end])
        (codes,) = _arrived(self.moving, self.device)
        held, values = (codes[begin:end], self.raw[begin:end]), self.raw_values[first:last]
        return self.codec.encode_codes(*held, values, offsets, edges, rows, element=self.element, seals=seals)
