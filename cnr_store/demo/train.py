"""Training with checkpoints, in this process or as `python -m cnr_store.demo.train`.

The training process reads its configuration from standard input and reports on standard output. It does not know
that it will be killed: it loads the newest version if there is one, and trains to the last step.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from cnr_backends import Backend, BackendError
from cnr_codecs import CodecError
from cnr_store import Checkpointer, CheckpointError, EmptyStoreError
from cnr_store.demo.data import load_features
from cnr_store.demo.model import auc, log_loss, new_training, predict, select
from cnr_store.demo.protocol import (
    DemoError,
    Event,
    Failed,
    Finished,
    Saved,
    Started,
    Step,
    TrainConfig,
    event_line,
)


class TimeOrderedReader(Iterator[NDArray[np.int64]]):
    """Endless iterator over batches of sample numbers, int64 (batch,), in time order, epoch after epoch.

    The last batch of an epoch may be shorter. A state taken after a training step counts each sample once, because
    a batch is in flight only between `next` and its step.

    `samples`: samples of an epoch.
    `batch`: samples of a batch.
    """

    def __init__(self, samples: int, batch: int) -> None:
        if samples < 1 or batch < 1:
            raise DemoError(f"a reader needs samples and a batch size, not {samples} and {batch}")
        self._state = {"epoch": 0, "position": 0, "samples": samples, "batch": batch}

    def __next__(self) -> NDArray[np.int64]:
        start, samples = self._state["position"], self._state["samples"]
        stop = min(start + self._state["batch"], samples)
        self._state["epoch"] += stop // samples
        self._state["position"] = stop % samples
        return np.arange(start, stop, dtype=np.int64)

    def state_dict(self) -> dict[str, int]:
        """The position to save: the next sample of which epoch, and the sizes that it is good for."""
        return dict(self._state)

    def load_state_dict(self, state: object) -> None:
        """Continue where `state` was taken."""
        integers = isinstance(state, Mapping) and all(type(value) is int for value in state.values())
        if not isinstance(state, Mapping) or not integers or state.keys() != self._state.keys():
            raise DemoError(f"not a state of this reader: {state!r}")
        samples, batch = self._state["samples"], self._state["batch"]
        if (state["samples"], state["batch"]) != (samples, batch):
            raise DemoError(
                f"the saved reader has {state['samples']} samples in batches of {state['batch']}, this one {samples} "
                f"in batches of {batch}: resume with the first run's data and options"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < samples:
            raise DemoError(f"a saved reader's position is out of range: {state!r}")
        self._state = dict(state)


def train(config: TrainConfig, store: str | Backend | None, emit: Callable[[Event], object]) -> None:
    """Train to the last step, with checkpoints in `store` unless it is None. `emit` is called with each event."""
    # One thread sums in one order, so two runs of the same steps end with the same bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _Run(config, emit).run(store)
    finally:
        torch.set_num_threads(threads)


class _Run:
    """Model, optimizer and reader of one run."""

    def __init__(self, config: TrainConfig, emit: Callable[[Event], object]) -> None:
        self._config = config
        self._emit = emit
        self._features = load_features(Path(config.data))
        self._model, self._optimizer = new_training(self._features.rows, config.seed)
        self._reader = TimeOrderedReader(self._features.train, config.batch)

    def run(self, store: str | Backend | None) -> None:
        if store is None:
            self._emit(Started(0, None, 0.0))
            self._train(0, self._config.steps)
        else:
            self._train_with_checkpoints(store)
        self._finish()

    def _train_with_checkpoints(self, store: str | Backend) -> None:
        config = self._config
        options = None if isinstance(store, Backend) else config.storage_options
        with Checkpointer(
            store,
            self._model,
            self._optimizer,
            policy=config.policy,
            bits=config.bits,
            codec=config.codec,
            state_bits=config.state_bits,
            storage_options=options,
        ) as checkpointer:
            step = self._resume(checkpointer)
            while step < config.steps:
                start, step = step, config.save_step(step, 1)
                self._train(start, step)
                pending = checkpointer.save(step, reader=self._reader, metadata={"run": "cnr demo"})
                self._emit(Saved(step, pending.stall_seconds))

    def _resume(self, checkpointer: Checkpointer) -> int:
        begun = time.perf_counter()
        try:
            restored = checkpointer.load()
        except EmptyStoreError:  # the first run
            self._emit(Started(0, None, 0.0))
            return 0
        self._reader.load_state_dict(restored.reader)
        self._emit(Started(restored.step, restored.version.id, time.perf_counter() - begun))
        return restored.step

    def _train(self, start: int, stop: int) -> None:
        self._model.train()
        for step in range(start + 1, stop + 1):
            samples = next(self._reader)
            columns, labels = select(self._features, samples)
            loss = binary_cross_entropy_with_logits(self._model(columns), labels)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._optimizer.step()
            self._emit(Step(step, samples.tolist()))

    def _finish(self) -> None:
        features = self._features
        held_out = np.arange(features.train, len(features))
        scores, labels = predict(self._model, features, held_out), features.labels[held_out]
        full = io.BytesIO()
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, full)
        self._emit(
            Finished(
                auc=auc(labels, scores),
                log_loss=log_loss(labels, scores),
                full_bytes=full.tell(),
                table_rows=sum(features.rows.values()),
            )
        )


def main() -> int:
    """Train as standard input says, and report on standard output."""

    def emit(event: Event) -> None:
        print(event_line(event), flush=True)

    config = TrainConfig.from_json(sys.stdin.readline())
    try:
        train(config, config.url, emit)
    except (CheckpointError, BackendError, CodecError) as error:
        emit(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
