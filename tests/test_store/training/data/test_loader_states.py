"""Loaders with a state of their own are taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it ships no types

from cnr_store import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

ROWS, BATCH = 400, 10


class Position:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == ROWS:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class WithPosition(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Position()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [WithPosition, lambda: [*range(ROWS)]])
def test_loaders_with_a_state_resume_as_they_are(
    tmp_path: Path, make: Callable[[], Any], workers: int
) -> None:
    seen: list[int] = []
    for _ in range(3):
        loader = StatefulDataLoader(make(), batch_size=BATCH, num_workers=workers)
        with Checkpointer(tmp_path / "store", nn.Linear(2, 2)) as checkpointer:
            step = checkpointer.resume(reader=loader)
            batches = iter(loader)
            seen += [next(batches)[0].item() for _ in range(2)]
            checkpointer.save(step + 2, reader=loader).result()
            del batches
    assert seen == [*range(0, 6 * BATCH, BATCH)]
