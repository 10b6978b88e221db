"""Searches for the line that quantizes a row best: by default, and by the paper's greedy walk, bin by bin.

The reference of the tests defines the search by default, which goes as follows.

Rows are searched side by side, one in each vector lane. All numbers are in one flat array `work` of lines of LANES
numbers: one line for each sum, then one for each column. One array with constant offsets tells the compiler that sums
and columns do not overlap.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cnr_codecs.kernels.building.compiled import helper, kernel

# Wider rows are not searched: the search keeps 64 rows in memory, and sums columns in float32.
MAX_DIM: Final = 2048

_Pairs = tuple[tuple[np.float32, np.float32], ...]


def _around(shift: float, widening: float) -> _Pairs:
    pairs = (shift, 1.0), (-shift, 1.0), (0.0, 1 + widening), (0.0, 1 - widening)
    return tuple((np.float32(by), np.float32(share)) for by, share in pairs)


# First, shares of the row's range about its middle. Half of it suits heavy tails.
RANGE_SHARES: Final = tuple(np.float32(share) for share in (1.0, 0.85, 0.7, 0.5))
# Then, about the row's mean, the best window for normal values, and one for heavier tails.
NORMAL_SHARES: Final = tuple(np.float32(share) for share in (1.0, 1.4))
# Then the best window so far without this share of it on either side, which suits skewed rows.
CUT: Final = np.float32(0.15)
# Then neighbours of the best window so far: (shift, in steps; factor of the step).
NEIGHBOURS: Final = (_around(0.3, 0.1), _around(0.25, 0.05), _around(0.12, 0.025), _around(0.06, 0.0125))
# Last, the best line is tried as a window itself, this many times.
REFITS: Final = 1

# The uniform step, in standard deviations, that quantizes a normal distribution best, by bits. At 8 bits a search gains
# nothing.
NORMAL_STEPS: Final = {
    bits: np.float32(step)
    for bits, step in enumerate((1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569), start=1)
}

LANES = 64
# Unsigned, so that numba handles no indices from the end.
_LANES = np.uintp(LANES)
_Q, _QQ, _QZ, _Z, _GAIN, _SHIFT = (np.uintp(line * LANES) for line in range(6))
_FROM_AT, _FROM_STEP = (np.uintp(line * LANES) for line in range(6, 8))
# The results: how much of its row the best line explains (0: there is no line), its centre and its step.
EXPLAINED, CENTRE, BEST_STEP = (np.uintp(line * LANES) for line in range(8, 11))
_COLUMNS = np.uintp(11 * LANES)
# Adding this to a float32 of 0 to 2**22, and taking it away, rounds it half even.
_ROUNDING = np.float32(3 << 22)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)

# A column for each number of a trial: the window that it starts from, if it proposes another one; the shift in steps,
# or in half the levels; the share of the step, or of the best step for a normal distribution.
_FROM, _BY, _BY_HALVES, _OF, _OF_NORMAL = range(5)
_FROM_BEST, _FROM_MOMENTS = 1, 2


def trials() -> npt.NDArray[np.float32]:
    """The windows to try, in order. In one table they need one call, and the compiler one copy of what it calls."""
    trials: list[tuple[float | np.float32, ...]] = [(0, 0, 0, share, 0) for share in RANGE_SHARES]
    trials += [(0, 0, 0, share, 1) for share in NORMAL_SHARES]
    trials += [(0, shift, 1, _ONE - CUT, 0) for shift in (CUT, -CUT)]
    trials += [(0, shift, 0, share, 0) for around in NEIGHBOURS for shift, share in around]
    trials += [(0, 0, 0, 1, 0)] * REFITS
    table = np.array(trials, np.float32)
    # Windows of one kind all start from the same one.
    kinds = np.cumsum([0, len(RANGE_SHARES), len(NORMAL_SHARES), 2, *map(len, NEIGHBOURS)])
    table[kinds, _FROM] = table[len(table) - REFITS :, _FROM] = _FROM_BEST
    table[kinds[1], _FROM] = _FROM_MOMENTS
    return table


_TRIALS = trials()


def work_size(dim: int) -> int:
    """Return the length of the float32 array `work` for rows of `dim` values."""
    return int(_COLUMNS) + dim * LANES


@helper
def put_columns(values: Any, first: int, count: int, dim: int, work: Any) -> None:
    """Fill in the columns of `count` rows of `values` (flat), from row `first` on, one a line."""
    start, width = np.uintp(first * dim), np.uintp(dim)
    full = count - count % 4
    # Four rows at a time: their values of a column are stored at once.
    for k in range(0, full, 4):
        a = start + np.uintp(k) * width
        for j in range(width):
            line = _COLUMNS + j * _LANES + np.uintp(k)
            work[line] = values[a + j]
            work[line + np.uintp(1)] = values[a + width + j]
            work[line + np.uintp(2)] = values[a + np.uintp(2) * width + j]
            work[line + np.uintp(3)] = values[a + np.uintp(3) * width + j]
    for k in range(full, LANES):
        # Lanes without a row repeat the last row. Their results are not used.
        a = start + np.uintp(k if k < count else count - 1) * width
        for j in range(width):
            work[_COLUMNS + j * _LANES + np.uintp(k)] = values[a + j]


@helper
def _propose_from_moments(dim: int, work: Any) -> None:
    """Propose the window of each row's mean and standard deviation. A deviation of 0 counts as 1."""
    n = np.float32(dim)
    for k in range(_LANES):
        work[_FROM_AT + k] = work[_Z + k] / n
        work[_QQ + k] = _ZERO
    for j in range(np.uintp(dim)):
        for k in range(_LANES):
            off = work[_COLUMNS + j * _LANES + k] - work[_FROM_AT + k]
            work[_QQ + k] += off * off
    for k in range(_LANES):
        deviation = math.sqrt(work[_QQ + k] / n)
        work[_FROM_STEP + k] = deviation if deviation > _ZERO else _ONE


@helper
def _offer_neighbour(shift: Any, share: Any, dim: int, half: Any, work: Any) -> None:
    """Try the windows that are shifted by `shift` steps and have `share` of the step.

    A window gives its row codes. The line of least squares through them is kept if it explains more of the row than
    the best line before.
    """
    n, top = np.float32(dim), half + half
    for k in range(_LANES):
        at = work[_FROM_AT + k] + shift * work[_FROM_STEP + k]
        gain = _ONE / (work[_FROM_STEP + k] * share)
        work[_GAIN + k] = gain
        work[_SHIFT + k] = half - at * gain
        work[_Q + k] = _ZERO
        work[_QQ + k] = _ZERO
        work[_QZ + k] = _ZERO
    # The sums of codes q, counted from the middle one, of their squares, and of q times the values.
    for j in range(np.uintp(dim)):
        line = _COLUMNS + j * _LANES
        for k in range(_LANES):
            z = work[line + k]
            t = z * work[_GAIN + k] + work[_SHIFT + k]
            t = t if t > _ZERO else _ZERO
            t = t if t < top else top
            q = ((t + _ROUNDING) - _ROUNDING) - half
            work[_Q + k] += q
            work[_QQ + k] += q * q
            work[_QZ + k] += q * z
    for k in range(_LANES):
        q = work[_Q + k]
        z = work[_Z + k]
        variance = n * work[_QQ + k] - q * q
        covariance = n * work[_QZ + k] - q * z
        fits = (variance > _ZERO) & (covariance > _ZERO)
        step = covariance / (variance if fits else _ONE)
        explained = covariance * step
        better = fits & (explained > work[EXPLAINED + k])
        work[EXPLAINED + k] = explained if better else work[EXPLAINED + k]
        work[BEST_STEP + k] = step if better else work[BEST_STEP + k]
        work[CENTRE + k] = (z - step * q) / n if better else work[CENTRE + k]


@helper
def search_columns(dim: int, low: Any, factor: Any, levels: int, normal_step: Any, work: Any) -> None:
    """Find the best windows of the rows of `put_columns`, whose columns it maps.

    `low` and `factor` (float32 (LANES,)) map a row's values to [0, levels]. `normal_step` is the best step for a
    normal distribution. The results are EXPLAINED, CENTRE and BEST_STEP, in steps of the row's whole range and
    counted from its middle.
    """
    half = np.float32(levels) * _HALF
    for k in range(_LANES):
        work[_Z + k] = _ZERO
        work[EXPLAINED + k] = _ZERO
        work[CENTRE + k] = _ZERO
        work[BEST_STEP + k] = _ONE
    # The columns are mapped to [-half, half], and the values of each row are summed.
    for j in range(np.uintp(dim)):
        line = _COLUMNS + j * _LANES
        for k in range(_LANES):
            z = (work[line + k] - low[k]) * factor[k] - half
            work[line + k] = z
            work[_Z + k] += z
    for trial in range(_TRIALS.shape[0]):
        if _TRIALS[trial, _FROM] == _FROM_BEST:
            for k in range(_LANES):
                work[_FROM_AT + k] = work[CENTRE + k]
                work[_FROM_STEP + k] = work[BEST_STEP + k]
        elif _TRIALS[trial, _FROM] == _FROM_MOMENTS:
            _propose_from_moments(dim, work)
        shift = _TRIALS[trial, _BY] * (half if _TRIALS[trial, _BY_HALVES] > _ZERO else _ONE)
        share = _TRIALS[trial, _OF] * (normal_step if _TRIALS[trial, _OF_NORMAL] > _ZERO else _ONE)
        _offer_neighbour(shift, share, dim, half, work)


@helper
def squared_errors(
    lines: Any, scale: int, offset: int, factor: Any, levels: int, dim: int, work: Any, error: int
) -> None:
    """Compute the squared errors of the rows of `put_columns` when quantized, in steps of the whole range.

    Scales and offsets are in the lines of `lines` (float64) that begin at `scale` and `offset`; errors go to `error`.
    Codes and values are computed as the encoder and the decoder do.
    """
    top = np.float32(levels)
    for k in range(_LANES):
        step = np.float32(lines[np.uintp(scale) + k])
        work[_FROM_STEP + k] = step
        work[_FROM_AT + k] = np.float32(lines[np.uintp(offset) + k])
        work[_GAIN + k] = _ONE / (step if step > _ZERO else _ONE)
        work[_SHIFT + k] = factor[k]
        work[_QQ + k] = _ZERO
    for j in range(np.uintp(dim)):
        line = _COLUMNS + j * _LANES
        for k in range(_LANES):
            t = (work[line + k] - work[_FROM_AT + k]) * work[_GAIN + k]
            t = t if t > _ZERO else _ZERO
            t = t if t < top else top
            decoded = work[_FROM_STEP + k] * ((t + _ROUNDING) - _ROUNDING) + work[_FROM_AT + k]
            off = (decoded - work[line + k]) * work[_SHIFT + k]
            work[_QQ + k] += off * off
    for k in range(_LANES):
        lines[np.uintp(error) + k] = work[_QQ + k]


@helper
def _window_errors(y: Any, cut: Any, gain: Any, levels: int, error_a: Any, error_b: Any) -> None:
    """Compute the squared errors, in steps, of the windows that begin at bin cut + 1 (a) and at bin cut (b).

    `gain` is levels per bin. The lanes of `y` (dim, LANES) are rows.
    """
    top = np.float32(levels)
    error_a[:] = 0
    error_b[:] = 0
    for j in range(y.shape[0]):
        line = y[j]
        for k in range(LANES):
            b = (line[k] - cut[k]) * gain
            a = b - gain
            clamped_a = a if a > 0 else np.float32(0)
            clamped_a = clamped_a if clamped_a < top else top
            clamped_b = b if b > 0 else np.float32(0)
            clamped_b = clamped_b if clamped_b < top else top
            off_a = np.rint(clamped_a) - a
            off_b = np.rint(clamped_b) - b
            error_a[k] += off_a * off_a
            error_b[k] += off_b * off_b


@helper
def _take_step(step: int, cut: Any, error_a: Any, error_b: Any, best: Any, left: Any, right: Any) -> None:
    """Move each lane to the better of its two windows, and keep the best one so far."""
    for k in range(left.size):
        error = error_b[k]
        if error_a[k] < error:
            error = error_a[k]
            cut[k] += np.float32(1)
        if error < best[k]:
            best[k] = error
            left[k] = np.int32(cut[k])
            right[k] = np.int32(step) - left[k]


@kernel
def greedy_walk(
    values: Any, low: Any, factor: Any, bins: int, steps: int, levels: int, left: Any, right: Any
) -> None:
    """Narrow the range of each row, and write the bins to cut off its ends to `left` and `right`.

    `low` and `factor` (float32 (n,)) map a row's values to [0, bins]. `left` and `right` are int32 (n,), zero at
    first.
    """
    n, dim = values.shape
    y = np.zeros((dim, LANES), np.float32)
    cut = np.zeros(LANES, np.float32)
    best = np.zeros(LANES, np.float32)
    error_a = np.zeros(LANES, np.float32)
    error_b = np.zeros(LANES, np.float32)
    for start in range(0, n, LANES):
        stop = min(start + LANES, n)
        for k in range(stop - start):
            row = values[start + k]
            for j in range(dim):
                y[j, k] = (row[j] - low[start + k]) * factor[start + k]
        cut[:] = 0
        _window_errors(y, cut, np.float32(levels) / np.float32(bins), levels, best, error_b)
        best[:] = error_b * np.float32(bins * bins)
        for step in range(1, steps + 1):
            width = np.float32(bins - step)
            _window_errors(y, cut, np.float32(levels) / width, levels, error_a, error_b)
            error_a *= width * width
            error_b *= width * width
            _take_step(step, cut, error_a, error_b, best, left[start:stop], right[start:stop])
