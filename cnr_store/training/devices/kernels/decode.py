"""Writes the values of codes straight into the rows of a table."""

import triton
import triton.language as tl


@triton.jit
def _bfloat16_bits(value):
    """Round to the nearest bfloat16, ties to even, given as int16. No value is NaN."""
    bits = value.to(tl.int32, bitcast=True)
    # int32 wraps as uint32 does. What is shifted in is not kept.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _store(place, value, mask, as_bfloat16: tl.constexpr):
    """Write float32 values, none of them NaN, rounded to the type of their places."""
    if as_bfloat16:
        tl.store(place, _bfloat16_bits(value), mask=mask)
    else:
        tl.store(place, value.to(place.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def decode_rows(
    packed,
    parameters,
    ids,
    count,
    stride,
    target,
    dim: tl.constexpr,
    bits: tl.constexpr,
    is_symmetric: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write rows `ids` of `target`: scale * code, which is exact, plus offset, rounded to float32, then to its type.

    `parameters` are (2, count): scale and offset; or (1, count), half steps: a code q is h * (2q - (2**bits - 1)).
    """
    number = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    held = number < count
    row = tl.load(ids + number, mask=held, other=0)
    scale = tl.load(parameters + number, mask=held, other=0.0).to(tl.float32)
    if is_symmetric:
        offset = scale * (1.0 - (1 << bits))
        scale = scale * 2.0
    else:
        offset = tl.load(parameters + count.to(tl.int64) + number, mask=held, other=0.0).to(tl.float32)
    width: tl.constexpr = (dim * bits + 7) // 8
    for column in range(0, dim, block):
        columns = column + tl.arange(0, block)
        mask = held[:, None] & (columns < dim)[None, :]
        byte, shift = columns * bits // 8, columns * bits % 8
        place = number[:, None] * width + byte[None, :]
        word = tl.load(packed + place, mask=mask, other=0).to(tl.int32)
        if 8 % bits != 0:
            # Codes of such widths may end in the next byte.
            ends_there = mask & ((shift + bits) > 8)[None, :]
            word |= tl.load(packed + place + 1, mask=ends_there, other=0).to(tl.int32) << 8
        code = ((word >> shift[None, :]) & ((1 << bits) - 1)).to(tl.float32)
        value = scale[:, None] * code + offset[:, None]
        _store(target + row[:, None] * stride + columns[None, :], value, mask, as_bfloat16)


@triton.jit(do_not_specialize=["count", "step"])
def decode_integers(
    codes,
    ids,
    count,
    stride,
    step,
    target,
    dim: tl.constexpr,
    shift: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    as_bfloat16: tl.constexpr,
):
    """Write rows `ids` of `target` from int16 codes (count, dim): step * code, which is exact, rounded to its type.

    Of a floating grid, `shift` is not 0, and a code is sign and magnitude of a float32 above its lowest `shift` bits.
    """
    number = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    held = number < count
    row = tl.load(ids + number, mask=held, other=0)
    for column in range(0, dim, block):
        columns = column + tl.arange(0, block)
        mask = held[:, None] & (columns < dim)[None, :]
        code = tl.load(codes + number[:, None] * dim + columns[None, :], mask=mask, other=0).to(tl.int32)
        if shift == 0:
            value = step * code.to(tl.float32)
        else:
            value = ((tl.abs(code) << shift) | ((code >> 31) << 31)).to(tl.float32, bitcast=True)
        _store(target + row[:, None] * stride + columns[None, :], value, mask, as_bfloat16)
