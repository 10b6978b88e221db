"""Rows to encode: drawn from distributions, and tables that were trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from benchmarks.codec_bench.movielens import (
    DemoDataError,
    Features,
    Recommender,
    find_data,
    load_features,
    new_training,
)

Rows = npt.NDArray[np.float32]
Draw = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]

DRAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(0, 0.1, shape),
    "laplace": lambda rng, shape: rng.laplace(0, 0.1, shape),
    "uniform": lambda rng, shape: rng.uniform(-0.1, 0.1, shape),
    "heavy-tailed": lambda rng, shape: 0.1 * rng.standard_t(3, shape),
}
DIMS = (16, 64, 128)
_BATCH = 512
_BLOCK_ROWS = 1 << 14
_TABLES = ("item_hour", "item_occupation", "user", "item")


def drawn(name: str, count: int, dim: int) -> Rows:
    """(count, dim) rows of a distribution, the same every time. None comes twice, which a compressor would find."""
    rng, rows = np.random.default_rng(20261121), np.empty((count, dim), np.float32)
    for first in range(0, count, _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS]
        block[:] = DRAWS[name](rng, block.shape)
    return rows


def trained(epochs: int) -> tuple[dict[str, Rows], str]:
    """Tables of the demo's model after `epochs` over MovieLens-100k, by name; and why there are none, or nothing.

    Only rows that occur in training are kept.
    """
    try:
        features = load_features(find_data())
    except DemoDataError as error:
        return {}, str(error)
    model = _train(features, epochs)
    tables = {}
    for name in _TABLES:
        weight = model.state_dict()[f"embed.{name}.weight"].numpy()
        seen = np.unique(features.columns[name][: features.train])
        tables[f"movielens {name}"] = np.ascontiguousarray(weight[seen])
    return {name: rows for name, rows in tables.items() if len(rows) >= 100}, ""


def _train(features: Features, epochs: int) -> Recommender:
    model, optimizer = new_training(features.rows, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(features.train), features.train // _BATCH):
            columns = {name: torch.from_numpy(ids[batch]) for name, ids in features.columns.items()}
            labels = torch.from_numpy(features.labels[batch])
            loss = functional.binary_cross_entropy_with_logits(model(columns), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
    return model
