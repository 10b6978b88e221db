"""Codes of rows, packed: each row starts on a byte, and code j takes the bits [j * bits, (j + 1) * bits)."""

import triton
import triton.language as tl

from cnr_store.training.devices.kernels.extremes import load_values, rows_of_program

# Adding this to a float32 of 0 to 2**22, and taking it away, rounds it half even.
ROUNDING = tl.constexpr(float(3 << 22))


@triton.jit
def clamped(steps, top):
    """Clamp to the codes. NaN becomes 0."""
    steps = tl.where(steps > 0.0, steps, 0.0)
    return tl.where(steps < top, steps, top)


@triton.jit
def gain_of(scale):
    """The reciprocal of the scale. A scale of 0 counts as 1."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0.0, scale, 1.0))


@triton.jit
def write_codes(
    source,
    start,
    held,
    number,
    scale,
    offset,
    packed,
    dim: tl.constexpr,
    bits: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write the packed codes of rows, `width` bytes each, to `packed`.

    A lane makes a byte: it computes the codes that have bits in it. Those that two bytes share are computed twice.
    """
    top = (1 << bits) - 1.0
    gain = gain_of(scale)
    for first in range(0, width, block):
        byte = first + tl.arange(0, block)
        made = tl.zeros((start.shape[0], block), tl.int32)
        for each in tl.static_range(8 // bits if 8 % bits == 0 else (2 * bits + 6) // bits):
            column = byte * 8 // bits + each
            shift = column * bits - byte * 8
            is_there = (shift < 8) & (column < dim) & (byte < width)
            mask = held[:, None] & is_there[None, :]
            value = load_values(source, start[:, None] + column[None, :], mask, as_bfloat16)
            steps = clamped((value - offset[:, None]) * gain[:, None], top)
            code = (steps + ROUNDING).to(tl.int32, bitcast=True) & 0xFF
            # A shift to the left, then one to the right: one of the two is by 0.
            code = (code << tl.where(shift > 0, shift, 0)[None, :]) >> tl.where(shift < 0, 0 - shift, 0)[
                None, :
            ]
            made |= tl.where(mask, code & 0xFF, 0)
        place = number[:, None] * width + byte[None, :]
        tl.store(packed + place, made.to(tl.uint8), mask=held[:, None] & (byte < width)[None, :])


@triton.jit
def write_parameters(scale, offset, kind, held, number, count, floats, halves, kinds):
    """Write float64 scale and offset as float32 and as float16, (2, count) each, and the kinds."""
    for line in tl.static_range(2):
        value = (offset if line else scale).to(tl.float32)
        place = number + line * count.to(tl.int64)
        tl.store(floats + place, value, mask=held)
        tl.store(halves + place, value.to(tl.float16), mask=held)
    tl.store(kinds + number, kind.to(tl.uint8), mask=held)


@triton.jit(do_not_specialize=["count"])
def encode_given(
    source,
    ids,
    count,
    stride,
    floats,
    packed,
    dim: tl.constexpr,
    bits: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    all_rows: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write the packed codes of rows whose scales and offsets are in `floats`, (2, count)."""
    start, held, number = rows_of_program(ids, count, stride, rows, all_rows)
    scale = tl.load(floats + number, mask=held, other=1.0)
    offset = tl.load(floats + count.to(tl.int64) + number, mask=held, other=0.0)
    width: tl.constexpr = (dim * bits + 7) // 8
    write_codes(source, start, held, number, scale, offset, packed, dim, bits, width, block, as_bfloat16)
