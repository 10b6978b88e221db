"""Finds the integers of rows on one step or a floating grid, and the sums of squares that steps come from."""

import triton
import triton.language as tl

from cnr_store.training.devices.kernels.extremes import load_values, rows_of_program

# Beyond every limit.
_BEYOND = tl.constexpr(65536.0)
# Adding this to a float64 of magnitudes up to 2**51, and taking it away, rounds it half even.
_ROUNDING = tl.constexpr(1.5 * 2.0**52)


@triton.jit(do_not_specialize=["count", "step", "limit"])
def encode_lattice(
    source,
    ids,
    count,
    stride,
    step,
    limit,
    codes,
    raw,
    dim: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write int16 codes of `count` rows. A row that is not finite, or has a code beyond `limit`, is marked in `raw`."""
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    inverse = tl.full((rows,), 1.0, tl.float64) / (tl.zeros((rows,), tl.float64) + step)
    most = tl.zeros((rows,), tl.int32)
    for column in range(0, dim, block):
        columns = column + tl.arange(0, block)
        mask = held[:, None] & (columns < dim)[None, :]
        values = load_values(source, start[:, None] + columns[None, :], mask, as_bfloat16)
        exact = values.to(tl.float64) * inverse[:, None]
        # NaN fails each comparison, and ends beyond every limit.
        exact = tl.where(exact > -_BEYOND, exact, -_BEYOND)
        exact = tl.where(exact < _BEYOND, exact, _BEYOND)
        code = ((exact + _ROUNDING) - _ROUNDING).to(tl.int32)
        tl.store(codes + number[:, None] * dim + columns[None, :], code.to(tl.int16), mask=mask)
        most = tl.maximum(most, tl.max(tl.where(mask, tl.abs(code), 0), axis=1))
    tl.store(raw + number, (most > limit).to(tl.uint8), mask=held)


@triton.jit(do_not_specialize=["count", "least", "most"])
def encode_floating(
    source,
    ids,
    count,
    stride,
    least,
    most,
    codes,
    raw,
    dim: tl.constexpr,
    shift: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write int16 codes of `count` rows: the bits of float32 above the lowest `shift`, rounded half even.

    A row with a magnitude that is neither that of 0 nor from `least` to `most` is marked in `raw`.
    """
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    beyond = tl.zeros((rows,), tl.int32)
    for column in range(0, dim, block):
        columns = column + tl.arange(0, block)
        mask = held[:, None] & (columns < dim)[None, :]
        values = load_values(source, start[:, None] + columns[None, :], mask, as_bfloat16)
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # The lowest bits are rounded by themselves: the sum with all bits of a NaN is beyond int32.
        upper, lowest = size >> shift, size & ((1 << shift) - 1)
        magnitude = upper + ((lowest + ((1 << (shift - 1)) - 1) + (upper & 1)) >> shift)
        outside = (size != 0) & ((magnitude < least) | (magnitude > most))
        code = tl.where(bits < 0, -magnitude, magnitude)
        tl.store(codes + number[:, None] * dim + columns[None, :], code.to(tl.int16), mask=mask)
        beyond = tl.maximum(beyond, tl.max(outside.to(tl.int32), axis=1))
    tl.store(raw + number, beyond.to(tl.uint8), mask=held)


@triton.jit(do_not_specialize=["count"])
def sum_squares(
    source,
    count,
    stride,
    sums,
    dim: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    in_one_piece: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write float64 sums of squares of each `rows` rows of `count`: value j of these belongs to sum j mod `lanes`.

    Each sum is added up in order. A square of float32 is exact in float64.
    """
    first, lane = tl.program_id(0).to(tl.int64) * rows, tl.arange(0, lanes)
    values = tl.minimum(count - first, rows) * dim
    total = tl.zeros((lanes,), tl.float64)
    for begin in range(0, values, lanes):
        number = begin + lane.to(tl.int64)
        place = first * dim + number
        if not in_one_piece:
            place = (first + number // dim) * stride + number % dim
        value = load_values(source, place, number < values, as_bfloat16).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0) * lanes + lane, total)
