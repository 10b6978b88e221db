"""What quantized optimizer state costs in accuracy and saves in bytes, on the demo's model and MovieLens-100k.

    python benchmarks/state_bits.py [--steps N] [--restores N] [--seeds N] [--output FOLDER]

One run trains from start to end; the others are stopped at even intervals and go on in a new model from what a store
held, with `state_bits` of 32, 8 and 4. Weights are lossless throughout, so that all that differs is the state's.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adagrad, Adam, Optimizer, SparseAdam

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.demo.data import Features, find_data, load_features
from cnr_store.demo.model import Recommender, auc, new_training, predict
from cnr_store.demo.train import TimeOrderedReader

BATCH = 32
WIDTHS = (32, 8, 4)


@dataclass(frozen=True)
class Run:
    """One run's end. `state_bytes`: what the rows of optimizer state take in its last version; 0 without a store."""

    optimizer: str
    state_bits: int | None
    seed: int
    auc: float
    state_bytes: int


def training(features: Features, optimizer: str, seed: int) -> tuple[Recommender, Sequence[Optimizer]]:
    """The demo's model, and its own Adagrad or Adam."""
    model, adagrad = new_training(features.rows, seed)
    if optimizer == Adagrad.__name__:
        return model, [adagrad]
    tables = [parameter for name, parameter in model.named_parameters() if name.startswith("embed.")]
    return model, [SparseAdam(tables, lr=0.002), Adam(model.top.parameters(), lr=0.002)]


def train(
    model: Recommender, optimizers: Sequence[Optimizer], features: Features, reader: Any, steps: int
) -> None:
    for _ in range(steps):
        samples = next(reader)
        columns = {name: torch.from_numpy(ids[samples]) for name, ids in features.columns.items()}
        loss: Any = binary_cross_entropy_with_logits(
            model(columns), torch.from_numpy(features.labels[samples])
        )
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def run(
    features: Features, optimizer: str, state_bits: int | None, seed: int, steps: int, restores: int
) -> Run:
    """Train all steps, in `restores` + 1 equal parts if there is a width, with a save and a load between them."""
    model, optimizers = training(features, optimizer, seed)
    reader, state_bytes = TimeOrderedReader(features.train, BATCH), 0
    for part in range(restores + 1):
        train(
            model,
            optimizers,
            features,
            reader,
            steps * (part + 1) // (restores + 1) - steps * part // (restores + 1),
        )
        if state_bits is None or part == restores:
            continue
        with tempfile.TemporaryDirectory() as url:
            info = cnr_store.save(url, model, optimizers, policy="full", bits=32, state_bits=state_bits)
            state_bytes = row_state_bytes(url, info.id)
            model, optimizers = training(features, optimizer, seed)
            cnr_store.load(url, model, optimizers)
    held_out = np.arange(features.train, len(features))
    found = auc(features.labels[held_out], predict(model, features, held_out))
    return Run(optimizer, state_bits, seed, found, state_bytes)


def row_state_bytes(url: str, version: str) -> int:
    """Bytes of the objects that hold state beside the rows of a version's tables."""
    catalog = Catalog(open_backend(url))
    record = catalog.record(version)
    manifest = catalog.manifest(record)
    paths = [
        path
        for path, entry in record.arrays.items()
        if entry.kind != "dense" and not path.endswith("/weight")
    ]
    return sum(part.nbytes for path in paths for part in manifest.parts(path).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_500)
    parser.add_argument("--restores", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    features = load_features(find_data(say=print))
    runs = []
    for optimizer in (Adagrad.__name__, SparseAdam.__name__):
        for seed in range(1, options.seeds + 1):
            for state_bits in (None, *WIDTHS):
                one = run(features, optimizer, state_bits, seed, options.steps, options.restores)
                print(
                    f"{one.optimizer:12}{one.state_bits!s:>6}{one.seed:4}{one.auc:9.4f}{one.state_bytes:12,}"
                )
                runs.append(asdict(one))
    document = {
        "settings": {name: getattr(options, name) for name in ("steps", "restores", "seeds")},
        "torch": torch.__version__,
        "machine": platform.machine(),
        "runs": runs,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "state-bits.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
