"""Policies in training: they decide as simulated, over restores too, and every row comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, Trace, simulate
from cnr_store.catalog import Catalog
from tests.test_store.expected import FORETOLD

ROWS, DIM, SAVES = 3000, 64, 12
ROW_BYTES = 4 * DIM


def intervals() -> list[np.ndarray[Any, Any]]:
    """Rows changed between saves: popular ones again and again."""
    generator = np.random.default_rng(0)
    popularity = np.arange(1, ROWS + 1) ** -0.9
    return [generator.choice(ROWS, 1000, p=popularity / popularity.sum()) for _ in range(SAVES - 1)]


def train(model: nn.Embedding, optimizer: SGD, ids: np.ndarray[Any, Any]) -> None:
    optimizer.zero_grad()
    model(torch.as_tensor(ids)).square().sum().backward()
    optimizer.step()


def make() -> tuple[nn.Embedding, SGD]:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, DIM, sparse=True)
    return model, SGD(model.parameters(), lr=0.1)


def policies_of(store: Path) -> list[dict[str, Any]]:
    """What each version's record says of its policy."""
    catalog = Catalog(open_backend(store))
    return [dict(catalog.record(info.id).policy) for info in cnr_store.versions(store)]


def run(store: Path, options: dict[str, Any], restart_every: int = SAVES) -> list[dict[str, Any]]:
    """Train and save, going on now and then from what was saved; the policy of each record."""
    for first in range(0, SAVES, restart_every):
        model, optimizer = make()
        with Checkpointer(store, model, optimizer, bits=32, **options) as checkpointer:
            if first:
                assert checkpointer.load().step == first - 1
            for step in range(first, min(first + restart_every, SAVES)):
                if step:
                    train(model, optimizer, intervals()[step - 1])
                info = checkpointer.save(step).result()
                stored = cnr_store.state_dict(store, info)["weight"]
                np.testing.assert_array_equal(stored, model.weight.detach().numpy())
    return policies_of(store)


@pytest.mark.parametrize("restart_every", [SAVES, 5])
@pytest.mark.parametrize("policy", FORETOLD)
def test_training_decides_as_simulated(tmp_path: Path, policy: str, restart_every: int) -> None:
    found = run(tmp_path, {"policy": policy}, restart_every)
    bytes_written = [info.bytes for info in cnr_store.versions(tmp_path)]
    fixed_bytes = bytes_written[0] - ROWS * ROW_BYTES
    trace = Trace.of_rows(ROWS, intervals())
    simulated = simulate(trace, policy, row_bytes=ROW_BYTES, fixed_bytes=fixed_bytes)
    assert [(one["full"], one["since"]) for one in found] == [
        (save.decision.full, save.decision.since) for save in simulated
    ]
    np.testing.assert_allclose(bytes_written, [save.bytes for save in simulated], rtol=0.02)
