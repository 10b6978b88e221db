"""A model whose rows are changed by hand, storage with weather, and a clock that pauses move on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD

from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, PendingSave
from cnr_store.training.saving import save_queue
from cnr_store.writing import patience
from tests.test_store.support.faults import Weather
from tests.test_store.support.lasting_store import change, make_model

PATIENCE_SECONDS = 60


class Job:
    """A model whose rows are changed by hand, and storage with weather, which befalls reads only if told."""

    def __init__(self, place: Path | str, rows: int = 600, reads: bool = False, **options: Any) -> None:
        self.weather = Weather()
        self.backend = FaultyBackend(open_backend(place), self.weather, reads=reads)
        self.model = make_model(rows=rows)
        optimizer = SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(
            self.backend, self.model, optimizer, **{"bits": 32, "policy": "consecutive", **options}
        )

    def change(self, *ids: int) -> None:
        change(self.checkpointer, self.model, list(ids))

    def breaks(self, fault: Fault = "before", operation: str = "") -> None:
        """Let every operation fail, or those of one name."""
        self.weather.change(lambda found, key: fault if operation in ("", found) else None)

    def heals(self) -> None:
        self.weather.change(None)

    def fail(self, step: int) -> None:
        """Save in vain, without asking for the result."""
        self.breaks()
        self.try_to_save(step)
        self.heals()

    def try_to_save(self, step: int) -> PendingSave:
        """Save, and wait without asking for the result."""
        pending = self.checkpointer.save(step)
        assert pending.callbacks_done.wait(PATIENCE_SECONDS)
        return pending

    def stuck(self, step: int) -> PendingSave:
        """A save that an outage holds up."""
        pausing = threading.Event()

        def unreachable(operation: str, key: str) -> Fault:
            pausing.set()
            return "unreachable"

        self.weather.change(unreachable)
        pending = self.checkpointer.save(step)
        assert pausing.wait(PATIENCE_SECONDS)
        return pending


class Clock:
    """What pauses take no time by, but this clock's.

    Attributes
    ----------
    now
        Seconds.
    slept
        The seconds of each pause.
    runs
        Cleared, it keeps pauses from ending.
    on_sleep
        Called in pauses.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.runs = threading.Event()
        self.runs.set()
        self.on_sleep: Callable[[], object] = lambda: None
        own = partial(patience.Patience, clock=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(save_queue, "Patience", own)

    def _sleep(self, seconds: float) -> None:
        assert self.runs.wait(PATIENCE_SECONDS)
        self.slept.append(seconds)
        self.now += seconds
        self.on_sleep()
