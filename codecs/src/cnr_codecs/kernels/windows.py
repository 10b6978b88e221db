"""The windows that the default search for a row's range tries: not the greedy walk of `walk`."""

from __future__ import annotations

from typing import Final

import numpy as np

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
