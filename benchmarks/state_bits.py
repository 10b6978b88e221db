"""What quantized optimizer state costs in accuracy and saves in bytes, on the demo's model and MovieLens-100k.

    python benchmarks/state_bits.py [--quick] [--steps N] [--restores N] [--seeds N] [--out FOLDER]

One run trains from start to end; the others are stopped at even intervals and go on in a new model from what a store
held, with `state_bits` of 32, 8, 4 and floating grids. Weights are lossless throughout, so that all that differs is the
state's. Then come the bits a value of each width, of the rows that were trained.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adagrad, Adam, Optimizer, SparseAdam

import cnr_store
from benchmarks.codec_bench.movielens import (
    Features,
    Recommender,
    TimeOrderedReader,
    auc,
    find_data,
    load_features,
    new_training,
    predict,
)
from cnr_backends import open_backend
from cnr_codecs import FloatingRows, LosslessRows, RowCodec
from cnr_store.catalog.catalog import Catalog
from cnr_store.training.saving.never_below_codec import CeilingRows

BATCH = 32
WIDTHS = (32, 8, 4, "m3", "m1")
CODECS: dict[int | str, RowCodec] = {32: LosslessRows(), 8: CeilingRows(8), 4: CeilingRows(4)}
CODECS |= {f"m{bits}": FloatingRows(bits) for bits in range(1, 8)}
LEAST_VALUES = 1 << 15


@dataclass(frozen=True)
class Run:
    """One run's end. `state_bytes`: what the rows of optimizer state take in its last version; 0 without a store."""

    optimizer: str
    state_bits: int | str | None
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
    features: Features, optimizer: str, state_bits: int | str | None, seed: int, steps: int, restores: int
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


def sizes(features: Features, optimizer: str, steps: int) -> Iterator[dict[str, Any]]:
    """Bits a value of each width, by slot: of the rows of large tables that were trained."""
    model, optimizers = training(features, optimizer, 1)
    train(model, optimizers, features, TimeOrderedReader(features.train, BATCH), steps)
    tables = [parameter for parameter in model.parameters() if parameter.numel() >= LEAST_VALUES]
    states = [each.state[table] for each in optimizers for table in tables if table in each.state]
    for slot in sorted(key for key, value in states[0].items() if torch.is_tensor(value) and value.ndim == 2):
        arrays = [state[slot].numpy() for state in states]
        trained = [np.ascontiguousarray(values[values.any(axis=1)]) for values in arrays]
        count = sum(values.size for values in trained)
        for width, codec in CODECS.items():
            payloads = [codec.encode_rows(each, None, len(each), element="float32") for each in trained]
            bits = 8 * sum(map(len, payloads)) / count
            print(f"{optimizer:12}{slot:12}{width!s:>4}{bits:7.2f} bits a value of {count:,}")
            line = {"optimizer": optimizer, "slot": slot, "state_bits": width}
            yield line | {"values": count, "bits_a_value": bits}


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
    parser.add_argument(
        "--quick", action="store_true", help="few steps, one restore and seed: to see that it runs"
    )
    parser.add_argument("--steps", type=int, default=2_500)
    parser.add_argument("--restores", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.restores, options.seeds = 200, 1, 1
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
    names = Adagrad.__name__, SparseAdam.__name__
    document = {
        "settings": {name: getattr(options, name) for name in ("steps", "restores", "seeds")},
        "torch": torch.__version__,
        "machine": platform.machine(),
        "runs": runs,
        "sizes": [line for name in names for line in sizes(features, name, options.steps)],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "state-bits.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
