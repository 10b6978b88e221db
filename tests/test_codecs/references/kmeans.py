"""k-means in readable numpy. The kernels compute the same bit for bit, which tests check.

The sets of values are the sorted rows of `ordered`, float32 (n, size), finite. Clusters are given by their
beginnings, int64 (n, clusters + 1), as in `cnr_codecs.kernels.kmeans`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_codecs.kernels.kmeans import PIECE_MASK, PIECES

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Cuts = npt.NDArray[np.int64]


def _centred(ordered: Float32s) -> tuple[Float64s, Float64s]:
    """Return the values less their median, (n, size), and their sums from the median outwards."""
    z = ordered.astype(np.float64) - ordered[:, [ordered.shape[1] // 2]].astype(np.float64)
    return z, _outward_sums(z)


def _outward_sums(values: Float64s) -> Float64s:
    """Return (n, size + 1) sums. The difference of two is the sum of the values between them."""
    half = values.shape[1] // 2
    below = -np.cumsum(values[:, :half][:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([below, np.zeros((len(values), 1)), np.cumsum(values[:, half:], axis=1)], axis=1)


def lloyd_cuts(ordered: Float32s, clusters: int, iterations: int) -> Cuts:
    """Cut sets into pieces of equal shares of values and gaps, merge these as Ward does, iterate as Lloyd does."""
    z, total = _centred(ordered)
    count = min(z.shape[1], PIECES * clusters)
    cuts = _merged(z, total, _pieces(z, count), clusters)
    beyond = np.full((len(z), max(0, clusters - count)), z.shape[1])
    cuts = np.concatenate([cuts, beyond], axis=1)
    for _ in range(iterations):
        mean = _means(z, total, cuts)
        middle = (mean[:, :-1] + mean[:, 1:]) / 2
        cuts[:, 1:-1] = (z[:, None, :] <= middle[:, :, None]).sum(axis=2)
    return cuts


def _pieces(z: Float64s, count: int) -> Cuts:
    n, size = z.shape
    if count == size:
        return np.tile(np.arange(size + 1), (n, 1))
    roots = np.concatenate([np.zeros((n, 1)), np.sqrt(np.diff(z, axis=1))], axis=1)
    share = np.cumsum(roots, axis=1)
    gaps = share[:, -1:]
    by_rank = np.arange(size) / size
    mass = by_rank + np.where(gaps > 0, share / np.where(gaps > 0, gaps, 1), by_rank)
    limits = 2 * np.arange(1, count) / count
    inner = (mass[:, None, :] < limits[:, None]).sum(axis=2)
    return np.concatenate([np.zeros((n, 1), np.int64), inner, np.full((n, 1), size)], axis=1)


def _merged(z: Float64s, total: Float64s, cuts: Cuts, clusters: int) -> Cuts:
    """Remove cuts, the cheapest first, until clusters + 1 are left."""
    size = z.shape[1]
    names = np.tile(np.arange(cuts.shape[1]), (len(cuts), 1))
    while cuts.shape[1] > clusters + 1:
        first, middle, end = (np.take_along_axis(total, cuts[:, a:b], 1) for a, b in _NEIGHBOURS)
        left = (cuts[:, 1:-1] - cuts[:, :-2]).astype(np.float64)
        right = (cuts[:, 2:] - cuts[:, 1:-1]).astype(np.float64)
        apart = (middle - first) * right - (end - middle) * left
        weight = left * right * (left + right)
        low, high = (
            np.take_along_axis(z, np.clip(at, 0, size - 1), 1) for at in (cuts[:, :-2], cuts[:, 2:] - 1)
        )
        costs = (weight > 0) & (low < high)
        cost = np.where(costs, apart * apart / np.where(costs, weight, 1), 0)
        key = (cost.view(np.int64) & ~PIECE_MASK) | names[:, 1:-1]
        out = 1 + key.argmin(axis=1)
        keep = np.arange(cuts.shape[1]) != out[:, None]
        cuts, names = (each[keep].reshape(len(cuts), -1) for each in (cuts, names))
    return cuts


_NEIGHBOURS = ((None, -2), (1, -1), (2, None))


def _means(z: Float64s, total: Float64s, cuts: Cuts) -> Float64s:
    own = np.diff(np.take_along_axis(total, cuts, 1), axis=1)
    counts = np.diff(cuts, axis=1)
    instead = np.take_along_axis(z, np.minimum(cuts[:, :-1], z.shape[1] - 1), 1)
    return np.maximum.accumulate(np.where(counts > 0, own / np.maximum(counts, 1), instead), axis=1)


def exact_cuts(ordered: Float32s, clusters: int) -> Cuts:
    """Return the clusters of least squared error, found by dynamic programming over ends."""
    z, total = _centred(ordered)
    squares = _outward_sums(z * z)
    n, size = z.shape
    used = min(clusters, size)
    best = np.zeros((n, size + 1))
    for end in range(1, size + 1):
        best[:, end] = _errors(z, total, squares, np.arange(1), end)[:, 0]
    begins = []
    for c in range(1, used):
        first, last = size if c == used - 1 else c + 1, size - (used - 1 - c)
        best, begin = _extended(z, total, squares, best, c, first, last)
        begins.append(begin)
    cuts = np.full((n, clusters + 1), size)
    for c in range(used - 1, 0, -1):
        cuts[:, c] = np.take_along_axis(begins[c - 1], cuts[:, [c + 1]], 1)[:, 0]
    cuts[:, 0] = 0
    return cuts


def _errors(z: Float64s, total: Float64s, squares: Float64s, i: npt.NDArray[np.intp], end: int) -> Float64s:
    """Return the squared errors, (n, len(i)), of values i to end - 1 about their means."""
    own = total[:, [end]] - total[:, i]
    error = np.maximum(squares[:, [end]] - squares[:, i] - own * own * (1 / (end - i)), 0)
    return np.where(z[:, i] == z[:, [end - 1]], 0, error)


def _extended(
    z: Float64s, total: Float64s, squares: Float64s, before: Float64s, least: int, first: int, last: int
) -> tuple[Float64s, Cuts]:
    """Return the error of each end with one more cluster, and where it begins. Middle ends are computed first."""
    best, begin = np.zeros_like(before), np.zeros(before.shape, np.int64)
    step = 1 << ((last - first + 1).bit_length() - 1)
    while step >= 1:
        for end in range(first + step - 1, last + 1, 2 * step):
            i = np.arange(least, end)
            error = before[:, i] + _errors(z, total, squares, i, end)
            low = begin[:, [end - step]] if end - step >= first else least
            high = begin[:, [end + step]] if end + step <= last else end - 1
            error = np.where((i >= low) & (i <= high), error, np.inf)
            begin[:, end] = least + error.argmin(axis=1)
            best[:, end] = error.min(axis=1)
        step //= 2
    return best, begin


def cluster_means(ordered: Float32s, cuts: Cuts) -> tuple[Float64s, Float64s, Float64s]:
    """Return (means (n, clusters), squared errors (n,), sums of squares about the median (n,))."""
    n, size = ordered.shape
    z = ordered.astype(np.float64)
    counts = np.diff(cuts, axis=1)
    cluster = (np.arange(size) >= cuts[:, 1:, None]).sum(axis=1)
    sums = np.zeros(counts.shape)
    rows = np.arange(n)
    # Values are added one by one, as the kernel does: the order decides the last bit.
    for j in range(size):
        sums[rows, cluster[:, j]] += z[:, j]
    instead = np.take_along_axis(z, np.minimum(cuts[:, :-1], size - 1), 1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), instead)
    off = z - np.take_along_axis(means, cluster, 1)
    far = z - z[:, [size // 2]]
    return means, np.cumsum(off * off, axis=1)[:, -1], np.cumsum(far * far, axis=1)[:, -1]


def nearest(values: Float32s, codebooks: Float32s) -> npt.NDArray[np.uint8]:
    """Return codes (n, dim) of the nearest centroids in each row's codebook (n, codes), the lower one in a tie."""
    wide = codebooks.astype(np.float64)
    middle = (wide[:, :-1] + wide[:, 1:]) / 2
    codes: npt.NDArray[np.uint8] = (values[:, None, :] > middle[:, :, None]).sum(axis=1, dtype=np.uint8)
    return codes
