"""The least and the greatest value of rows, and what maps a row's range to codes."""

import triton
import triton.language as tl


@triton.jit
def load_values(source, place, mask, as_bfloat16: tl.constexpr):
    """Load values as float32. Those of bfloat16 are given as int16, since the interpreter has no bfloat16."""
    found = tl.load(source + place, mask=mask, other=0)
    if as_bfloat16:
        found = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def rows_of_program(ids, count, stride, rows: tl.constexpr, all_rows: tl.constexpr):
    """Return where the program's rows begin, which of them there are, and their numbers among those given."""
    number = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    held = number < count
    row = number if all_rows else tl.load(ids + number, mask=held, other=0)
    return row * stride, held, number


@triton.jit
def _keys(values):
    """Integers that sort as the values do: -0 below +0, NaN beyond the infinities. Also the way back, by bits."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def row_extremes(source, start, held, dim: tl.constexpr, block: tl.constexpr, as_bfloat16: tl.constexpr):
    """Return the least and the greatest value of each row, float32. One is not finite if any value is not."""
    least = tl.full(start.shape, 0x7FFFFFFF, tl.int32)
    most = tl.full(start.shape, -0x80000000, tl.int32)
    for column in range(0, dim, block):
        columns = column + tl.arange(0, block)
        mask = held[:, None] & (columns < dim)[None, :]
        keys = _keys(load_values(source, start[:, None] + columns[None, :], mask, as_bfloat16))
        least = tl.minimum(least, tl.min(tl.where(mask, keys, 0x7FFFFFFF), axis=1))
        most = tl.maximum(most, tl.max(tl.where(mask, keys, -0x80000000), axis=1))
    # The same operation turns keys into bits.
    low, high = _keys(least.to(tl.float32, bitcast=True)), _keys(most.to(tl.float32, bitcast=True))
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def range_factor(low, high, parts):
    """Return what maps ranges to `parts` parts, or 0 where no float32 does: a search then finds nothing."""
    span = high - low
    factor = tl.div_rn(tl.zeros_like(span) + parts, span)
    return tl.where((span < float("inf")) & (factor < float("inf")), factor, 0.0)
