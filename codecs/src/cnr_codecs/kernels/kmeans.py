"""k-means in one dimension, on sorted values: where the clusters begin, their means, and codes.

A *set* is the sorted values that share a codebook: those of a row, or of a group of rows. Row s of `ordered` (float32
(sets, width), finite) is a set of `sizes[s]` (int64, at least 1) values; the rest of the row is ignored. `cuts` (int64
(sets, clusters + 1)) says where clusters begin: cluster c has the values cuts[c] to cuts[c + 1] - 1, and may be empty.
The loops use `z`, the values less the set's median as float64, and `total`, their sums from the median outwards, so
that neither a large offset nor a far outlier costs the other values precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import helper, kernel
from cnr_codecs.kernels.pack import pack_block

# Pieces that a set is cut into, for each cluster that they are merged to.
PIECES = 3
# The lowest bits of a key of `_merge` number its piece. There are at most 768 pieces.
PIECE_MASK = np.int64(0x3FF)
_NEVER = np.int64(0x7FFFFFFFFFFFFFFF)


@helper
def _sum_outwards(values: Any, size: int, total: Any) -> None:
    """Compute sums such that total[b] - total[a] is the sum of values a to b - 1."""
    half = size // 2
    total[half] = 0
    for j in range(half, size):
        total[j + 1] = total[j] + values[j]
    for j in range(half - 1, -1, -1):
        total[j] = total[j + 1] - values[j]


@helper
def _centre(row: Any, size: int, z: Any, total: Any) -> None:
    middle = np.float64(row[size // 2])
    for j in range(size):
        z[j] = np.float64(row[j]) - middle
    _sum_outwards(z, size, total)


@helper
def _cut_pieces(z: Any, size: int, count: int, pieces: Any) -> None:
    """Cut a set into `count` pieces, which have equal shares of its values and of its gaps' square roots.

    Shares of values alone would make one piece of each tail. Shares of gaps alone would give most pieces to a far
    outlier.
    """
    if count == size:
        for j in range(size + 1):
            pieces[j] = j
        return
    gaps = 0.0
    for j in range(1, size):
        gaps += np.sqrt(z[j] - z[j - 1])
    pieces[0] = 0
    piece = 1
    share = 0.0
    for j in range(size):
        if j > 0:
            share += np.sqrt(z[j] - z[j - 1])
        mass = j / size + (share / gaps if gaps > 0 else j / size)
        while piece < count and mass >= 2 * piece / count:
            pieces[piece] = j
            piece += 1
    pieces[piece : count + 1] = size


@helper
def _merge_cost(z: Any, total: Any, first: int, middle: int, end: int) -> Any:
    """Return what merging two adjacent pieces adds to the squared error: 0 if one is empty or all are equal."""
    left = np.float64(middle - first)
    right = np.float64(end - middle)
    apart = (total[middle] - total[first]) * right - (total[end] - total[middle]) * left
    weight = left * right * (left + right)
    # Rounding must not make equal values seem apart. An early return would be slower than dividing by infinity.
    merges = (weight > 0) & (z[first] < z[end - 1])
    return apart * apart / (weight if merges else np.inf)


@helper
def _merge(
    z: Any, total: Any, pieces: Any, count: int, clusters: int, links: Any, cost: Any, key: Any
) -> None:
    """Merge the two adjacent pieces that cost least, the first of equals, until `clusters` are left.

    `key` views the costs as integers, which sort alike, and their lowest bits number the piece. So one pass of
    integer minima, which vectorizes, finds the least cost and its piece.
    """
    before, after = links[0], links[1]
    key[0] = _NEVER
    for i in range(count + 1):
        before[i] = i - 1
        after[i] = i + 1
    for i in range(1, count):
        cost[i] = _merge_cost(z, total, pieces[i - 1], pieces[i], pieces[i + 1])
        key[i] = (key[i] & ~PIECE_MASK) | i
    for _ in range(count - clusters):
        least = _NEVER
        for i in range(count):
            least = min(least, key[i])
        gone = least & PIECE_MASK
        key[gone] = _NEVER
        a, b = before[gone], after[gone]
        after[a] = b
        before[b] = a
        if a > 0:
            cost[a] = _merge_cost(z, total, pieces[before[a]], pieces[a], pieces[b])
            key[a] = (key[a] & ~PIECE_MASK) | a
        if b < count:
            cost[b] = _merge_cost(z, total, pieces[a], pieces[b], pieces[after[b]])
            key[b] = (key[b] & ~PIECE_MASK) | b
    i = 0
    for c in range(clusters + 1):
        pieces[c] = pieces[i]
        i = after[i]


@helper
def _lloyd(z: Any, total: Any, size: int, iterations: int, mean: Any, cuts: Any) -> None:
    """Compute means from cuts, and cuts from midpoints of means. A value on a midpoint is in the lower cluster."""
    for _ in range(iterations):
        for c in range(mean.size):
            first, end = cuts[c], cuts[c + 1]
            # An empty cluster takes the next value as its mean, which keeps the means in order. `max` keeps
            # the order where differences of sums are not exact.
            own = (total[end] - total[first]) / (end - first) if end > first else z[min(first, size - 1)]
            mean[c] = max(own, mean[c - 1]) if c > 0 else own
        moved = False
        for c in range(1, mean.size):
            middle = (mean[c - 1] + mean[c]) / 2
            cut = cuts[c]
            while cut < size and z[cut] <= middle:
                cut += 1
            while cut > 0 and z[cut - 1] > middle:
                cut -= 1
            moved = moved or cut != cuts[c]
            cuts[c] = cut
        if not moved:
            return


@helper
def _error(z: Any, total: Any, squares: Any, shares: Any, first: int, end: int) -> Any:
    """Return the squared error of values `first` to end - 1 about their mean. Rounding never makes it negative."""
    if z[first] == z[end - 1]:
        return 0.0
    own = total[end] - total[first]
    return max(squares[end] - squares[first] - own * own * shares[end - first], 0.0)


@helper
def _extend(
    z: Any,
    total: Any,
    squares: Any,
    shares: Any,
    before: Any,
    best: Any,
    begin: Any,
    least: int,
    first: int,
    last: int,
) -> None:
    """Add a cluster: find, for each end `first` to `last`, where it begins, `least` or later, and the error.

    Later ends have later beginnings, so the beginnings found at a coarse step bound those between.
    """
    step = 1
    while 2 * step <= last - first + 1:
        step *= 2
    while step >= 1:
        for end in range(first + step - 1, last + 1, 2 * step):
            low: Any = least
            high: Any = end - 1
            if end - step >= first:
                low = begin[end - step]
            if end + step <= last:
                high = min(high, begin[end + step])
            lowest = np.inf
            found: Any = low
            for i in range(low, high + 1):
                error = before[i] + _error(z, total, squares, shares, i, end)
                if error < lowest:
                    lowest = error
                    found = i
            best[end] = lowest
            begin[end] = found
        step //= 2


@kernel
def lloyd_cuts(ordered: Any, sizes: Any, iterations: int, cuts: Any) -> None:
    """Merge adjacent pieces as Ward does, then iterate as Lloyd does, until no cut moves or `iterations` times."""
    clusters = cuts.shape[1] - 1
    most_pieces = PIECES * clusters
    z = np.empty(ordered.shape[1])
    total = np.empty(ordered.shape[1] + 1)
    mean = np.empty(clusters)
    pieces = np.empty(most_pieces + 1, np.int64)
    links = np.empty((2, most_pieces + 1), np.int64)
    cost = np.empty(most_pieces)
    for s in range(sizes.size):
        size = sizes[s]
        _centre(ordered[s], size, z, total)
        count = min(size, most_pieces)
        _cut_pieces(z, size, count, pieces)
        if count > clusters:
            _merge(z, total, pieces, count, clusters, links, cost, cost.view(np.int64))
        for c in range(clusters + 1):
            cuts[s, c] = pieces[c] if c <= count else size
        _lloyd(z, total, size, iterations, mean, cuts[s])


@kernel
def exact_cuts(ordered: Any, sizes: Any, cuts: Any) -> None:
    """Find the clusters of least squared error by dynamic programming in O(clusters * size * log(size)).

    `best[j]` is the least squared error of the first j values in as many clusters as there were rounds.
    """
    width = ordered.shape[1]
    clusters = cuts.shape[1] - 1
    z = np.empty(width)
    total = np.empty(width + 1)
    squares = np.empty(width + 1)
    shares = np.ones(width + 1)
    shares[1:] = 1 / np.arange(1, width + 1)
    best = np.empty((2, width + 1))
    begin = np.zeros((clusters, width + 1), np.int32)
    for s in range(sizes.size):
        size = sizes[s]
        _centre(ordered[s], size, z, total)
        used = min(clusters, size)
        _sum_outwards(z * z, size, squares)
        for j in range(1, size + 1):
            best[0, j] = _error(z, total, squares, shares, 0, j)
        for c in range(1, used):
            # The last round is needed for the last end alone.
            first = size if c == used - 1 else c + 1
            last = size - (used - 1 - c)
            _extend(z, total, squares, shares, best[(c - 1) % 2], best[c % 2], begin[c], c, first, last)
        cuts[s, used:] = size
        for c in range(used - 1, 0, -1):
            cuts[s, c] = begin[c, cuts[s, c + 1]]
        cuts[s, 0] = 0


@kernel
def cluster_means(ordered: Any, sizes: Any, cuts: Any, mean: Any, error: Any, spread: Any) -> None:
    """Compute clusters' means (float64 (sets, clusters)), sets' squared errors, and squares about their medians.

    An empty cluster takes the next value, or the last. Each cluster's values are summed in order: differences of
    running sums would lose small clusters that follow large values.
    """
    for s in range(sizes.size):
        middle = np.float64(ordered[s, sizes[s] // 2])
        error[s] = 0
        spread[s] = 0
        for c in range(mean.shape[1]):
            first, end = cuts[s, c], cuts[s, c + 1]
            if end <= first:
                mean[s, c] = ordered[s, min(first, sizes[s] - 1)]
                continue
            own = 0.0
            for j in range(first, end):
                own += ordered[s, j]
            own /= end - first
            mean[s, c] = own
            for j in range(first, end):
                off = ordered[s, j] - own
                far = ordered[s, j] - middle
                error[s] += off * off
                spread[s] += far * far


@kernel
def assign_pack(values: Any, order: Any, book: Any, thresholds: Any, bits: int, out: Any) -> None:
    """Pack the codes of the rows `order` of `values` (float32 (n, dim)) into `out` (uint8, flat).

    A value's code is the number of thresholds (float32 (codebooks, 2**bits - 1)) below it. `book` numbers the codebook
    of each of the rows.
    """
    dim = values.shape[1]
    width = (dim * bits + 7) // 8
    codes = np.zeros((dim + 3) // 4 * 4, np.uint8)
    for i in range(order.size):
        row = values[order[i]]
        limits = thresholds[book[i]]
        codes[:] = 0
        for c in range(limits.size):
            limit = limits[c]
            for j in range(row.size):
                codes[j] += np.uint8(row[j] > limit)
        pack_block(codes, 1, dim, bits, out, i * width)
