"""Quantizes rows on the device of their table, and makes payloads of what comes to the host.

`encode` runs on the stream that is current. What it returns stays as the rows were then, whatever training does next.
It waits for one byte a row, which tells the rows whose values must be kept. Codes follow while training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.elements import element_named
from cnr_codecs.kernels.windows import MAX_DIM, NORMAL_STEPS
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows, most_code
from cnr_codecs.lattice.steps import SUM_LANES, SUM_ROWS, Sum, add_sums, root_mean_square
from cnr_codecs.payload.coded import MANTISSA_BITS, code_range
from cnr_codecs.payload.payload import ParameterType, Scheme, row_bytes
from cnr_codecs.protocol import RowCodec, Rows
from cnr_codecs.uniform.quantized import QuantizedRows
from cnr_codecs.uniform.uniform import SCHEMES, UniformRows
from cnr_store.training.devices import moving
from cnr_store.training.devices.encoded import (
    IntegersEncoded,
    IntegersPiece,
    Piece,
    UniformEncoded,
    UniformPiece,
)
from cnr_store.training.devices.moving import start_copy
from cnr_store.training.devices.support import kernels_on
from cnr_store.writing.plan import EncodedRows

Mask = npt.NDArray[np.bool_]
_PARAMETER_BYTES = 13
"""Of a row on the device: two of float32, two of float16, and their kind."""
_LEAST_PIECE_BYTES = 1 << 20
"""Each piece makes training wait for the device once."""
Made = TypeVar("Made", bound=Piece)
_ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def can_encode(codec: RowCodec, values: torch.Tensor, is_whole: bool = False) -> bool:
    """Whether `encode` takes rows of this table, or all of it, for this codec. If not, the host encodes them."""
    element = _ELEMENTS.get(values.dtype)
    if element is None or values.ndim != 2 or values.stride(1) != 1 or values.stride(0) < values.shape[1]:
        return False
    # A subclass may encode rows in a way of its own.
    if type(codec) is UniformRows:
        is_known = codec.is_worthwhile(int(values.shape[1]), element)
    elif type(codec) is LatticeRows:
        is_known = is_whole or codec.step is not None
    else:
        is_known = type(codec) is FloatingRows
    return is_known and kernels_on(values.device) is not None


def least_bytes(codec: RowCodec, values: torch.Tensor, count: int) -> int:
    """The host memory that so many rows take at least, once they are encoded."""
    dim = int(values.shape[1])
    if isinstance(codec, UniformRows):
        # Two float16 parameters, and their kind.
        return count * (row_bytes(SCHEMES[codec.scheme], codec.bits, dim) + 5)
    return count * (2 * dim + 1)


def encode(codec: RowCodec, values: torch.Tensor, ids: torch.Tensor | None) -> EncodedRows:
    """Quantize rows of a table piece by piece, and begin to move parameters and codes to the host.

    Parameters
    ----------
    codec, values
        As `can_encode` takes them: values are (rows, dim).
    ids
        int64 (n,), also in host memory: the rows; None for all, of which a lattice without a step finds its own.
    """
    source = kernels_on(values.device).Source(values.detach(), ids)
    element = _ELEMENTS[values.dtype]
    if isinstance(codec, UniformRows):
        width = row_bytes(SCHEMES[codec.scheme], codec.bits, source.dim)
        pieces = _in_pieces(source, width + _PARAMETER_BYTES, lambda each: _uniform(codec, each))
        return UniformEncoded(codec, element, pieces, values.device)
    assert isinstance(codec, LatticeRows | FloatingRows)
    known = codec
    if isinstance(codec, LatticeRows) and codec.step is None:
        known = codec.with_step(codec.step_of(root_mean_square(_block_sums(source.values))))
    moved = _in_pieces(source, 2 * source.dim + 1, lambda each: _integers(known, each))
    return IntegersEncoded(known, element, moved, values.device)


def _in_pieces(source: Any, staged_bytes: int, made: Callable[[Any], Made]) -> list[Made]:
    """Rows in pieces, of so many bytes a row, and in smaller ones where memory is short; one if there are no rows.

    Raises
    ------
    torch.cuda.OutOfMemoryError
        There is none for a small piece either.
    """
    pieces: list[Made] = []
    first, rows = 0, max(1, moving.PIECE_BYTES // staged_bytes)
    while not pieces or first < source.count:
        last = min(first + rows, source.count)
        try:
            pieces.append(made(source.part(first, last)))
        except torch.cuda.OutOfMemoryError:
            rows = (last - first) // 8
            if rows * staged_bytes < _LEAST_PIECE_BYTES:
                raise
        else:
            first = last
            continue
        for each in pieces:
            each.arriving()  # what they have on the device is free then
    return pieces


def quantize(codec: RowCodec, source: Any) -> tuple[torch.Tensor, ...]:
    """Launch the kernels for rows of a table, and return what they will write.

    Parameters
    ----------
    codec
        As `can_encode` takes it.
    source
        A `kernels.launches.Source`.

    Returns
    -------
    For n rows on a lattice or a floating grid: int16 (n, dim), the codes; uint8 (n,), which rows have none, whose codes
    are anything. Else parameters as float32 and as float16 (2, n); uint8 (n,), the kinds of parameters; uint8
    (n, bytes a row), packed codes.
    """
    kernels, count, empty = kernels_on(source.values.device), source.count, source.values.new_empty
    element = element_named(_ELEMENTS[source.values.dtype])
    if isinstance(codec, LatticeRows | FloatingRows):
        integers = empty((count, source.dim), dtype=torch.int16), empty(count, dtype=torch.uint8)
        if isinstance(codec, FloatingRows):
            mantissa = codec.mantissa_bits
            limits = code_range(mantissa, element.name)
            kernels.quantize_floating(source, MANTISSA_BITS - mantissa, *limits, *integers)
        else:
            assert codec.step is not None
            kernels.quantize_lattice(source, codec.step, most_code(codec.step, element), *integers)
        return integers
    assert isinstance(codec, UniformRows)
    bits, scheme = codec.bits, SCHEMES[codec.scheme]
    floats, halves = (empty((2, count), dtype=dtype) for dtype in (torch.float32, torch.float16))
    shapes = (count,), (count, row_bytes(scheme, bits, source.dim))
    out = floats, halves, *(empty(shape, dtype=torch.uint8) for shape in shapes)
    is_searched = codec.scheme == "adaptive" and source.dim <= MAX_DIM
    if is_searched and codec.bins is not None and codec.ratio is not None:
        steps = min(int(codec.bins * codec.ratio), codec.bins - 1)
        kernels.quantize_walked(source, bits, codec.bins, steps, element.overflow, out)
    elif is_searched and codec.bins is None and bits in NORMAL_STEPS:
        kernels.quantize_searched(source, bits, float(NORMAL_STEPS[bits]), element.overflow, out)
    else:
        kernels.quantize_ranges(source, bits, scheme is Scheme.SYMMETRIC, element.overflow, out)
    return out


def _uniform(codec: UniformRows, source: Any) -> UniformPiece:
    floats, halves, kind, codes = quantize(codec, source)
    kinds, count = kind.cpu().numpy(), source.count
    # Nearly always all rows have float16 parameters, and the others stay where they are.
    are_needed = (kinds != ParameterType.FLOAT16).any() or codec.scheme == "symmetric"
    arriving = start_copy((halves, codes, floats) if are_needed else (halves, codes))
    none, width = np.empty(0, np.float32), codes.shape[1]
    known = QuantizedRows(none, none, np.empty((2, 0), np.uint16), kinds, np.empty((0, width), np.uint8))
    raw = codec.raw_rows(known, source.dim, _ELEMENTS[source.values.dtype])
    values = _values(source, raw)
    nbytes = count * (width + 5 + 8 * bool(are_needed)) + values.nbytes
    return UniformPiece(np.flatnonzero(raw), values, arriving, count, nbytes, kinds)


def _integers(codec: LatticeRows | FloatingRows, source: Any) -> IntegersPiece:
    codes, raw = quantize(codec, source)
    arriving, is_raw = start_copy((codes,)), raw.cpu().numpy().view(np.bool_)
    values, count = _values(source, is_raw), source.count
    nbytes = count * (2 * source.dim + 1) + values.nbytes
    return IntegersPiece(np.flatnonzero(is_raw), values, arriving, count, nbytes, is_raw)


def _block_sums(values: torch.Tensor) -> list[Sum]:
    """What `lattice.steps.block_sums` returns for the values of a table. It waits for the device."""
    rows, dim = values.shape
    sums = values.new_empty((-(-rows // SUM_ROWS), SUM_LANES), dtype=torch.float64)
    kernels_on(values.device).sum_squares(values, SUM_ROWS, sums)
    found = list[Sum]()
    for block, lanes in enumerate(sums.cpu().tolist()):
        own = values[block * SUM_ROWS : (block + 1) * SUM_ROWS]
        (total, _), count = add_sums((each, 0) for each in lanes), own.numel()
        if not math.isfinite(total):  # rows that are not finite are stored as they are, and do not count
            held = own.isfinite().all(dim=1)
            count, again = int(held.sum()) * dim, sums[block : block + 1]
            kernels_on(values.device).sum_squares(own.where(held[:, None], 0), SUM_ROWS, again)
            total, _ = add_sums((each, 0) for each in again[0].tolist())
        found.append((total, count))
    return found


def _values(source: Any, chosen: Mask) -> Rows:
    """Copy the values of rows to the host, in the array type."""
    places = torch.from_numpy(np.flatnonzero(chosen)).to(source.values.device)
    taken = source.values[places if source.ids is None else source.ids[places]].cpu()
    found: Rows = (taken.float() if taken.dtype is torch.bfloat16 else taken).numpy()
    return found
