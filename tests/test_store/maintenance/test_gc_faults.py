"""A fault, or the end of the process, at every storage operation of retention: what is visible stays whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import Backend, BackendError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import chain
from cnr_store.format.layout import VersionId, version_key
from tests.nightly import NIGHT, of_today
from tests.s3_server import S3Server
from tests.test_store.support.faults import fault_at, forget, to_strike
from tests.test_store.support.places import quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    objects,
    remains,
    visible,
)
from tests.test_store.support.small_model import make_model

KINDS: list[Fault] = ["before", "after", "full"]
ENDS: list[Fault] = ["before", "after"]
S3_STRIDE = 18 if NIGHT else 36


@dataclass(frozen=True)
class Prepared:
    """A store as objects, what its versions hold, and which of them retention must keep.

    Three generations; a chain that a fold ends, and one that a pin needs; an attempt that failed and could not be
    removed, one that crashed under the oldest claim, and one under way under the newest.
    """

    objects: dict[str, bytes]
    needed: dict[str, list[str]]
    kept: list[str]
    leftovers: list[str]
    under_way: str

    def copy(self, url: str, **options: object) -> Backend:
        backend = open_backend(url, **options)
        if "://" not in url:
            for (
                key,
                data,
            ) in self.objects.items():  # a tenth of what puts take, which are safe against a crash
                path = Path(url, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            return backend
        with ThreadPoolExecutor(8 if url.startswith("s3:") else 1) as pool:
            list(pool.map(backend.put, self.objects, self.objects.values()))
        return backend

    def check(self, backend: Backend) -> None:
        """Whatever has happened: what is visible is whole, byte for byte, and what is kept is there."""
        there = visible(backend)
        assert set(self.kept) <= set(there)
        needed = {key for version in there for key in self.needed[version]}
        assert all(backend.get(key) == self.objects[key] for key in needed)

    def finish(self, backend: Backend) -> None:
        """The next one finishes what was begun."""
        cnr_store.gc(backend, keep_last=2, grace_seconds=0)
        self.check(backend)
        assert visible(backend) == self.kept
        for version in {*self.needed, *self.leftovers} - {*self.kept}:
            assert not remains(backend, version), version
        assert remains(backend, self.under_way)
        assert not [key for key, _ in backend.list_keys("tombstones") if key.split("/")[1] in self.kept]


def needed_objects(backend: Backend, version: str) -> list[str]:
    """Keys of all that a version is read from: its own objects, and those of each link of its chains."""
    catalog = Catalog(backend)
    record = catalog.record(version)
    paths = [path for path, entry in record.arrays.items() if entry.kind != "dense"]
    folders = {f"{each.prefix}/{each.id}" for path in paths for each in chain(catalog, record, path)}
    return [key for folder in {*folders, f"versions/{version}"} for key, _ in backend.list_keys(folder)]


def continued(backend: Backend, step: int) -> tuple[Trainer, str]:
    """A new run goes on from the newest version, and saves once. It is not closed."""
    trainer = Trainer(backend, seed=step)
    trainer.checkpointer.load()
    return trainer, trainer.save(step)


def crashed_attempt(backend: Backend, version: str, number: int) -> str:
    claim = VersionId.parse(version)
    assert claim is not None
    attempt = str(VersionId(claim.claim, number))
    backend.put(version_key(attempt, "tables/users/weight/c/0/0"), b"rows")
    backend.put(version_key(attempt, "manifest"), b"a manifest")
    return attempt


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    url = f"memory://{uuid.uuid4().hex}"
    backend = open_backend(url)
    failing = {"now": False}

    def fault(operation: str, key: str, _: int) -> Fault:
        hit = operation == "delete" or (operation == "put" and key.endswith("/manifest"))
        return "before" if failing["now"] and hit else None

    first = Trainer(FaultyBackend(backend, fault))
    made = [first.save(1), first.save(2)]
    failing["now"] = True
    with pytest.raises(cnr_store.SaveError):
        first.save(3)
    failing["now"] = False
    made += [first.save(4, full=True), first.save(5), first.save(6)]
    first.close()
    second, version = continued(backend, 7)
    made.append(version)
    second.close()
    cnr_store.compact(backend, made[5])
    live, version = continued(backend, 8)
    made.append(version)
    cnr_store.pin(backend, made[1])
    crashed = crashed_attempt(backend, made[0], 99)
    under_way = crashed_attempt(backend, made[6], 99)
    kept = [*made[:2], *made[5:]]  # pinned, with its base; asked for, down to the fold
    leftovers = [crashed, f"{made[0][:16]}00000003"]
    needed = {version: needed_objects(backend, version) for version in made}
    yield Prepared(objects(backend), needed, kept, leftovers, under_way)
    live.close()
    forget(url)


def collect(backend: Backend, fault: Callable[[str, str, int], Fault]) -> FaultyBackend:
    """Run retention over storage that fails like this; returns the storage."""
    faulty = FaultyBackend(backend, fault, reads=True)
    with suppress(BackendError):
        cnr_store.gc(faulty, keep_last=2, grace_seconds=0)
    return faulty


def operations(prepared: Prepared, url: str) -> list[tuple[str, str]]:
    backend = prepared.copy(url)
    log = collect(backend, lambda *_: None).log
    prepared.check(backend)
    return log


def struck(prepared: Prepared, root: str, kinds: list[Fault], kind: Fault) -> list[int]:
    """The operations to strike: in memory each by each kind of fault, in a folder each by one of the kinds.

    What is injected stands before the storage, where it is the same for both.
    """
    stride = 1 if "://" in root else len(kinds)
    return to_strike(operations(prepared, f"{root}/count"))[kinds.index(kind) % stride :: stride]


@pytest.mark.slow
def test_what_is_kept_and_what_is_left(prepared: Prepared, root: str) -> None:
    backend = prepared.copy(f"{root}/here")
    report = cnr_store.gc(backend, keep_last=2, grace_seconds=0)
    assert list(report.kept) == prepared.kept
    assert sorted(report.leftovers) == sorted(prepared.leftovers)
    assert visible(backend) == prepared.kept
    prepared.finish(backend)
    assert check_exact(backend, contents(prepared.copy(f"{root}/before"))) == prepared.kept
    model, optimizers = make_model("adagrad", seed=0)
    assert (
        cnr_store.load(backend, model, optimizers, job=cnr_store.Job(rng=False)).version.id
        == prepared.kept[-1]
    )


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fault_at_every_operation(prepared: Prepared, root: str, kind: Fault) -> None:
    for number in struck(prepared, root, KINDS, kind):
        url = f"{root}/{number}"
        backend = prepared.copy(url)
        collect(backend, fault_at(number, kind))
        prepared.check(backend)
        prepared.finish(backend)
        forget(url)


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.parametrize("last", ENDS)
def test_storage_is_down_from_every_operation_on(prepared: Prepared, root: str, last: Fault) -> None:
    """As a process that ends there leaves it: nothing follows, and the operation itself happened or did not."""
    for number in struck(prepared, root, ENDS, last):
        url = f"{root}/{number}"
        backend = prepared.copy(url)
        collect(backend, fault_at(number, last, then="before"))
        prepared.check(backend)
        prepared.finish(backend)
        forget(url)


@pytest.mark.slow
def test_process_killed_at_every_operation(prepared: Prepared, jobs: Jobs) -> None:
    with quick_folder() as root:
        for number in of_today(range(len(operations(prepared, f"{root}/count"))), 10):
            backend = prepared.copy(f"{root}/{number}")
            _, how = jobs.run("collect", f"{root}/{number}", keep_last=2, at=number, signal="SIGKILL")
            prepared.check(backend)
            prepared.finish(backend)
            # The order of concurrent operations varies, their number hardly does.
            assert how == "killed" or number > 20


@pytest.mark.nightly
@pytest.mark.server
@pytest.mark.slow
def test_faults_on_s3(prepared: Prepared, s3_server: S3Server) -> None:
    options = s3_server.storage_options
    root = uuid.uuid4().hex
    backend = prepared.copy(s3_server.url(f"{root}/count"), **options)
    count = len(collect(backend, lambda *_: None).log)
    prepared.finish(backend)
    for number, kind in zip(range(4, count, S3_STRIDE), cycle(ENDS), strict=False):
        backend = prepared.copy(s3_server.url(f"{root}/{number}"), **options)
        collect(backend, fault_at(number, kind))
        prepared.check(backend)
        prepared.finish(backend)
