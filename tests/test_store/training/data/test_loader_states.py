"""Loaders with a state of their own that is exact once only are told."""

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
TOLD = "counts them twice"


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


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
@pytest.mark.parametrize(
    ("make", "is_told"), [(Plain, True), (WithPosition, False), (lambda: [*range(ROWS)], False)]
)
def test_a_position_that_is_exact_once_only_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], workers: int, is_told: bool
) -> None:
    seen: list[int] = []
    for life in range(3):
        loader = StatefulDataLoader(make(), batch_size=BATCH, num_workers=workers)
        with Checkpointer(tmp_path / "store", nn.Linear(2, 2)) as checkpointer:
            step = checkpointer.resume(reader=loader)
            batches = iter(loader)
            seen += [next(batches)[0].item() for _ in range(2)]
            checkpointer.save(step + 2, reader=loader).result()
            del batches
        assert (TOLD in caplog.text) == (is_told and life > 0)
    exact = [*range(0, 6 * BATCH, BATCH)]
    assert seen[:4] == exact[:4]
    assert (seen == exact) == (not is_told)  # else torchdata counts right now, and there is nothing to tell


def test_the_end_of_an_epoch_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        loader = StatefulDataLoader(Plain(), batch_size=BATCH)
        with Checkpointer(tmp_path / "store", nn.Linear(2, 2)) as checkpointer:
            step = checkpointer.resume(reader=loader)
            assert sum(1 for _ in loader) == ROWS // BATCH
            checkpointer.save(step + 1, reader=loader).result()
    assert TOLD not in caplog.text
