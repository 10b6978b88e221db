"""The paper's greedy walk, of codecs with `bins` or `ratio`, narrows a row's range bin by bin."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel

# Rows that walk side by side, one in each vector lane. Each lane sums its error in the order of the columns.
LANES = 64


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
