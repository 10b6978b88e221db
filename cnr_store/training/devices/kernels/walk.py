"""The paper's greedy walk, which narrows a row's range bin by bin, as `cnr_codecs.uniform.reference` defines it.

A lane has a row, and adds up its columns in order: the order decides the last bit.
"""

import triton
import triton.language as tl

from cnr_store.training.devices.kernels.codes import ROUNDING, clamped, write_parameters
from cnr_store.training.devices.kernels.extremes import (
    load_values,
    range_factor,
    row_extremes,
    rows_of_program,
)
from cnr_store.training.devices.kernels.parameters import asymmetric


@triton.jit
def _window_errors(
    source,
    start,
    held,
    low,
    factor,
    cut,
    width,
    dim: tl.constexpr,
    bits: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Return the squared errors of the windows of `width` bins from bin cut + 1, and from bin cut, in bins."""
    top = (1 << bits) - 1.0
    width = tl.zeros_like(low) + width
    gain = tl.div_rn(tl.zeros_like(low) + top, width)
    upper, lower = tl.zeros_like(low), tl.zeros_like(low)
    for column in range(dim):
        bins = (load_values(source, start + column, held, as_bfloat16) - low) * factor
        steps = (bins - cut) * gain
        shifted = steps - gain
        off = ((clamped(steps, top) + ROUNDING) - ROUNDING) - steps
        off_shifted = ((clamped(shifted, top) + ROUNDING) - ROUNDING) - shifted
        lower += off * off
        upper += off_shifted * off_shifted
    return upper * (width * width), lower * (width * width)


@triton.jit(do_not_specialize=["count", "overflow"])
def walk_ranges(
    source,
    ids,
    count,
    stride,
    overflow,
    floats,
    halves,
    kinds,
    dim: tl.constexpr,
    bits: tl.constexpr,
    bins: tl.constexpr,
    steps: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write the parameters of the ranges that the walk leaves of rows: it takes `steps` of `bins` bins off."""
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    least, most = row_extremes(source, start, held, dim, block, as_bfloat16)
    factor = range_factor(least, most, bins)
    cut = tl.zeros_like(least)
    left, right = tl.zeros((rows,), tl.int32), tl.zeros((rows,), tl.int32)
    _, best = _window_errors(source, start, held, least, factor, cut, bins, dim, bits, as_bfloat16)
    for step in range(1, steps + 1):
        upper, lower = _window_errors(
            source, start, held, least, factor, cut, bins - step, dim, bits, as_bfloat16
        )
        rises = upper < lower
        cut = tl.where(rises, cut + 1.0, cut)
        error = tl.where(rises, upper, lower)
        better = error < best
        best = tl.where(better, error, best)
        left = tl.where(better, cut.to(tl.int32), left)
        right = tl.where(better, step - cut.to(tl.int32), right)

    low, high = least.to(tl.float64), most.to(tl.float64)
    bin_width = (high - low) / bins
    narrow_low = tl.where(left > 0, low + left.to(tl.float64) * bin_width, low)
    narrow_high = tl.where(right > 0, high - right.to(tl.float64) * bin_width, high)
    levels = tl.full((rows,), (1 << bits) - 1.0, tl.float64)
    scale, offset, kind = asymmetric(narrow_low, narrow_high, levels, overflow)
    write_parameters(scale, offset, kind, held, number, count, floats, halves, kinds)
