"""`load(fallback=True)`: a damaged version is skipped for the newest sound one, exactly, and aloud."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Backend, StorageError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import (
    Checkpointer,
    CorruptionError,
    EmptyStoreError,
    ModelMismatchError,
    VersionInfo,
    VersionNotFoundError,
)
from cnr_store.format import layout
from tests.test_store.support.faults import fault_at
from tests.test_store.support.retention_helpers import delete_version
from tests.test_store.support.tampering import Forgery

ROWS, DIM, STEPS = 500, 8, 4
WEIGHT = "tables/emb/weight"


class Model(nn.Module):
    def __init__(self, seed: int, dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(ROWS, dim)
        self.top = nn.Linear(dim, 1)


class Trainer:
    """A model, its optimizer and another object with a state; all of them are in `content`."""

    def __init__(self, seed: int, dim: int = DIM) -> None:
        self.model = Model(seed, dim)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self, ids: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model.top(self.model.emb(torch.tensor(ids))).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def checkpointer(self, url: Path | Backend) -> Checkpointer:
        return Checkpointer(
            url,
            self.model,
            self.optimizer,
            policy="consecutive",
            bits=32,
            state={"scheduler": self.scheduler},
        )

    def content(self) -> dict[str, object]:
        found: dict[str, object] = {n: v.numpy().tobytes() for n, v in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = value.numpy().tobytes()
        state = self.scheduler.state_dict()
        return found | {"rate": self.optimizer.param_groups[0]["lr"], "epoch": state["last_epoch"]}


class Store:
    """Versions of steps 0 to 3, each a delta over the one before, and what each of them holds."""

    def __init__(self, url: Path) -> None:
        self.url = url
        self.ids: list[str] = []
        self.contents: list[dict[str, object]] = []
        self.drawn: list[bytes] = []
        trainer = Trainer(0)
        with trainer.checkpointer(url) as checkpointer:
            for step in range(STEPS):
                trainer.step([step, step + 10])
                self.ids.append(checkpointer.save(step, reader={"step": step}).result().id)
                self.contents.append(trainer.content())
                state = torch.get_rng_state()
                self.drawn.append(torch.rand(3).numpy().tobytes())
                torch.set_rng_state(state)
                torch.rand(1)

    def path(self, version: int, name: str) -> Path:
        return self.url / "versions" / self.ids[version] / name

    @contextmanager
    def damaged(self, *keys: str) -> Iterator[None]:
        before = {key: (self.url / key).read_bytes() for key in keys}
        for key, data in before.items():
            (self.url / key).write_bytes(data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])
        try:
            yield
        finally:
            for key, data in before.items():
                (self.url / key).write_bytes(data)

    def key(self, version: int, name: str) -> str:
        return str(self.path(version, name).relative_to(self.url))


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("fallback"))


@pytest.fixture
def store(_made: Store) -> Iterator[Store]:
    before = {path: path.read_bytes() for path in _made.url.rglob("*") if path.is_file()}
    yield _made
    assert {path: path.read_bytes() for path in _made.url.rglob("*") if path.is_file()} == before


def assert_is(store: Store, trainer: Trainer, version: int) -> None:
    assert trainer.content() == store.contents[version]
    assert torch.rand(3).numpy().tobytes() == store.drawn[version]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zarr.json", "manifest", "state/main.json", f"{WEIGHT}/c/0/0", "dense/model/top.weight/c/0/0"]
)
def test_newest_version_is_damaged(store: Store, name: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(1)
    trainer.step([1, 2, 3])
    with store.damaged(store.key(3, name)), trainer.checkpointer(store.url) as checkpointer:
        with pytest.raises(CorruptionError):
            checkpointer.load()
        with caplog.at_level(logging.ERROR):
            restored = checkpointer.load(fallback=True)
        assert_is(store, trainer, 2)
    assert (restored.version.id, restored.step, restored.reader) == (store.ids[2], 2, {"step": 2})
    ((skipped, reason),) = restored.skipped
    assert skipped == store.ids[3]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert reason in said[0]
    assert all(name in said[1] for name in store.ids[2:])


def test_sound_version_is_taken_as_ever(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(1)
    with trainer.checkpointer(store.url) as checkpointer:
        assert checkpointer.load(fallback=True).skipped == ()
        assert_is(store, trainer, 3)
        assert checkpointer.load(store.ids[1], fallback=True).skipped == ()
        assert_is(store, trainer, 1)
    assert not caplog.records


def test_damage_that_several_versions_lean_on(store: Store) -> None:
    trainer = Trainer(1)
    with store.damaged(store.key(1, f"{WEIGHT}/c/0/0")):
        restored = cnr_store.load(store.url, trainer.model, trainer.optimizer, fallback=True)
    assert [version for version, _ in restored.skipped] == store.ids[:0:-1]
    assert restored.version.id == store.ids[0]
    assert all(trainer.content()[name] == store.contents[0][name] for name in trainer.model.state_dict())


@pytest.mark.parametrize("by", ["id", "info", "step"])
def test_a_version_that_was_named(store: Store, by: str) -> None:
    """What is newer than the version asked for is no substitute."""
    trainer = Trainer(1)
    info = cnr_store.versions(store.url)[2]
    wanted: dict[str, str | int | VersionInfo] = {"id": info.id, "info": info, "step": 2}
    with store.damaged(store.key(2, f"{WEIGHT}/c/0/0")), trainer.checkpointer(store.url) as checkpointer:
        restored = checkpointer.load(wanted[by], fallback=True)
        assert_is(store, trainer, 1)
    assert [version for version, _ in restored.skipped] == [store.ids[2]]


def test_nothing_is_sound(store: Store) -> None:
    trainer = Trainer(1)
    keys = [store.key(0, f"{WEIGHT}/c/0/0"), store.key(3, "zarr.json")]
    with store.damaged(*keys), trainer.checkpointer(store.url) as checkpointer:
        with pytest.raises(CorruptionError) as caught:
            checkpointer.load(fallback=True)
        assert all(version in str(caught.value) for version in store.ids)
        # Only whole tables are safe after that, and they are written.
        trainer.step([5])
        made = checkpointer.save(9).result()
        assert made.kind == "baseline"
        assert checkpointer.load(fallback=True).version.id == made.id
    _remove(store, made.id)


def test_versions_that_do_not_exist(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(1)
    before = trainer.content()
    keys = [store.key(3, "zarr.json")]
    with store.damaged(*keys), trainer.checkpointer(store.url) as checkpointer:
        with pytest.raises(VersionNotFoundError):
            checkpointer.load("000009-0123abcd.00000001", fallback=True)
        with pytest.raises(VersionNotFoundError):
            checkpointer.load("newest", fallback=True)
        with pytest.raises(CorruptionError, match="nothing could be loaded: 77"):
            checkpointer.load(77, fallback=True)
    with trainer.checkpointer(store.url) as checkpointer, pytest.raises(VersionNotFoundError):
        checkpointer.load(77, fallback=True)
    with trainer.checkpointer(tmp_path) as checkpointer, pytest.raises(EmptyStoreError):
        checkpointer.load(fallback=True)
    assert trainer.content() == before


def test_a_model_that_does_not_fit_is_no_damage(store: Store) -> None:
    with Trainer(1, DIM + 1).checkpointer(store.url) as checkpointer, pytest.raises(ModelMismatchError):
        checkpointer.load(fallback=True)


def test_a_version_that_does_not_fit_behind_a_damaged_one(tmp_path: Path) -> None:
    """The damaged one has overwritten a part of the model, so no error may say that it is unchanged."""
    wide, narrow = Trainer(0), Trainer(0, DIM + 1)
    made = [cnr_store.save(tmp_path, each.model, step=step) for step, each in enumerate([wide, narrow])]
    (tmp_path / f"versions/{made[1].id}/dense/model/top.weight/c/0/0").write_bytes(b"?")
    with pytest.raises(CorruptionError, match="partly overwritten") as caught:
        cnr_store.load(tmp_path, narrow.model, fallback=True)
    assert all(info.id in str(caught.value) for info in made)
    assert cnr_store.load(tmp_path, wide.model, version=0, fallback=True).version.id == made[0].id


def test_a_sound_version_that_is_folded_while_it_loads_is_not_skipped(tmp_path: Path) -> None:
    """What it leant on when the load began is removed before its rows are read."""
    inner, trainer = open_backend(tmp_path), Trainer(0)
    checkpointer = trainer.checkpointer(tmp_path)
    made = []
    for step in range(3):
        trainer.step([step, step + 10])
        made.append(checkpointer.save(step).result())
    expected, lock = trainer.content(), threading.Lock()
    folded: list[str] = []

    def fold(operation: str, key: str, index: int) -> Fault:
        with lock:
            if operation.startswith("get_") and key.startswith(f"versions/{made[0].id}/") and not folded:
                folded.append(cnr_store.compact(inner, made[2]).outcome)
                for gone in made[1::-1]:
                    delete_version(inner, gone.id)
        return None

    again = Trainer(1)
    with again.checkpointer(FaultyBackend(inner, fold, reads=True)) as other:
        restored = other.load(fallback=True)
    assert (folded, restored.version.id, restored.skipped) == (["folded"], made[2].id, ())
    assert again.content() == expected
    checkpointer.close()


@pytest.mark.slow
def test_a_storage_that_does_not_answer_is_no_damage(store: Store) -> None:
    def loads(fault: Callable[[str, str, int], Fault]) -> FaultyBackend:
        backend = FaultyBackend(open_backend(store.url), fault, reads=True)
        trainer = Trainer(1)
        cnr_store.load(
            backend, trainer.model, trainer.optimizer, fallback=True, limits=cnr_store.Limits(workers=1)
        )
        return backend

    log = loads(lambda *_: None).log
    all_read = log.index(("list_names", "tombstones"))
    for number in range(all_read):
        with pytest.raises(StorageError):
            loads(fault_at(number, "before"))
    for number in range(all_read, len(log)):  # the model is loaded, and its next save is whole
        loads(fault_at(number, "before"))


def test_a_version_of_a_newer_format(store: Store, tmp_path: Path) -> None:
    forgery = Forgery(store.url, tmp_path / "forged")
    forgery.cnr["requires"] = ["telepathy"]
    forgery.sign()
    trainer = Trainer(1)
    restored = cnr_store.load(forgery.url, trainer.model, trainer.optimizer, fallback=True)
    assert restored.version.id == store.ids[2]
    assert "telepathy" in restored.skipped[0][1]


def test_one_cause_is_told_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """All versions depend on the first one: its damage is said once, with the versions that fall with it."""
    with (
        store.damaged(store.key(0, f"{WEIGHT}/c/0/0")),
        Trainer(1).checkpointer(store.url) as checkpointer,
        pytest.raises(CorruptionError) as caught,
    ):
        checkpointer.load(fallback=True)
    (cause,) = str(caught.value).splitlines()[1:]
    assert cause.endswith(f"(versions {', '.join(reversed(store.ids))})")
    assert store.key(0, f"{WEIGHT}/c/0/0") in cause
    assert "salvage=True" in caught.value.__notes__[0]
    skipped = [record.message for record in caplog.records if "skipped" in record.message]
    assert [text.endswith(f"skipped: the same as {store.ids[-1]}") for text in skipped] == [
        False,
        True,
        True,
        True,
    ]


def test_training_goes_on_from_the_sound_version(store: Store) -> None:
    """The next save leans on what was loaded, not on what was skipped, and is the newest one."""
    trainer = Trainer(1)
    with store.damaged(store.key(3, f"{WEIGHT}/c/0/0")), trainer.checkpointer(store.url) as checkpointer:
        checkpointer.load(fallback=True)
        trainer.step([7, 400])
        made = checkpointer.save(4).result()
        expected = trainer.content()
        assert (made.previous, made.kind) == (store.ids[2], "delta")
        again = Trainer(2)
        with again.checkpointer(store.url) as other:
            assert other.load().version.id == made.id
        assert again.content() == expected
    _remove(store, made.id)


def _remove(store: Store, version: str) -> None:
    backend = open_backend(store.url)
    delete_version(backend, version)
    for name in backend.list_names(layout.WRITERS):
        if version.startswith(name.partition(".")[0]):  # the claim, and the mark that closes it
            backend.delete(f"{layout.WRITERS}/{name}")


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("at", [3, 8, 12])
def test_a_version_that_is_removed_while_it_is_read_is_no_damage(
    at: int, fallback: bool, tmp_path: Path
) -> None:
    url, model = str(tmp_path), torch.nn.Embedding(100, 4)
    for step in (1, 2, 3):
        cnr_store.save(url, model, step=step, policy="full")
    cnr_store.pin(url, 1)
    operations = 0

    def overtake(operation: str, key: str, index: int) -> None:
        nonlocal operations
        operations += 1
        if operations == at:
            cnr_store.save(url, model, step=4, policy="full")
            cnr_store.gc(url, keep_last=1)

    place = FaultyBackend(open_backend(url), overtake, reads=True)
    restored = cnr_store.load(place, torch.nn.Embedding(100, 4), fallback=fallback)
    assert restored.skipped == ()
    assert restored.step == 4 if at < 12 else restored.step >= 3  # or it was read before it went
