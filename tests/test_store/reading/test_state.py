"""`cnr_store.state_of`: what a version holds beside tables and tensors."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store import EmptyStoreError, VersionNotFoundError


class Counts:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATE = {
    "seen": Counter(a=2),
    "pair": (1, b"2"),
    "small": torch.arange(3),
    "large": torch.arange(10_000.0),
    "half": torch.ones(2, dtype=torch.bfloat16),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    place, model = str(tmp_path / "store"), torch.nn.Embedding(20, 4)
    counts = Counts(STATE)
    with cnr_store.Checkpointer(place, model, state={"counts": counts}) as checkpointer:
        checkpointer.save(1, reader={"batch": 7}).result()
        counts.state = {"seen": 3}
        checkpointer.save(2).result()
    return place


def test_the_state_of_a_version_comes_without_a_model(url: str) -> None:
    found = cnr_store.state_of(url, 1)
    assert (found["version"].step, found["readers"]) == (1, [{"batch": 7}])
    state = found["state"]["counts"]
    assert (state["seen"], state["pair"]) == (Counter(a=2), (1, b"2"))
    assert np.array_equal(state["small"], np.arange(3))
    assert np.array_equal(state["large"], np.arange(10_000.0))
    assert (state["half"].dtype, state["half"].tolist()) == (np.uint16, 2 * [0x3F80])
    assert cnr_store.state_of(url)["state"] == {"counts": {"seen": 3}}


def test_a_version_that_is_not_there_has_no_state(url: str, tmp_path: Path) -> None:
    with pytest.raises(VersionNotFoundError):
        cnr_store.state_of(url, 3)
    with pytest.raises(EmptyStoreError):
        cnr_store.state_of(tmp_path / "nothing")


@pytest.mark.slow
def test_the_state_needs_no_torch(url: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import cnr_store; "
        f"print(cnr_store.state_of({url!r})['state']['counts']['seen'])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "3"
