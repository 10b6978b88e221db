"""Lightning's own trainer saves, stops, and goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import OptionError
from cnr_store.integrations.lightning import CnrCheckpoint
from tests.test_store.integrations.lightning_fit import BATCHES, EPOCHS, WARNINGS, Behind, Module, fit
from tests.test_store.support.rowwise_optimizers import OnAnother

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


class StopAt(Behind):
    """Ends training by an error, as a lost machine does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def behind_batch(self, trainer: Trainer) -> None:
        if trainer.global_step == self._step:
            raise MemoryError("out of memory")


class ManualModule(Module):
    """An optimizer for the table and one for the rest; each batch takes the steps that `stepping` says."""

    def __init__(self, stepping: Callable[[int], tuple[bool, bool]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._stepping = stepping

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizers: Any = self.optimizers()
        for optimizer, steps in zip(optimizers, self._stepping(batch_idx), strict=True):
            if steps:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.table, self.top)]


class At(Callback):
    """Its state is the batch behind which it is asked for it."""

    batch = -1

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, at: int) -> None:
        self.batch = at

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict["batch"]


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [5, 8, 11])
def test_a_resumed_fit_ends_as_one_that_was_never_stopped(tmp_path: Path, dies_at: int) -> None:
    url = str(tmp_path / "store")
    undisturbed, _ = fit(tmp_path)
    with pytest.raises(MemoryError):
        fit(tmp_path, CnrCheckpoint(url, 1, bits=32), StopAt(dies_at))
    saved = dies_at - (dies_at % BATCHES == 0)  # an epoch's last step is saved when the epoch has ended
    assert cnr_store.versions(url)[-1].step == saved
    module, trainer = fit(tmp_path, CnrCheckpoint(url, 4, bits=32, resume=True))
    assert trainer.global_step == BATCHES * EPOCHS
    assert trainer.current_epoch == EPOCHS
    assert module.seen == undisturbed.seen[saved * 16 :]
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_saves_come_at_steps_and_at_the_end(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 5, policy="consecutive"), max_epochs=2)
    found = cnr_store.versions(url)
    assert [version.step for version in found] == [5, 10, 15, 16]
    assert [version.kind for version in found] == ["baseline", "delta", "delta", "delta"]


@pytest.mark.parametrize(
    ("stepping", "saved"),
    [
        (lambda batch: (True, True), [6, 10, 16]),
        (lambda batch: (batch > 0, True), [5, 11, 15]),
        (lambda batch: (batch % 3 == 2, False), [2]),
    ],
    ids=["two at a time", "odd", "one in three"],
)
def test_saves_come_whatever_steps_a_batch_takes(
    tmp_path: Path, stepping: Callable[[int], tuple[bool, bool]], saved: list[int]
) -> None:
    url = str(tmp_path / "store")
    fit(tmp_path, CnrCheckpoint(url, 5), max_epochs=1, module=ManualModule(stepping))
    assert [version.step for version in cnr_store.versions(url)] == saved


def test_nothing_is_saved_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    url, at = str(tmp_path / "store"), At()
    fit(tmp_path, CnrCheckpoint(url, 1, state={"at": at}), at, max_epochs=1, accumulate_grad_batches=3)
    found = {one.step: cnr_store.state_of(url, one)["state"]["at"] for one in cnr_store.versions(url)}
    assert found == {1: {"batch": 2}, 2: {"batch": 5}, 3: {"batch": 7}}


def test_a_fit_that_dies_in_its_first_accumulation_has_saved_nothing(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: Any, outputs: Any, batch: Any, at: int
        ) -> None:
            if at == 1:
                raise MemoryError("out of memory")

    url = str(tmp_path / "store")
    with pytest.raises(MemoryError):
        fit(tmp_path, CnrCheckpoint(url, 3), Dies(), accumulate_grad_batches=4)
    assert cnr_store.versions(url) == []


def test_the_end_is_saved_though_a_save_is_under_way(tmp_path: Path) -> None:
    ending = threading.Event()

    def stands_still(operation: str, key: str, index: int) -> None:
        assert ending.wait(60)

    class Ends(Callback):
        def on_train_end(self, *_: Any) -> None:
            ending.set()

    place = str(tmp_path / "store")
    backend = FaultyBackend(open_backend(place), stands_still)
    # The end opens the storage before the callback that saves comes to its turn.
    fit(tmp_path, Ends(), CnrCheckpoint(backend, 2, limits=cnr_store.Limits(overlap="skip")), max_epochs=1)
    assert [version.step for version in cnr_store.versions(place)] == [2, BATCHES]


def test_an_error_of_training_is_raised_though_a_save_failed(tmp_path: Path) -> None:
    backend = FaultyBackend(open_backend(str(tmp_path / "store")), lambda operation, key, index: "before")
    told: list[BaseException] = []

    class Told(Callback):
        def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
            told.append(exception)

    with pytest.raises(MemoryError) as caught:
        fit(tmp_path, CnrCheckpoint(backend, 3), StopAt(5), Told())
    assert told == [caught.value]


def test_resume_begins_anew_where_nothing_is_stored(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    _, trainer = fit(tmp_path, CnrCheckpoint(url, 100, resume=True), max_epochs=1)
    assert trainer.global_step == BATCHES
    assert [version.step for version in cnr_store.versions(url)] == [BATCHES]


def test_a_run_that_has_ended_is_gone_on_with(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    first, _ = fit(tmp_path, CnrCheckpoint(url, 100, bits=32), max_epochs=1)
    module, trainer = fit(tmp_path, CnrCheckpoint(url, 100, bits=32, resume=True), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (BATCHES * 2, 2)
    assert sorted(module.seen) == sorted(first.seen)  # one epoch each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({}, "every_n_steps or every_n_minutes"),
        ({"every_n_minutes": -1}, "every_n_minutes"),
        ({"every_n_steps": 1, "overlap": "skip"}, r"limits=cnr_store\.Limits\(overlap='skip'\)"),
        ({"every_n_stps": 1}, r"did you mean every_n_steps="),
        ({"every_n_steps": 1, "retention": {"keep_every": 3}}, r"give cnr_store\.Retention"),
        ({"every_n_steps": 1, "save_top_k": 2}, "needs monitor="),
        ({"every_n_steps": 1, "monitor": "auc", "save_top_k": 0}, "keep_best"),
        ({"every_n_steps": 1, "monitor": "auc", "mode": "best", "save_top_k": 1}, "keep_best"),
        (
            {
                "every_n_steps": 1,
                "monitor": "auc",
                "save_top_k": 1,
                "retention": cnr_store.Retention(keep_best=("auc", "max", 1)),
            },
            "no keep_best=",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CnrCheckpoint("memory://store", **options)


class ScoredModule(Module):
    """Logs a score for each step that it is given one for."""

    def __init__(self, scores: dict[int, float]) -> None:
        super().__init__()
        self._scores = scores

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step + 1 in self._scores:
            self.log("score", self._scores[self.global_step + 1])
        return super().training_step(batch, batch_idx)


def test_the_best_are_kept(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    scores = {2: 0.5, 4: 0.9, 6: 0.7, 8: 0.6}
    callback = CnrCheckpoint(
        url,
        2,
        monitor="score",
        mode="max",
        save_top_k=1,
        policy="full",
        keep_last=1,
        retention=cnr_store.Retention(max_chain=None),
    )
    fit(tmp_path, callback, module=ScoredModule(scores), max_epochs=1)
    found = {version.step: version.metadata["score"] for version in cnr_store.versions(url)}
    assert found == {4: pytest.approx(0.9), 8: pytest.approx(0.6)}


def test_a_metric_that_is_missing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "cnr_store"):
        fit(tmp_path, CnrCheckpoint(url, 8, monitor="auc", save_top_k=1), max_epochs=1)
    assert "step 8 is saved without the metric 'auc'" in caplog.text
    assert [version.step for version in cnr_store.versions(url)] == [8]


def test_saves_come_after_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "store")
    now = iter(range(0, 10_000, 30))
    monkeypatch.setattr("cnr_store.integrations.lightning.monotonic", lambda: next(now))
    fit(tmp_path, CnrCheckpoint(url, every_n_minutes=2), max_epochs=1)
    steps = [version.step for version in cnr_store.versions(url)]
    assert steps == [4, 8]


class Figures(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "figures"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "checkpoint/bytes" in metrics:
            assert step is not None
            self.found[step] = dict(metrics)


@pytest.mark.slow
def test_loggers_get_the_figures_of_saves(tmp_path: Path) -> None:
    url, logger = str(tmp_path / "store"), Figures()
    fit(tmp_path, CnrCheckpoint(url, 3), max_epochs=1, logger=logger, log_every_n_steps=1)
    versions = cnr_store.versions(url)
    assert {version.step: version.bytes for version in versions} == {
        step: figures["checkpoint/bytes"] for step, figures in logger.found.items()
    }
    assert all(figures["checkpoint/failed"] == 0 for figures in logger.found.values())


class OwnOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return OnAnother(self.parameters(), lr=0.1)


@pytest.mark.parametrize("trusted", [[OnAnother], []])
def test_an_optimizer_of_ones_own_can_be_trusted(
    tmp_path: Path, trusted: list[type], caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "store")
    # Once there was an optimizer of the class beneath, torch calls the hooks of its step, too.
    torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])
    module = OwnOptimizer()
    saves = CnrCheckpoint(
        url, 2, policy="consecutive", bits=32, tracking=cnr_store.Tracking(trusted_optimizers=trusted)
    )
    fit(tmp_path, saves, max_epochs=1, module=module)
    assert all(version.rows < 200 for version in cnr_store.versions(url)[1:])
    assert ("compared with what is stored: OnAnother" in caplog.text) != bool(trusted)
    other = OwnOptimizer()
    cnr_store.load(url, other, other.configure_optimizers())
    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
