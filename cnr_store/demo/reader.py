"""A reader whose position can be saved: batches of sample numbers, in time order, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from cnr_store.demo.errors import DemoError


class TimeOrderedReader:
    """Endless iterator over batches of sample numbers, int64 (batch,); an epoch's last batch may be shorter.

    Its state names the next sample to be read. A batch is in flight only between `next` and its training
    step, so a state taken after the step counts every sample once.
    """

    def __init__(self, samples: int, batch: int) -> None:
        if samples < 1 or batch < 1:
            raise DemoError(f"a reader needs samples and a batch size, not {samples} and {batch}")
        self.samples = samples
        self.batch = batch
        self._epoch = 0
        self._position = 0

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self

    def __next__(self) -> NDArray[np.int64]:
        stop = min(self._position + self.batch, self.samples)
        batch = np.arange(self._position, stop, dtype=np.int64)
        self._position = stop
        if stop == self.samples:
            self._epoch, self._position = self._epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, int]:
        """What to save: {"epoch", "position", "samples", "batch"}."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "samples": self.samples,
            "batch": self.batch,
        }

    def load_state_dict(self, state: object) -> None:
        """Go on where `state` was taken.

        Raises: DemoError if it is no such state, or belongs to other data or another batch size.
        """
        fits = (
            isinstance(state, Mapping)
            and state.keys() == self.state_dict().keys()
            and all(type(value) is int for value in state.values())
        )
        if not fits or not isinstance(state, Mapping):
            raise DemoError(f"not a state of this reader: {state!r}")
        if (state["samples"], state["batch"]) != (self.samples, self.batch):
            raise DemoError(
                f"the saved reader has {state['samples']} samples in batches of {state['batch']}, this "
                f"one {self.samples} in batches of {self.batch}: resume with the first run's data and options"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.samples:
            raise DemoError(f"a saved reader's position is out of range: {state!r}")
        self._epoch, self._position = state["epoch"], state["position"]
