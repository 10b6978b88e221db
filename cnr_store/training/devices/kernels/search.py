"""Searches for the line that quantizes a row best, as `cnr_codecs.uniform.reference.search` defines it.

A lane has a row, and adds up its columns in order: the order decides the last bit.
"""

import triton
import triton.language as tl

from cnr_store.training.devices.kernels.codes import ROUNDING, clamped, gain_of, write_parameters
from cnr_store.training.devices.kernels.extremes import (
    load_values,
    range_factor,
    row_extremes,
    rows_of_program,
)
from cnr_store.training.devices.kernels.parameters import asymmetric, fitted

# A trial's numbers, as `cnr_codecs.kernels.search` has them.
_NUMBERS = tl.constexpr(5)


@triton.jit
def _column(source, start, column, held, as_bfloat16: tl.constexpr):
    return load_values(source, start + column, held, as_bfloat16)


@triton.jit
def _search(
    source,
    start,
    held,
    low,
    factor,
    normal_step,
    trials,
    dim: tl.constexpr,
    bits: tl.constexpr,
    trial_count: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Return how much of its row the best line explains (0: there is none), its centre and its step."""
    top: tl.constexpr = (1 << bits) - 1.0
    half: tl.constexpr = top * 0.5
    zero = tl.zeros_like(low)
    total = zero
    for column in range(dim):
        total += (_column(source, start, column, held, as_bfloat16) - low) * factor - half
    mean = tl.div_rn(total, zero + dim)
    squares = zero
    for column in range(dim):
        off = ((_column(source, start, column, held, as_bfloat16) - low) * factor - half) - mean
        squares += off * off
    deviation = tl.sqrt_rn(tl.div_rn(squares, zero + dim))
    deviation = tl.where(deviation > 0.0, deviation, 1.0)

    explained, centre, step = zero, zero, zero + 1.0
    from_at, from_step = zero, zero + 1.0
    for trial in range(trial_count):
        numbers = trials + trial * _NUMBERS
        window = tl.load(numbers)
        shift = tl.load(numbers + 1) * tl.where(tl.load(numbers + 2) > 0.0, half, 1.0)
        share = tl.load(numbers + 3) * tl.where(tl.load(numbers + 4) > 0.0, normal_step, 1.0)
        # A trial starts from the best window so far, from the row's moments, or from where the one before it did.
        from_at = tl.where(window == 1.0, centre, tl.where(window == 2.0, mean, from_at))
        from_step = tl.where(window == 1.0, step, tl.where(window == 2.0, deviation, from_step))
        at = from_at + shift * from_step
        gain = tl.div_rn(zero + 1.0, from_step * share)
        begin = half - at * gain
        codes, squares, products = zero, zero, zero
        for column in range(dim):
            value = (_column(source, start, column, held, as_bfloat16) - low) * factor - half
            code = ((clamped(value * gain + begin, top) + ROUNDING) - ROUNDING) - half
            codes += code
            squares += code * code
            products += code * value
        variance = squares * dim - codes * codes
        covariance = products * dim - codes * total
        fits = (variance > 0.0) & (covariance > 0.0)
        slope = tl.div_rn(covariance, tl.where(fits, variance, 1.0))
        better = fits & (covariance * slope > explained)
        explained = tl.where(better, covariance * slope, explained)
        centre = tl.where(better, tl.div_rn(total - slope * codes, zero + dim), centre)
        step = tl.where(better, slope, step)
    return explained, centre, step


@triton.jit
def _squared_error(
    source,
    start,
    held,
    scale,
    offset,
    factor,
    dim: tl.constexpr,
    bits: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Return the squared errors of rows quantized with these parameters, in steps of the whole range."""
    scale, offset, error = scale.to(tl.float32), offset.to(tl.float32), tl.zeros_like(factor)
    gain = gain_of(scale)
    for column in range(dim):
        value = _column(source, start, column, held, as_bfloat16)
        code = (clamped((value - offset) * gain, (1 << bits) - 1.0) + ROUNDING) - ROUNDING
        off = ((scale * code + offset) - value) * factor
        error += off * off
    return error


@triton.jit(do_not_specialize=["count", "overflow", "normal_step"])
def search_lines(
    source,
    ids,
    count,
    stride,
    overflow,
    normal_step,
    trials,
    floats,
    halves,
    kinds,
    dim: tl.constexpr,
    bits: tl.constexpr,
    trial_count: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write the parameters that the search finds for rows, or those of their ranges where these are better."""
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    least, most = row_extremes(source, start, held, dim, block, as_bfloat16)
    top = (1 << bits) - 1.0
    factor = range_factor(least, most, top)
    explained, centre, step = _search(
        source, start, held, least, factor, normal_step, trials, dim, bits, trial_count, as_bfloat16
    )

    levels = tl.full((rows,), top, tl.float64)
    low, high = least.to(tl.float64), most.to(tl.float64)
    scale, offset, kind = asymmetric(low, high, levels, overflow)
    half, unit, slope = levels * 0.5, factor.to(tl.float64), step.to(tl.float64)
    moved = (centre.to(tl.float64) + half) - slope * half
    explained = tl.where(factor > 0.0, explained, 0.0)
    fit_scale, fit_offset, fit_kind = fitted(slope / unit, low + moved / unit, explained, levels, overflow)

    error = _squared_error(source, start, held, scale, offset, factor, dim, bits, as_bfloat16)
    fit_error = _squared_error(source, start, held, fit_scale, fit_offset, factor, dim, bits, as_bfloat16)
    taken = (fit_kind > 0) & ((kind == 0) | (fit_error <= error))
    scale, offset = tl.where(taken, fit_scale, scale), tl.where(taken, fit_offset, offset)
    kind = tl.where(taken, fit_kind, kind)
    write_parameters(scale, offset, kind, held, number, count, floats, halves, kinds)
