"""The search for the window, scale times codes, that quantizes a row best; `reference.search` says what it does.

Rows are searched side by side, one a vector lane. All numbers lie in one flat array `work` of lines, LANES
numbers each: one for each sum, then one for each column. One array, and offsets known when this is compiled,
tell the compiler that sums and columns do not overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cnr_codecs.kernels.windows import CUT, NEIGHBOURS, NORMAL_SHARES, RANGE_SHARES, REFITS

LANES = 64
_Q, _QQ, _QZ, _Z, _GAIN, _SHIFT = (line * LANES for line in range(6))
_FROM_AT, _FROM_STEP = (line * LANES for line in range(6, 8))
# What the search leaves: what the best line explains of its row (0: there is none), its centre and step.
EXPLAINED, CENTRE, BEST_STEP = (line * LANES for line in range(8, 11))
_COLUMNS = 11 * LANES
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)


@njit(nogil=True, cache=True, error_model="numpy")
def work_size(dim: int) -> int:
    """Length of the float32 array that `search` works in, for rows of `dim` values."""
    return _COLUMNS + dim * LANES


@njit(nogil=True, cache=True, error_model="numpy")
def search(values: Any, least: Any, factor: Any, levels: int, normal_step: Any, work: Any) -> None:
    """Find the best window of each of up to LANES rows of `values` (float32 (n, dim)).

    `least` and `factor` (float32 (LANES,)) map a row's values to [0, levels]; `normal_step` is the best step
    for a normal distribution. Leaves EXPLAINED, CENTRE and BEST_STEP, in steps of the row's whole range and
    from its middle.
    """
    half = np.float32(levels) * _HALF
    dim = values.shape[1]
    _load(values, least, factor, half, work)
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
def _load(values: Any, least: Any, factor: Any, half: Any, work: Any) -> None:
    """Columns of the rows mapped to [-half, half], and their sums."""
    put_columns(values, work)
    dim = values.shape[1]
    for j in range(dim):
        line = _COLUMNS + j * LANES
        for k in range(LANES):
            work[line + k] = (work[line + k] - least[k]) * factor[k] - half
    for k in range(LANES):
        work[_Z + k] = _ZERO
    for j in range(dim):
        for k in range(LANES):
            work[_Z + k] += work[_COLUMNS + j * LANES + k]


@njit(nogil=True, cache=True, error_model="numpy")
def put_columns(values: Any, work: Any) -> None:
    """Columns of the rows, each a line."""
    count, dim = values.shape
    # Four rows at a time: their values of a column are one store.
    for k in range(0, count - 3, 4):
        a, b, c, d = values[k], values[k + 1], values[k + 2], values[k + 3]
        for j in range(dim):
            line = _COLUMNS + j * LANES + k
            work[line] = a[j]
            work[line + 1] = b[j]
            work[line + 2] = c[j]
            work[line + 3] = d[j]
    for k in range(count - count % 4, LANES):
        # Lanes without a row see the last one: nothing that they find is used.
        row = values[min(k, count - 1)]
        for j in range(dim):
            work[_COLUMNS + j * LANES + k] = row[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _propose_from_moments(dim: int, work: Any) -> None:
    """Mean and standard deviation of each row; 1 for a deviation of 0."""
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
    """Try the windows `shift` steps aside, with `share` of the step; keep what explains more of its row.

    What is kept is not the window, but the line of least squares through the codes that it gives.
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
    """Sums of the codes q, counted from the middle one, of their squares, and of q times the values."""
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
    """Leave in `error` what quantizing the rows of `put_columns` with these does to them, in steps of the whole range.

    Codes and values are computed as encoder and decoder compute them.
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
