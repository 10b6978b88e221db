"""Numbers of column shards that are split or joined are made of those that they come from, and of no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cnr_store.training.loading.row_fill import Blended, Target


def test_numbers_that_are_not_finite_stay_in_their_columns() -> None:
    reader: Any = SimpleNamespace(dtype=np.dtype(np.float32), columns=4)
    weights = np.array([[1, 1, 0, 0.5], [0, 0, 1, 0.5]])
    fill = Blended(reader, Target(0, 3, ()), None, weights)
    stored = np.array([[np.inf, 2], [1, np.nan], [1, 3]], np.float32)
    expected = np.array([[np.inf, np.inf, 2, np.inf], [1, 1, np.nan, np.nan], [1, 1, 3, 2]], np.float32)
    np.testing.assert_array_equal(fill.made_of(stored), expected)
