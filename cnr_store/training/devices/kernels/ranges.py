"""Quantizes rows over their own ranges, in one pass."""

import triton
import triton.language as tl

from cnr_store.training.devices.kernels.codes import write_codes, write_parameters
from cnr_store.training.devices.kernels.extremes import row_extremes, rows_of_program
from cnr_store.training.devices.kernels.parameters import asymmetric, symmetric


@triton.jit(do_not_specialize=["count", "overflow"])
def encode_ranges(
    source,
    ids,
    count,
    stride,
    overflow,
    floats,
    halves,
    kinds,
    packed,
    dim: tl.constexpr,
    bits: tl.constexpr,
    is_symmetric: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write parameters and packed codes of `count` rows. Those of kind 0 must be stored raw."""
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    low, high = row_extremes(source, start, held, dim, block, as_bfloat16)
    low, high = low.to(tl.float64), high.to(tl.float64)
    levels = tl.full((rows,), (1 << bits) - 1.0, tl.float64)
    if is_symmetric:
        scale, offset, kind = symmetric(low, high, levels, overflow)
    else:
        scale, offset, kind = asymmetric(low, high, levels, overflow)
    write_parameters(scale, offset, kind, held, number, count, floats, halves, kinds)
    width: tl.constexpr = (dim * bits + 7) // 8
    scale, offset = scale.to(tl.float32), offset.to(tl.float32)
    write_codes(source, start, held, number, scale, offset, packed, dim, bits, width, block, as_bfloat16)
