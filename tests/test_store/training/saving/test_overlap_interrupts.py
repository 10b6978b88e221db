"""Ctrl-C at every line of a save or a load: no row is forgotten, and the checkpointer goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store.training import checkpointer, resumption
from cnr_store.training.saving import planner
from cnr_store.training.tracking import table_tracker, tracker
from tests.nightly import of_today

pytestmark = pytest.mark.slow

# Not `pending`: a trace can strike between the taking of a lock and its `with` block, where no signal is let in.
FILES = {
    os.path.realpath(str(module.__file__))
    for module in (checkpointer, resumption, planner, tracker, table_tracker)
}
ROWS = 900


class Job:
    """A table under SGD; each step moves a row that no step has moved before."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.model = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.checkpointer = cnr_store.Checkpointer(
            place,
            self.model,
            self.optimizer,
            bits=32,
            policy="consecutive",
            job=cnr_store.Job(rng=False),
            limits=cnr_store.Limits(workers=1),
        )
        self.row = -1

    def step(self) -> None:
        self.row += 1
        self.optimizer.zero_grad()
        self.model(torch.tensor([[self.row]])).sum().backward()
        self.optimizer.step()

    def assert_newest_is_now(self) -> None:
        stored = cnr_store.state_dict(self.place)["weight"]
        assert np.array_equal(stored, self.model.weight.detach().numpy())


def lines_of(call: Callable[[], object], seen: dict[tuple[str, int], None]) -> None:
    """Note each line of these modules that a call comes by."""

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            seen.setdefault((frame.f_code.co_filename, frame.f_lineno))
        return line

    traced(call, line)


def interrupt(call: Callable[[], object], place: tuple[str, int]) -> bool:
    """Raise KeyboardInterrupt when a call comes to a line for the first time. Whether it came there."""
    came = False

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal came
        if not came and event == "line" and (frame.f_code.co_filename, frame.f_lineno) == place:
            came = True
            raise KeyboardInterrupt
        return line

    try:
        traced(call, line)
    except KeyboardInterrupt:
        assert came
    return came


def traced(call: Callable[[], object], line: Callable[..., Any]) -> None:
    def enter(frame: FrameType, event: str, _: object) -> Any:
        return line if os.path.realpath(frame.f_code.co_filename) in FILES else None

    former = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(former)


@pytest.mark.parametrize("what", ["save", "load"])
def test_an_interrupt_at_any_line_forgets_no_row(tmp_path: Path, what: str) -> None:
    job = Job("memory://" + str(tmp_path))
    places: dict[tuple[str, int], None] = {}

    def call() -> None:
        if what == "save":
            job.checkpointer.save(job.row).result()
        else:
            job.checkpointer.load()

    job.checkpointer.save(0).result()
    for _ in range(2):
        job.step()
        lines_of(call, places)
    reached = 0
    struck = of_today(places, 20)
    for place in struck:
        job.step()
        reached += interrupt(call, place)
        job.step()
        job.checkpointer.save(job.row).result()
        job.assert_newest_is_now()
    job.checkpointer.close()
    assert len(places) > 33
    assert reached > 0.9 * len(struck)
