"""Where decoded rows are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.payload.pending import Pending

Need = npt.NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class Target:
    """Where rows are written. `flat` spans `out` from its first value to its last; rows are `stride` values apart.

    Sums of relative rows are `pending`; None where rows must not be relative.
    """

    out: npt.NDArray[Any]
    need: Need
    first_row: int
    flat: npt.NDArray[Any]
    stride: int
    pending: Pending | None = None
