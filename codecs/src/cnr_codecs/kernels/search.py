"""Searches for the line that quantizes a row best. `uniform.reference.search` defines the search.

Rows are searched side by side, one in each vector lane. All numbers are in one flat array `work` of lines of LANES
numbers: one line for each sum, then one for each column. One array with constant offsets tells the compiler that sums
and columns do not overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.windows import CUT, NEIGHBOURS, NORMAL_SHARES, RANGE_SHARES, REFITS

LANES = 64
_Q, _QQ, _QZ, _Z, _GAIN, _SHIFT = (line * LANES for line in range(6))
_FROM_AT, _FROM_STEP = (line * LANES for line in range(6, 8))
# The results: how much of its row the best line explains (0: there is no line), its centre and its step.
EXPLAINED, CENTRE, BEST_STEP = (line * LANES for line in range(8, 11))
_COLUMNS = 11 * LANES
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)


@njit(nogil=True, cache=True, error_model="numpy")
def work_size(dim: int) -> int:
    """Return the length of the float32 array `work` for rows of `dim` values."""
    return _COLUMNS + dim * LANES


@njit(nogil=True, cache=True, error_model="numpy")
def search(values: Any, low: Any, factor: Any, levels: int, normal_step: Any, work: Any) -> None:
    """Find the best window of each of up to LANES rows of `values` (float32 (n, dim)).

    `low` and `factor` (float32 (LANES,)) map a row's values to [0, levels]. `normal_step` is the best step for a
    normal distribution. The results are EXPLAINED, CENTRE and BEST_STEP, in steps of the row's whole range and
    counted from its middle.
    """
    half = np.float32(levels) * _HALF
    dim = values.shape[1]
    _load(values, low, factor, half, work)
    for k in range(LANES):
        work[EXPLAINED + k] = _ZERO
        work[CENTRE + k] = _ZERO
        work[BEST_STEP + k] = _ONE
    _propose_from_best(work)
    for share in RANGE_SHARES:
        _offer_neighbour(_ZERO, share, dim, half, work)
    _propose_from_moments(dim, work)
    for share in NORMAL_SHARES:
        _offer_neighbour(_ZERO, share * normal_step, dim, half, work)
    _propose_from_best(work)
    _offer_neighbour(CUT * half, _ONE - CUT, dim, half, work)
    _offer_neighbour(-CUT * half, _ONE - CUT, dim, half, work)
    for around in NEIGHBOURS:
        _propose_from_best(work)
        for shift, share in around:
            _offer_neighbour(shift, share, dim, half, work)
    for _ in range(REFITS):
        _propose_from_best(work)
        _offer_neighbour(_ZERO, _ONE, dim, half, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _propose_from_best(work: Any) -> None:
    for k in range(LANES):
        work[_FROM_AT + k] = work[CENTRE + k]
        work[_FROM_STEP + k] = work[BEST_STEP + k]


@njit(nogil=True, cache=True, error_model="numpy")
def _load(values: Any, low: Any, factor: Any, half: Any, work: Any) -> None:
    """Fill in the columns of the rows, mapped to [-half, half], and the sums of the rows."""
    put_columns(values, work)
    dim = values.shape[1]
    for j in range(dim):
        line = _COLUMNS + j * LANES
        for k in range(LANES):
            work[line + k] = (work[line + k] - low[k]) * factor[k] - half
    for k in range(LANES):
        work[_Z + k] = _ZERO
    for j in range(dim):
        for k in range(LANES):
            work[_Z + k] += work[_COLUMNS + j * LANES + k]


@njit(nogil=True, cache=True, error_model="numpy")
def put_columns(values: Any, work: Any) -> None:
    """Fill in the columns of the rows, one a line."""
    count, dim = values.shape
    # Four rows at a time: their values of a column are stored at once.
    for k in range(0, count - 3, 4):
        a, b, c, d = values[k], values[k + 1], values[k + 2], values[k + 3]
        for j in range(dim):
            line = _COLUMNS + j * LANES + k
            work[line] = a[j]
            work[line + 1] = b[j]
            work[line + 2] = c[j]
            work[line + 3] = d[j]
    for k in range(count - count % 4, LANES):
        # Lanes without a row repeat the last row. Their results are not used.
        row = values[min(k, count - 1)]
        for j in range(dim):
            work[_COLUMNS + j * LANES + k] = row[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _propose_from_moments(dim: int, work: Any) -> None:
    """Propose the window of each row's mean and standard deviation. A deviation of 0 counts as 1."""
    n = np.float32(dim)
    for k in range(LANES):
        work[_FROM_AT + k] = work[_Z + k] / n
        work[_QQ + k] = _ZERO
    for j in range(dim):
        for k in range(LANES):
            off = work[_COLUMNS + j * LANES + k] - work[_FROM_AT + k]
            work[_QQ + k] += off * off
    for k in range(LANES):
        deviation = np.sqrt(work[_QQ + k] / n)
        work[_FROM_STEP + k] = deviation if deviation > _ZERO else _ONE


@njit(nogil=True, cache=True, error_model="numpy")
def _offer_neighbour(shift: Any, share: Any, dim: int, half: Any, work: Any) -> None:
    """Try the windows that are shifted by `shift` steps and have `share` of the step.

    A window gives its row codes. The line of least squares through them is kept if it explains more of the row than
    the best line before.
    """
    n = np.float32(dim)
    for k in range(LANES):
        at = work[_FROM_AT + k] + shift * work[_FROM_STEP + k]
        gain = _ONE / (work[_FROM_STEP + k] * share)
        work[_GAIN + k] = gain
        work[_SHIFT + k] = half - at * gain
    _sum_codes(dim, half, work)
    for k in range(LANES):
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


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_codes(dim: int, half: Any, work: Any) -> None:
    """Sum the codes q, counted from the middle one, their squares, and q times the values."""
    top = half + half
    for k in range(LANES):
        work[_Q + k] = _ZERO
        work[_QQ + k] = _ZERO
        work[_QZ + k] = _ZERO
    for j in range(dim):
        line = _COLUMNS + j * LANES
        for k in range(LANES):
            z = work[line + k]
            t = z * work[_GAIN + k] + work[_SHIFT + k]
            t = t if t > _ZERO else _ZERO
            t = t if t < top else top
            q = np.rint(t) - half
            work[_Q + k] += q
            work[_QQ + k] += q * q
            work[_QZ + k] += q * z


@njit(nogil=True, cache=True, error_model="numpy")
def squared_errors(
    scale: Any, offset: Any, factor: Any, levels: int, dim: int, work: Any, error: Any
) -> None:
    """Compute the squared errors of the rows of `put_columns` when quantized, in steps of the whole range.

    Codes and values are computed as the encoder and the decoder do.
    """
    top = np.float32(levels)
    for k in range(LANES):
        step = np.float32(scale[k])
        work[_FROM_STEP + k] = step
        work[_FROM_AT + k] = np.float32(offset[k])
        work[_GAIN + k] = _ONE / (step if step > _ZERO else _ONE)
        work[_SHIFT + k] = factor[k]
        work[_QQ + k] = _ZERO
    for j in range(dim):
        line = _COLUMNS + j * LANES
        for k in range(LANES):
            t = (work[line + k] - work[_FROM_AT + k]) * work[_GAIN + k]
            t = t if t > _ZERO else _ZERO
            t = t if t < top else top
            decoded = work[_FROM_STEP + k] * np.rint(t) + work[_FROM_AT + k]
            off = (decoded - work[line + k]) * work[_SHIFT + k]
            work[_QQ + k] += off * off
    for k in range(LANES):
        error[k] = work[_QQ + k]
