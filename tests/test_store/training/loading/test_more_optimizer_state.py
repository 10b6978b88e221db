"""Members of an optimizer's state dict beside ``state`` and ``param_groups``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import cnr_store


class Averaging(SGD):
    """Counts its steps outside of its state, as torch's own PostLocalSGDOptimizer does."""

    steps: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps, "large": torch.full((4096,), 7.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        assert state_dict["large"].tolist() == [7.0] * 4096
        super().load_state_dict(state_dict)


def test_they_come_back(tmp_path: Path) -> None:
    model = nn.Embedding(8, 2)
    optimizer = Averaging(model.parameters(), lr=0.1)
    optimizer.steps = 3
    cnr_store.save(str(tmp_path / "s"), model, optimizer)
    optimizer.steps = 0
    cnr_store.load(str(tmp_path / "s"), model, optimizer)
    assert optimizer.steps == 3


def test_one_that_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    model = nn.Embedding(8, 2)
    optimizer = Averaging(model.parameters(), lr=0.1)
    optimizer.steps = object()
    with pytest.raises(cnr_store.StateError, match="steps"):
        cnr_store.save(str(tmp_path / "s"), model, optimizer)
