"""A fault, a kill or a stop at every storage operation of a fold: the version always reads the same."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Backend, BackendError, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, CheckpointError, compact
from cnr_store.catalog.catalog import Catalog
from cnr_store.format import layout
from tests.nightly import NIGHT, of_today
from tests.s3_server import S3Server
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.support import folding_process
from tests.test_store.support.faults import fault_at, forget, to_strike
from tests.test_store.support.fork_server import ForkServer
from tests.test_store.support.places import quick_folder

pytestmark = pytest.mark.slow

KINDS: list[Fault] = ["before", "after", "full"]
Objects = dict[str, bytes]
Arrays = dict[str, np.ndarray[Any, Any]]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(40, 4, sparse=True)
        self.item = nn.Embedding(30, 20, sparse=True)


@pytest.fixture(scope="module")
def stored() -> tuple[Objects, Arrays]:
    """The objects of a store whose newest version leans on others, and what that version reads as."""
    url, model = f"memory://{uuid.uuid4().hex}", Two()
    options: dict[str, Any] = {
        "policy": "consecutive",
        "codec": {"item": RELATIVE},
        "job": cnr_store.Job(rng=False),
    }
    with Checkpointer(url, model, None, **options) as checkpointer:
        for step in range(4):
            with torch.no_grad():
                model.user.weight[step] += 1
                model.item.weight[step : step + 4] *= -2
            checkpointer.touch("user", [step])
            checkpointer.touch("item", range(step, step + 4))
            checkpointer.save(step).result()
    backend = open_backend(url)
    found = {key: backend.get(key) for key, _ in backend.list_keys("")}
    expected = cnr_store.state_dict(url)
    forget(url)
    return found, expected


def filled(root: str, stored: Objects) -> Backend:
    backend = open_backend(f"{root}/{uuid.uuid4().hex}")
    for key, data in stored.items():
        backend.put(key, data)
    return backend


def reads(backend: Backend, expected: Arrays) -> bool:
    """Check that the latest version reads as ever; whether by its fold."""
    found = cnr_store.state_dict(backend)
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in expected.items()
    }
    catalog = Catalog(backend)
    return catalog.find_fold(catalog.find().id) is not None


def finish(backend: Backend, expected: Arrays) -> None:
    """What must hold after any fault: the next attempt succeeds, nothing is left of others, and the fold suffices."""
    folded = reads(backend, expected)
    report = compact(backend)
    assert report.outcome == ("already folded" if folded else "folded")
    catalog = Catalog(backend)
    fold = catalog.find_fold(report.version)
    assert fold is not None
    listed = dict(backend.list_keys(layout.FOLDS))
    assert sum(listed.values()) == fold.nbytes
    assert all(key == fold.key() or f"/{fold.nonce}/" in key for key in listed)
    for key, _ in list(backend.list_keys(layout.VERSIONS)):
        if layout.VersionId.parse(key.split("/")[1]) and not key.startswith(f"versions/{report.version}/"):
            backend.delete(key)
    assert reads(backend, expected)
    if backend.url.startswith("memory:"):
        forget(backend.url)


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_at_every_operation(root: str, kind: Fault, stored: tuple[Objects, Arrays]) -> None:
    objects, expected = stored
    counting = FaultyBackend(filled(root, objects), lambda *_: None, reads=True)
    assert compact(counting, workers=1).outcome == "folded"
    assert len(counting.log) > 30
    for number in to_strike(counting.log):
        inner = filled(root, objects)
        backend = FaultyBackend(inner, fault_at(number, kind), reads=True)
        try:
            outcome = compact(backend, workers=1).outcome
        except (CheckpointError, BackendError):
            outcome = "failed"
        operation, _ = backend.log[number]
        if operation == "create":
            assert outcome == ("folded" if kind == "after" else "failed")
        elif operation == "put":
            assert outcome == "failed"
            assert not reads(inner, expected)
        finish(inner, expected)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_storage_is_down_from_an_operation_on(kind: Fault, stored: tuple[Objects, Arrays]) -> None:
    objects, expected = stored
    root = f"memory://{uuid.uuid4().hex}"
    counting = FaultyBackend(filled(root, objects), lambda *_: None, reads=True)
    compact(counting, workers=1)
    for number in to_strike(counting.log):
        inner = filled(root, objects)

        down = fault_at(number, kind, "before")
        operation, _ = counting.log[number]
        if operation == "delete" or number > [each for each, _ in counting.log].index("create"):
            assert compact(FaultyBackend(inner, down, reads=True), workers=1).outcome == "folded"
        else:
            with pytest.raises((CheckpointError, BackendError)):
                compact(FaultyBackend(inner, down, reads=True), workers=1)
        finish(inner, expected)
    forget(root)


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.parametrize("kind", ["before", "after"])
def test_faults_on_s3(kind: Fault, s3_server: S3Server, stored: tuple[Objects, Arrays]) -> None:
    """A sample: the first put, one in the middle, the manifest, the record, and the look at the version behind it.

    By day each is struck by one of the kinds.
    """
    objects, expected = stored
    folder = uuid.uuid4().hex

    def copied(name: str) -> Backend:
        backend = open_backend(s3_server.url(f"{folder}/{name}"), **s3_server.storage_options)
        for key, data in objects.items():
            backend.put(key, data)
        return backend

    counting = FaultyBackend(copied("counted"), lambda *_: None, reads=True)
    assert compact(counting, workers=1).outcome == "folded"
    names = [operation for operation, _ in counting.log]
    create, first = names.index("create"), names.index("put")
    numbers = (first, (first + create) // 2, create - 1, create, create + 1)
    for number in numbers if NIGHT else numbers[KINDS.index(kind) :: 2]:
        inner = copied(str(number))
        with suppress(CheckpointError, BackendError):
            compact(FaultyBackend(inner, fault_at(number, kind), reads=True), workers=1)
        finish(inner, expected)


def test_a_record_that_arrives_late_finds_its_objects(stored: tuple[Objects, Arrays]) -> None:
    """The request was given up; then storage carries it out after all."""
    objects, expected = stored
    inner = filled(f"memory://{uuid.uuid4().hex}", objects)
    sent: dict[str, bytes] = {}

    class Slow(FaultyBackend):
        def _create(self, key: str, data: bytes) -> bool:
            sent[key] = data
            return super()._create(key, data)

    with pytest.raises(CheckpointError):
        compact(Slow(inner, lambda operation, *_: "before" if operation == "create" else None))
    assert not reads(inner, expected)
    ((key, data),) = sent.items()
    inner.create(key, data)
    assert reads(inner, expected)
    finish(inner, expected)


class Folders(ForkServer):
    """The process that forks those that fold."""

    def __init__(self) -> None:
        super().__init__(folding_process)

    def start(self, url: str, at: int = -1, sent: int = signal.SIGKILL) -> int:
        child = self.ask({"url": url, "at": at, "signal": sent})
        assert isinstance(child, int)
        return child

    def wait(self, child: int) -> str:
        return str(self.ask({"wait": child}))


@pytest.fixture(scope="module")
def folders() -> Iterator[Folders]:
    found = Folders()
    yield found
    found.close()


def operations(root: str, stored: Objects) -> list[str]:
    counting = FaultyBackend(filled(root, stored), lambda *_: None, reads=True)
    compact(counting)
    return [operation for operation, _ in counting.log]


def test_killed_at_every_operation(folders: Folders, stored: tuple[Objects, Arrays]) -> None:
    objects, expected = stored
    with quick_folder() as root:
        names = operations(root, objects)
        for number in of_today(range(len(names)), 10):
            backend = filled(root, objects)
            assert folders.wait(folders.start(backend.url, number)) == "killed"
            folded = reads(backend, expected)
            assert folded <= (number > names.index("create"))
            finish(backend, expected)


def test_processes_that_fold_at_once(folders: Folders, stored: tuple[Objects, Arrays]) -> None:
    objects, expected = stored
    with quick_folder() as root:
        for _ in range(4):
            backend = filled(root, objects)
            children = [folders.start(backend.url) for _ in range(3)]
            outcomes = sorted(folders.wait(child) for child in children)
            assert outcomes == ["already folded", "already folded", "folded"]
            finish(backend, expected)


def test_stopped_and_woken_when_another_has_folded(folders: Folders, stored: tuple[Objects, Arrays]) -> None:
    """A zombie puts its last objects, and comes too late with its record, after another's fold is there."""
    objects, expected = stored
    with quick_folder() as root:
        names = operations(root, objects)
        create = names.index("create")
        puts = [number for number, name in enumerate(names) if name == "put"]
        for number in [0, *puts[::4], puts[-1], create]:
            backend = filled(root, objects)
            zombie = folders.start(backend.url, number, signal.SIGSTOP)
            assert folders.wait(zombie) == "stopped"
            assert folders.wait(folders.start(backend.url)) == "folded"
            os.kill(zombie, signal.SIGCONT)
            assert folders.wait(zombie) == "already folded"
            finish(backend, expected)


def test_stopped_and_woken_when_the_version_is_gone(folders: Folders, stored: tuple[Objects, Arrays]) -> None:
    objects, _ = stored
    with quick_folder() as root:
        create = operations(root, objects).index("create")
        for number in (create - 1, create):
            backend = filled(root, objects)
            zombie = folders.start(backend.url, number, signal.SIGSTOP)
            assert folders.wait(zombie) == "stopped"
            version = Catalog(backend).find().id
            for room in (layout.VERSIONS, layout.FOLDS):
                for key, _ in sorted(
                    backend.list_keys(layout.version_key(version, prefix=room)), reverse=True
                ):
                    backend.delete(key)
            os.kill(zombie, signal.SIGCONT)
            assert folders.wait(zombie) == "VersionNotFoundError"
            assert list(backend.list_keys(layout.FOLDS)) == []
