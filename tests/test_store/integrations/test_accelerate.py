"""Models and optimizers that Accelerate has prepared are stored as they are without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnr_store import OptionError, TrackedReader
from tests.test_store.support.wrapped_training import check_wrapped


def setup(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    prepared: tuple[Any, Any] = Accelerator(cpu=True).prepare(model, optimizer)
    return prepared


@pytest.mark.slow
def test_what_accelerate_prepares_is_stored_as_without_it(tmp_path: Path) -> None:
    check_wrapped(tmp_path, setup)


def test_a_reader_of_a_prepared_loader_is_told_what_to_do() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    prepared: Any = Accelerator(cpu=True).prepare(loader)
    with pytest.raises(OptionError, match=r"give TrackedReader the loader that prepare\(\) was given"):
        TrackedReader(prepared)
    TrackedReader(loader)
