"""What the kernels compute, in readable numpy. The two agree bit for bit; the tests hold them to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def row_extremes(values: Float32s) -> tuple[Float32s, Float32s]:
    """Least and greatest value of each row of finite (n, dim) values, -0 below +0."""
    bits = values.view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return keys_to_floats(keys.min(axis=1)), keys_to_floats(keys.max(axis=1))


def keys_to_floats(keys: npt.NDArray[np.int32]) -> Float32s:
    """The float32 values that integer keys of the same order stand for."""
    return np.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys).view(np.float32)


def quantize(values: Float32s, scale: Float32s, offset: Float32s, bits: int) -> Bytes:
    """Codes (n, dim) of finite values: (x - offset) / scale, clamped to the codes and rounded half even."""
    step = np.where(scale > 0, scale, np.float32(1))[:, None]
    with np.errstate(over="ignore"):
        steps = (values - offset[:, None]) / step
    return np.rint(np.clip(steps, 0, (1 << bits) - 1)).astype(np.uint8)


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes (n, dim) packed to (n, ceil(dim * bits / 8)): each row on its own bytes, the lowest bit first."""
    flags = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(flags.reshape(len(codes), -1), axis=1, bitorder="little")


def unpack(packed: Bytes, bits: int, dim: int) -> Bytes:
    """The inverse of `pack`: codes (n, dim)."""
    flags = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little").reshape(len(packed), dim, bits)
    codes: Bytes = (flags << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return codes


def dequantize(codes: Bytes, scale: Float32s, offset: Float32s) -> Float32s:
    """Values (n, dim): scale * code, which is exact, plus offset, rounded once."""
    with np.errstate(over="ignore"):
        return scale[:, None] * codes.astype(np.float32) + offset[:, None]


def round_to_bfloat16(values: Float32s) -> Float32s:
    """Values without NaN, rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def greedy_walk(
    values: Float32s, low: Float32s, factor: Float32s, bins: int, steps: int, levels: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The paper's greedy search for the range of each row of (n, dim) values that quantizes it best.

    A row's range is cut into `bins` bins. Each of `steps` steps takes one bin off its lower or its upper
    end, whichever leaves the smaller squared error with `levels` + 1 codes, clamping included; the best
    range met is kept, the whole one included. Values are first mapped to bins, y = (x - low) * factor, so
    that after i steps every row's window is bins - i bins wide, and no error can overflow.

    Returns:
        (bins off the lower end, bins off the upper end), int32 (n,).
    """
    with np.errstate(all="ignore"):
        y = (values - low[:, None]) * factor[:, None]
    cut = np.zeros(len(values), np.float32)
    best = _window_error(y, cut, bins, levels)
    left = np.zeros(len(values), np.int32)
    right = np.zeros(len(values), np.int32)
    for step in range(1, steps + 1):
        width = bins - step
        upper = _window_error(y, cut, width, levels, skip=1)
        lower = _window_error(y, cut, width, levels)
        rises = upper < lower
        cut = np.where(rises, cut + np.float32(1), cut)
        error = np.where(rises, upper, lower)
        better = error < best
        best = np.where(better, error, best)
        left = np.where(better, cut.astype(np.int32), left)
        right = np.where(better, step - cut.astype(np.int32), right)
    return left, right


def _window_error(y: Float32s, cut: Float32s, width: int, levels: int, skip: int = 0) -> Float32s:
    """Squared error of each row, in bins / levels, in a window of `width` bins from bin `cut` + `skip`."""
    gain = np.float32(levels) / np.float32(width)
    steps = (y - cut[:, None]) * gain - np.float32(skip) * gain
    errors = np.rint(np.clip(steps, 0, levels)) - steps
    total = np.zeros(len(y), np.float32)
    # Column by column, as each of the kernel's lanes sums: the order of the additions decides the last bit.
    for column in (errors * errors).T:
        total += column
    return total * (np.float32(width) * np.float32(width))
