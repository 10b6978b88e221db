"""Uniform quantization in readable numpy. The kernels compute the same bit for bit, which tests check."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.kernels.search import (
    CUT,
    MAX_DIM,
    NEIGHBOURS,
    NORMAL_SHARES,
    NORMAL_STEPS,
    RANGE_SHARES,
    REFITS,
)
from tests.test_codecs.references.parameters import Float64s, Parameters, asymmetric, fitted, symmetric

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def row_extremes(values: Float32s) -> tuple[Float32s, Float32s]:
    """Return the least and the greatest value of each row of finite (n, dim) values. -0 is below +0."""
    bits = values.view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return keys_to_floats(keys.min(axis=1)), keys_to_floats(keys.max(axis=1))


def keys_to_floats(keys: npt.NDArray[np.int32]) -> Float32s:
    """Return the float32 values of integer keys, which sort as the values do."""
    return np.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys).view(np.float32)


def quantize(values: Float32s, scale: Float32s, offset: Float32s, bits: int) -> Bytes:
    """Return codes (n, dim) of finite values: (x - offset) * (1 / scale), clamped to the codes, rounded half even.

    The reciprocal is a float32 too. A scale of 0 counts as 1.
    """
    gain = np.float32(1) / np.where(scale > 0, scale, np.float32(1))
    with np.errstate(over="ignore"):
        steps = (values - offset[:, None]) * gain[:, None]
    return np.rint(np.clip(steps, 0, (1 << bits) - 1)).astype(np.uint8)


def unpack(packed: Bytes, bits: int, dim: int) -> Bytes:
    """Return the codes (n, dim) that `pack` packed."""
    flags = np.unpackbits(packed, axis=1, count=dim * bits, bitorder="little").reshape(len(packed), dim, bits)
    codes: Bytes = (flags << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return codes


def dequantize(codes: Bytes, scale: Float32s, offset: Float32s) -> Float32s:
    """Return values (n, dim): scale * code, which is exact, plus offset, rounded once."""
    with np.errstate(over="ignore"):
        return scale[:, None] * codes.astype(np.float32) + offset[:, None]


def greedy_walk(
    values: Float32s, low: Float32s, factor: Float32s, bins: int, steps: int, levels: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Narrow the range of each row of (n, dim) values by the paper's greedy walk.

    Return (bins to cut off the lower end, bins to cut off the upper end), int32 (n,) each.

    A row's range is cut into `bins` bins. Each of `steps` steps takes one bin off the lower or the upper end,
    whichever leaves the smaller squared error with `levels` + 1 codes, clamping included. The best of all these
    ranges is kept, the whole one included. Values are first mapped to bins, y = (x - low) * factor: after i steps
    every row's window is then bins - i bins wide, and no error can overflow.
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
    """Return the squared error of each row in a window of `width` bins from bin `cut` + `skip`.

    Its unit is the square of a bin divided by the square of `levels`.
    """
    gain = np.float32(levels) / np.float32(width)
    steps = (y - cut[:, None]) * gain - np.float32(skip) * gain
    errors = np.rint(np.clip(steps, 0, levels)) - steps
    return _sum_columns(errors * errors) * (np.float32(width) * np.float32(width))


def search(
    values: Float32s, low: Float32s, factor: Float32s, levels: int, normal_step: np.float32
) -> tuple[Float32s, Float32s, Float32s]:
    """Find the line that quantizes each row of (n, dim) values best, among those that a fixed list of windows gives.

    Return three float32 (n,): how much of the row the line explains, times n squared, or 0 if there is no line; the
    line's value at the middle code; its step.

    `low` and `factor` first map a row to [-levels / 2, levels / 2]. A window has a centre and a step, and gives every
    value a code, clamped. The line of least squares through these codes is never worse than the window. It is kept
    if it explains more of the row, which leaves a smaller error, than every line before.
    `cnr_codecs.kernels.search` lists the windows.
    """
    half = np.float32(levels) * np.float32(0.5)
    with np.errstate(all="ignore"):
        best = _Lines((values - low[:, None]) * factor[:, None] - half, half)
        for share in RANGE_SHARES:
            best.offer(np.zeros(len(values), np.float32), np.broadcast_to(share, len(values)))
        mean, deviation = best.moments()
        for share in NORMAL_SHARES:
            best.offer(mean, deviation * (share * normal_step))
        best.offer_around(((CUT * half, 1 - CUT), (-CUT * half, 1 - CUT)))
        for around in NEIGHBOURS:
            best.offer_around(around)
        for _ in range(REFITS):
            best.offer(best.centre, best.step)
    return best.explained, best.centre, best.step


class _Lines:
    """The best line so far of each row of `values` (n, dim)."""

    def __init__(self, values: Float32s, half: np.float32) -> None:
        count, dim = values.shape
        self.values = values
        self.half = half
        self.dim = np.float32(dim)
        self.sums = _sum_columns(values)
        self.explained, self.centre = (np.zeros(count, np.float32) for _ in range(2))
        self.step = np.ones(count, np.float32)

    def moments(self) -> tuple[Float32s, Float32s]:
        """Return mean and standard deviation of each row. A deviation of 0 is returned as 1."""
        mean = self.sums / self.dim
        off = self.values - mean[:, None]
        deviation = np.sqrt(_sum_columns(off * off) / self.dim)
        return mean, np.where(deviation > 0, deviation, np.float32(1))

    def offer_around(self, windows: Iterable[tuple[np.float32, np.float32]]) -> None:
        """Try neighbours of the best window so far: (shift in steps, factor of the step)."""
        centre, step = self.centre, self.step
        for shift, share in windows:
            self.offer(centre + shift * step, step * share)

    def offer(self, centre: Float32s, step: Float32s) -> None:
        """Fit a line to the codes of each row's window, and keep it if it is the best of its row."""
        gain = np.float32(1) / step
        start = self.half - centre * gain
        steps = self.values * gain[:, None] + start[:, None]
        codes = np.rint(np.clip(steps, 0, 2 * self.half)) - self.half
        total = _sum_columns(codes)
        variance = self.dim * _sum_columns(codes * codes) - total * total
        covariance = self.dim * _sum_columns(codes * self.values) - total * self.sums
        slope = covariance / np.where(variance > 0, variance, np.float32(1))
        better = (variance > 0) & (covariance > 0) & (covariance * slope > self.explained)
        self.explained = np.where(better, covariance * slope, self.explained)
        self.centre = np.where(better, (self.sums - slope * total) / self.dim, self.centre)
        self.step = np.where(better, slope, self.step)


def _sum_columns(values: Float32s) -> Float32s:
    """Return the sums of rows. Columns are added in order, as the kernel does: the order decides the last bit."""
    total = np.zeros(len(values), np.float32)
    for column in values.T:
        total = total + column
    return total


def parameters(
    values: Float32s, scheme: str, bits: int, element: Element, walk: tuple[int, float] | None = None
) -> Parameters:
    """Return the parameters that a scheme quantizes (n, dim) values with.

    Parameters
    ----------
    walk
        (bins, ratio) of the paper's greedy walk. None stands for the search.
    """
    with np.errstate(all="ignore"):
        least, most = row_extremes(values)
        low, high = least.astype(np.float64), most.astype(np.float64)
        if scheme == "symmetric":
            return symmetric(np.maximum(np.abs(low), np.abs(high)), bits, element)
        whole = asymmetric(low, high, bits, element)
        if scheme == "asymmetric" or values.shape[1] > MAX_DIM:
            return whole
        if walk is not None:
            return asymmetric(*_walked(values, bits, *walk), bits, element)
        return _searched(values, whole, bits, element) if bits in NORMAL_STEPS else whole


def _walked(values: Float32s, bits: int, bins: int, ratio: float) -> tuple[Float64s, Float64s]:
    least, most = row_extremes(values)
    factor = _factor(least, most, np.float32(bins))
    left, right = greedy_walk(values, least, factor, bins, min(int(bins * ratio), bins - 1), (1 << bits) - 1)
    low, high = least.astype(np.float64), most.astype(np.float64)
    width = (high - low) / bins
    return np.where(left > 0, low + left * width, low), np.where(right > 0, high - right * width, high)


def _searched(values: Float32s, whole: Parameters, bits: int, element: Element) -> Parameters:
    """Return the parameters that the search finds, or those of the whole range where these are better."""
    levels = (1 << bits) - 1
    least, most = row_extremes(values)
    factor = _factor(least, most, np.float32(levels))
    explained, centre, step = search(values, least, factor, levels, NORMAL_STEPS[bits])
    unit, middle, slope = (each.astype(np.float64) for each in (factor, centre, step))
    offset = least + (middle + levels / 2 - slope * (levels / 2)) / unit
    found = fitted(slope / unit, offset, bits, element)
    errors = (_squared_errors(values, each, factor, bits) for each in (found, whole))
    use = (explained > 0) & (factor > 0) & ~found.raw & (np.less_equal(*errors) | whole.raw)
    return Parameters(
        np.where(use, found.scale, whole.scale),
        np.where(use, found.offset, whole.offset),
        np.where(use, found.stored, whole.stored),
        np.where(use, found.float16, whole.float16),
        ~use & whole.raw,
    )


def _squared_errors(values: Float32s, found: Parameters, factor: Float32s, bits: int) -> Float32s:
    """Return the squared error of rows quantized with these parameters, in steps of the whole range."""
    decoded = dequantize(quantize(values, found.scale, found.offset, bits), found.scale, found.offset)
    off = (decoded - values) * factor[:, None]
    return _sum_columns(off * off)


def _factor(low: Float32s, high: Float32s, parts: np.float32) -> Float32s:
    """Return what maps ranges to `parts` parts, or 0 where no float32 does: a search then does nothing."""
    span = high - low
    factor = parts / span
    return np.where(np.isfinite(span) & np.isfinite(factor), factor, np.float32(0))
