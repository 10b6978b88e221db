"""What Lightning saves by its own callbacks, loads by `ckpt_path`, and keeps in its checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import cnr_store
from cnr_store import ModelMismatchError, OptionError, StateError
from cnr_store.integrations.lightning import CnrCheckpoint
from cnr_store.integrations.lightning_io import LIVE, TENSOR, unpack
from tests.test_store.integrations.lightning_fit import (
    BATCHES,
    EPOCHS,
    WARNINGS,
    Module,
    StopsAt,
    StopsError,
    fit,
)

pytestmark = [
    pytest.mark.filterwarnings(*WARNINGS),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Scored(Module):
    """Logs a score at each step, and notes the table's weights that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, torch.Tensor] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("score", float(self.global_step % 5))

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights[self.global_step] = self.table.weight.detach().clone()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def assert_equal(module: Module, other: Module) -> None:
    for name, tensor in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_a_model_checkpoint_keeps_the_versions_of_its_markers(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    best = ModelCheckpoint(
        tmp_path / "best", monitor="score", save_top_k=2, mode="max", every_n_train_steps=1
    )
    saves = CnrCheckpoint(
        url, 100, bits=32, keep_last=1, retention=cnr_store.Retention(max_chain=None), policy="full"
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)))
    options: dict[str, Any] = {"validation": loader, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    module, _ = fit(tmp_path, saves, best, module=Scored(), max_epochs=1, **options)
    assert len(best.best_k_models) == 2
    assert sorted(cnr_store.tags(url).values()) == [one.id for one in cnr_store.versions(url)[:2]]
    for path in best.best_k_models:
        assert Path(path).stat().st_size < 1000
        loaded, step = Scored(), int(path.partition("step=")[2].partition(".")[0])
        trainer = Trainer(
            callbacks=[CnrCheckpoint(url, 1), best],
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
        )
        trainer.validate(loaded, loader, ckpt_path=path, verbose=False)
        assert isinstance(module, Scored)
        assert torch.equal(loaded.table.weight, module.weights[step])


@pytest.mark.parametrize("stop", [BATCHES, BATCHES + 3])
def test_the_last_checkpoint_is_the_newest_version(tmp_path: Path, stop: int) -> None:
    whole, _ = fit(tmp_path)
    saves = CnrCheckpoint(str(tmp_path / "store"), 1, bits=32)
    with pytest.raises(StopsError):
        fit(tmp_path, saves, StopsAt(stop), enable_checkpointing=True)
    again = CnrCheckpoint(str(tmp_path / "store"), 1, bits=32)
    rest, trainer = fit(tmp_path, again, enable_checkpointing=True, ckpt_path="last")
    assert trainer.global_step == EPOCHS * BATCHES
    assert rest.seen == whole.seen[stop * 16 :]
    assert_equal(rest, whole)


def test_the_first_save_of_a_resumed_fit_is_a_delta(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    options: dict[str, Any] = {"policy": "consecutive", "retention": cnr_store.Retention(max_chain=None)}
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 2, **options), StopsAt(3))
    with pytest.raises(StopsError):
        fit(tmp_path, CnrCheckpoint(url, 2, resume=True, **options), StopsAt(6))
    assert [(one.step, one.kind, one.rows) for one in cnr_store.versions(url)] == [
        (2, "baseline", 200),
        (4, "delta", 32),
        (6, "delta", 32),
    ]


def test_a_checkpoint_of_lightnings_own_is_loaded_as_ever(tmp_path: Path) -> None:
    whole, trainer = fit(tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    saves = CnrCheckpoint(str(tmp_path / "store"), 100, bits=32)
    rest, _ = fit(tmp_path, saves, ckpt_path=tmp_path / "own.ckpt", max_epochs=1)
    assert_equal(rest, whole)


class Keeps(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": [self.value]}


@pytest.mark.parametrize(
    "value", [PurePosixPath("a"), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), np.array([{}])]
)
def test_a_state_that_cannot_be_stored_is_refused_by_its_path(tmp_path: Path, value: Any) -> None:
    module, url = Module(), str(tmp_path / "store")
    with pytest.raises(StateError, match=r"callbacks.*Keeps.*value.*\[0\]"):
        fit(tmp_path, CnrCheckpoint(url, 1), Keeps(value), module=module)
    assert module.seen == []
    assert cnr_store.versions(url) == []


class WithOptions(Module):
    found: Any = None

    def __init__(self, rate: float, place: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["hyper_parameters"]


def test_hyperparameters_of_other_kinds_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "cnr_store"):
        fit(tmp_path, CnrCheckpoint(url, 1), module=WithOptions(0.5, PurePosixPath("a")), max_epochs=1)
    assert caplog.text.count("without the hyperparameter place") == 1
    again = WithOptions(0.5, None)
    fit(tmp_path, CnrCheckpoint(url, 100, resume=True), module=again, max_epochs=1)
    assert again.found == {"rate": 0.5}


def test_two_that_resume_are_refused(tmp_path: Path) -> None:
    def saves() -> list[CnrCheckpoint]:
        return [CnrCheckpoint(str(tmp_path / name), 1, resume=True) for name in "ab"]

    fit(tmp_path, *saves(), max_epochs=1)
    with pytest.raises(OptionError, match="another CnrCheckpoint"):
        fit(tmp_path, *saves())


def test_a_store_of_another_program_is_refused(tmp_path: Path) -> None:
    url, module = str(tmp_path / "store"), Module()
    cnr_store.save(url, module, None, 1)
    with pytest.raises(ModelMismatchError, match="something else than CnrCheckpoint"):
        fit(tmp_path, CnrCheckpoint(url, 1, resume=True), module=module)


def test_a_fit_that_fails_to_begin_leaves_no_hook_behind(tmp_path: Path) -> None:
    url, module = str(tmp_path / "store"), Module()
    with pytest.raises(OptionError, match="bits"):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=5), module=module)
    assert "on_train_start" not in vars(module)
    fit(tmp_path, CnrCheckpoint(url, BATCHES), module=module, max_epochs=1)
    assert [one.step for one in cnr_store.versions(url)] == [BATCHES]


def test_state_of_a_tensor_that_the_model_lacks() -> None:
    """Mappings, such as the state dict, are without it. A sequence would be another one."""
    assert unpack({"b": {TENSOR: np.ones(2), "dtype": "float64"}}, {})["b"].tolist() == [1, 1]
    assert unpack({"a": {LIVE: "gone"}, "b": 1}, {}) == {"b": 1}
    with pytest.raises(ModelMismatchError, match="'gone', which the model lacks"):
        unpack([{LIVE: "gone"}], {})
    with pytest.raises(ModelMismatchError, match="the element type 'load'"):
        unpack({TENSOR: np.ones(1), "dtype": "load"}, {})
