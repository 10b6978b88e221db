"""Ctrl-C right after a lock was taken in Python: whoever needs the lock next must not hang."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import FaultyBackend
from cnr_store.training.saving import auto_maintenance, pending_save, save_queue

PATIENCE_SECONDS = 30
WAITS = {os.path.realpath(str(module.__file__)) for module in (auto_maintenance, pending_save, save_queue)}


class Strike:
    """Raises KeyboardInterrupt once, as a wait of these modules has just taken the lock with this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        return self.taken if frame.f_code.co_name == "__enter__" and _within_a_wait(frame) else None

    def taken(self, _frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self.taken


def _within_a_wait(frame: FrameType | None) -> bool:
    for _ in range(5):
        if frame is None or os.path.realpath(frame.f_code.co_filename) in WAITS:
            return frame is not None
        frame = frame.f_back
    return False


def _ask(ask: Callable[[], object], number: int) -> None:
    former = sys.gettrace()
    sys.settrace(Strike(number))
    try:
        ask()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_interrupt_of_a_wait_hangs_no_later_save(tmp_path: Path) -> None:
    def slowly(*_: object) -> None:
        time.sleep(0.002)  # so that the threads that write are busy when training begins to wait

    model = nn.Embedding(9, 2)
    store = FaultyBackend(open_backend(tmp_path), slowly)
    with cnr_store.Checkpointer(
        store, model, bits=32, keep_last=2, retention=cnr_store.Retention(max_chain=2)
    ) as checkpointer:
        for number in range(6):
            checkpointer.save(2 * number)
            _ask(checkpointer.load, number)
            checkpointer.save(2 * number + 1).result(PATIENCE_SECONDS)
        assert checkpointer.load().step == 11


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["result", "exception", "done", "repr", "explain"])
def test_an_interrupt_of_whoever_asks_for_an_outcome_hangs_no_later_save(tmp_path: Path, what: str) -> None:
    model = nn.Embedding(9, 2)
    store = FaultyBackend(open_backend(tmp_path), lambda *_: time.sleep(0.002))
    with cnr_store.Checkpointer(store, model, bits=32) as checkpointer:
        asks: dict[str, Callable[[cnr_store.PendingSave], object]] = {
            "result": lambda pending: pending.result(),
            "exception": lambda pending: pending.exception(),
            "done": lambda pending: pending.done(),
            "repr": repr,
            "explain": lambda _: checkpointer.explain(),
        }
        for number in range(3):
            pending = checkpointer.save(2 * number)
            _ask(partial(asks[what], pending), number)
            checkpointer.save(2 * number + 1).result(PATIENCE_SECONDS)
    with cnr_store.Checkpointer(tmp_path, model, bits=32) as checkpointer:
        assert checkpointer.load().step == 5
