"""The data and the model of the demo, which stand among the examples."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from movielens import (  # found on the path set above
    BAGS,
    CROSS_ROWS,
    DemoDataError,
    Features,
    Recommender,
    TimeOrderedReader,
    auc,
    find_data,
    load_features,
    new_training,
    predict,
)

__all__ = [
    "BAGS",
    "CROSS_ROWS",
    "DemoDataError",
    "Features",
    "Recommender",
    "TimeOrderedReader",
    "auc",
    "find_data",
    "load_features",
    "new_training",
    "predict",
]
