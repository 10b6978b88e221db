"""Updates that are applied to models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import (
    ModelMismatchError,
)
from tests.test_store.following.followed_runs import ROWS, Model, Run, only


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 32])
def test_a_model_that_applies_updates_equals_one_that_loads(
    tmp_path: Path, dtype: torch.dtype, bits: int
) -> None:
    run = Run(tmp_path, bits=bits, dtype=dtype)
    with torch.no_grad():
        run.model.users.weight[17, 0] = torch.nan
    for users in ([], [5, 9, 3000], [7], range(100, 300)):
        run.save(*users)
    served = Model(dtype=dtype)
    for update in cnr_store.follow(tmp_path):
        before = served.users.weight._version
        update.apply(served)
        assert served.users.weight._version > before
        loaded = Model(dtype=dtype)
        cnr_store.load(tmp_path, loaded, version=update.version)
        for name, values in loaded.state_dict().items():
            assert _bytes(served.state_dict()[name]) == _bytes(values), name


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_extra_state_is_applied(tmp_path: Path) -> None:
    class WithExtra(Model):
        vocabulary: object = "old"

        def get_extra_state(self) -> object:
            return {"words": self.vocabulary}

        def set_extra_state(self, state: dict[str, object]) -> None:
            self.vocabulary = state["words"]

    model = WithExtra()
    model.vocabulary = np.arange(5000)  # beside the state
    cnr_store.save(tmp_path, model, torch.optim.Adam(model.top.parameters()))
    served = WithExtra()
    only(tmp_path, None).apply(served)
    assert np.array_equal(served.vocabulary, model.vocabulary)  # type: ignore[arg-type]
    with pytest.raises(ModelMismatchError, match="extra state"):
        Run(tmp_path / "other").save()
        only(tmp_path / "other", None).apply(WithExtra())


@pytest.mark.parametrize("other", [Model(rows=ROWS + 1), Model(dtype=torch.float16), nn.Linear(2, 2)])
def test_a_model_that_does_not_fit_is_not_touched(tmp_path: Path, other: nn.Module) -> None:
    Run(tmp_path).save()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ModelMismatchError):
        only(tmp_path, None).apply(other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.slow
def test_following_needs_no_torch_and_applying_says_that_it_does(tmp_path: Path) -> None:
    Run(tmp_path).save(5)
    program = f"""
import sys
sys.modules["torch"] = None
import cnr_store
(update,) = cnr_store.follow({str(tmp_path)!r})
assert {{block.name for block in update.blocks()}} == update.arrays.keys()
try:
    update.apply(None)
except ImportError as error:
    assert "cnr-store[torch]" in str(error), error
else:
    raise SystemExit("applied without torch")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Named(nn.Module):
    """Tables whose parameters are not called ``weight`` of something with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 4))
        self.tied = nn.Embedding(50, 4)
        self.tied.weight = self.table
        self.weight = nn.Embedding(60, 4)


def test_an_update_is_applied_whatever_the_parameters_are_called(tmp_path: Path) -> None:
    trained, served = Named(), Named()
    cnr_store.save(tmp_path, trained, step=1, bits=32)
    for update in cnr_store.follow(tmp_path):
        update.apply(served)
    for name, values in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], values), name
