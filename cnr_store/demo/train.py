"""The training process of the demo: `python -m cnr_store.demo.train`, its configuration on standard input.

It knows nothing of being killed: it loads the newest version if there is one, and trains on to the last step.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cnr_backends import Backend, BackendError
from cnr_codecs import CodecError
from cnr_store.demo.config import Event, Failed, Finished, Saved, Started, Step, TrainConfig, event_line
from cnr_store.demo.data import Features, load_features
from cnr_store.demo.metrics import auc, log_loss
from cnr_store.demo.model import Recommender, new_training
from cnr_store.demo.reader import TimeOrderedReader
from cnr_store.errors import CheckpointError, EmptyStoreError
from cnr_store.training.checkpointer import Checkpointer

_HELD_OUT_BATCH = 4_096


class TrainingRun:
    """Model, optimizer and reader of one run, told what to do by a `TrainConfig`."""

    def __init__(self, config: TrainConfig, emit: Callable[[Event], object]) -> None:
        self._config = config
        self._emit = emit
        self._features = load_features(Path(config.data))
        self._model, self._optimizer = new_training(self._features.rows, config.seed)
        self._reader = TimeOrderedReader(self._features.train, config.batch)
        self._train_seconds = 0.0

    def run(self, store: str | Backend | None) -> None:
        """Train to the last step, with checkpoints in `store` if there is one."""
        if store is None:
            self._emit(Started(0, None, 0.0))
            self._train(0, self._config.steps)
        else:
            with Checkpointer(
                store,
                self._model,
                self._optimizer,
                policy=self._config.policy,
                bits=self._config.bits,
                storage_options=None if isinstance(store, Backend) else self._config.storage_options,
            ) as checkpointer:
                self._run_with_checkpoints(checkpointer)
        self._finish()

    def _run_with_checkpoints(self, checkpointer: Checkpointer) -> None:
        config, pending = self._config, None
        step = self._resume(checkpointer)
        while step < config.steps:
            stop = min(step - step % config.every + config.every, config.steps)
            self._train(step, stop)
            step = stop
            begun = time.perf_counter()
            if pending is not None:
                pending.result()
            waited = time.perf_counter() - begun
            pending = checkpointer.save(step, reader=self._reader, metadata={"run": "cnr demo"})
            self._emit(Saved(step, waited + pending.stall_seconds))
        if pending is not None:
            pending.result()

    def _resume(self, checkpointer: Checkpointer) -> int:
        begun = time.perf_counter()
        try:
            restored = checkpointer.load()
        except EmptyStoreError:
            self._emit(Started(0, None, 0.0))
            return 0
        self._reader.load_state_dict(restored.reader)
        self._emit(Started(restored.step, restored.version.id, time.perf_counter() - begun))
        return restored.step

    def _train(self, start: int, stop: int) -> None:
        begun = time.perf_counter()
        self._model.train()
        for step in range(start + 1, stop + 1):
            samples = next(self._reader)
            columns, labels = _batch(self._features, samples)
            loss = functional.binary_cross_entropy_with_logits(self._model(columns), labels)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._optimizer.step()
            self._emit(Step(step, samples.tolist()))
        self._train_seconds += time.perf_counter() - begun

    def _finish(self) -> None:
        features = self._features
        held_out = np.arange(features.train, len(features))
        scores, labels = predict(self._model, features, held_out), features.labels[held_out]
        sink = io.BytesIO()
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, sink)
        self._emit(
            Finished(
                auc=auc(labels, scores),
                log_loss=log_loss(labels, scores),
                full_bytes=sink.tell(),
                table_rows=sum(features.rows.values()),
                train_seconds=self._train_seconds,
            )
        )


def predict(model: Recommender, features: Features, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probabilities for `samples`, float64 (samples,)."""
    model.eval()
    pieces = np.array_split(samples, max(1, -(-len(samples) // _HELD_OUT_BATCH)))
    with torch.no_grad():
        logits = torch.cat([model(_batch(features, piece)[0]) for piece in pieces])
    return torch.sigmoid(logits.double()).numpy()


def _batch(features: Features, samples: NDArray[np.int64]) -> tuple[dict[str, Tensor], Tensor]:
    columns = {name: torch.from_numpy(ids[samples]) for name, ids in features.columns.items()}
    return columns, torch.from_numpy(features.labels[samples])


def main() -> int:
    """Train as standard input says, and report on standard output."""
    # One thread sums in one order, so that two runs of the same steps give the same bits.
    torch.set_num_threads(1)

    def emit(event: Event) -> None:
        print(event_line(event), flush=True)

    config = TrainConfig.from_json(sys.stdin.readline())
    try:
        TrainingRun(config, emit).run(config.url)
    except (CheckpointError, BackendError, CodecError) as error:
        emit(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
