"""`verify` says what is damaged, what is lost or may be, and what can still be restored."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import cnr_store
from cnr_backends import Backend, StorageError, open_backend
from cnr_backends.testing.faulty import FaultyBackend
from cnr_store import (
    CheckpointError,
    EmptyStoreError,
    FormatError,
    VerifyReport,
    VersionNotFoundError,
    verify,
)
from cnr_store.chains.array_reader import chain
from cnr_store.format import layout
from cnr_store.format.record import Record
from tests.test_store.support.faults import Spoil, fault_at
from tests.test_store.support.tampering import DENSE, WEIGHT, Forgery, Model
from tests.test_store.support.trainer_model import Job, Setting

ATTEMPT = "000001-0123abcd.00000009"


@pytest.fixture
def store(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "store")
    return tmp_path / "store"


def ids(url: Path) -> list[str]:
    return [info.id for info in cnr_store.versions(url)]


def keys(report: VerifyReport) -> set[str | None]:
    return {finding.key for finding in report.problems}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("deep", [False, True])
def test_sound_store(store: Path, deep: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, deep=deep, progress=lambda done, known: seen.append((done, known)))
    assert (report.ok, report.deep) == (True, deep)
    assert report.versions == report.restorable == tuple(ids(store))
    assert (report.suspicious, report.leftovers, report.voids) == ((), (), ())
    held = [path for path in files(store / "versions") if path.parent != store / "versions"]
    assert (report.objects, report.nbytes) == (len(held), sum(path.stat().st_size for path in held))
    assert seen == sorted(seen)
    assert seen[-1] == (report.nbytes, report.nbytes)


@pytest.mark.slow
def test_every_policy_on_another_backend() -> None:
    for policy in ("full", "one-shot", "consecutive", "intermittent"):
        backend = open_backend(f"memory://{uuid.uuid4().hex}")
        job = Job(backend, "sgd", Setting(policy, 4))
        for row in range(3):
            job.train({"items": [row, 264], "users": [7]})
            job.save()
        job.close()
        report = verify(backend, deep=True)
        assert report.ok
        assert len(report.restorable) == 3


def test_nothing_is_written(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in files(store)}
    backend = FaultyBackend(open_backend(store), lambda *_: None)
    verify(backend, deep=True)
    assert not backend.log
    assert {path: path.stat().st_mtime_ns for path in files(store)} == before


def test_one_version_is_checked_with_what_it_leans_on_and_nothing_else(store: Path) -> None:
    older, newer = ids(store)
    lost = store / "versions" / newer / WEIGHT / "c/0/0"
    lost.unlink()
    assert verify(store, older, deep=True).ok
    for version in (newer, "latest", 1, cnr_store.versions(store)[-1]):
        report = verify(store, version)
        assert (report.versions, report.restorable) == ((newer,), ())
        assert keys(report) == {str(lost.relative_to(store))}
    (store / "versions" / older / WEIGHT / "c/0/0").unlink()
    assert len(verify(store, newer).problems) == 2


def test_what_leans_on_a_damaged_version_is_not_restorable(store: Path) -> None:
    older, newer = ids(store)
    shard = store / "versions" / older / WEIGHT / "c/0/0"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert verify(store).restorable == (older, newer)
    report = verify(store, deep=True)
    (problem,) = report.problems
    assert report.restorable == ()
    assert (problem.version, problem.key, problem.path) == (older, str(shard.relative_to(store)), WEIGHT)
    assert problem.rows is not None


@pytest.mark.parametrize("name", ["state/main.json", f"{DENSE}/c/0/0"])
def test_what_only_one_version_needs(store: Path, name: str) -> None:
    older, newer = ids(store)
    (store / "versions" / older / name).unlink()
    assert verify(store).restorable == (newer,)


def test_metadata_for_plain_readers_is_not_needed_to_restore(store: Path) -> None:
    older, newer = ids(store)
    document = store / "versions" / older / DENSE / "zarr.json"
    document.write_bytes(document.read_bytes().replace(b'"lin.weight.0"', b'"nil.weight.0"'))
    assert verify(store).ok
    report = verify(store, deep=True)
    assert keys(report) == {str(document.relative_to(store))}
    assert report.restorable == (older, newer)
    document.write_bytes(document.read_bytes().replace(b'"nil.weight.0"', b'"lin.weight.0" '))
    assert verify(store, deep=True).ok
    document.unlink()
    for deep in (False, True):
        report = verify(store, deep=deep)
        (problem,) = report.problems
        assert problem.key == str(document.relative_to(store))
        assert "is lost" in problem.what
        assert report.restorable == (older, newer)


def test_documents_of_rows_and_groups_are_no_objects(store: Path) -> None:
    found = {str(path.relative_to(store)) for path in store.rglob("zarr.json")}
    dense = ("dense/model/lin.weight", "dense/model/lin.bias", "dense/state/reader.large")
    parts = ("", *(f"{path}/" for path in dense))
    assert found >= {"zarr.json", "versions/zarr.json"}
    assert found <= {"zarr.json", "versions/zarr.json"} | {
        f"versions/{version}/{part}zarr.json" for version in ids(store) for part in parts
    }


def test_lost_record_of_the_newest_version(store: Path) -> None:
    """The one before it is the latest then, and nothing can prove that it was not: so it is said."""
    older, newer = ids(store)
    (store / layout.record_key(newer)).unlink()
    assert ids(store) == [older]
    for version in (None, "latest"):
        report = verify(store, version)
        assert report.ok
        assert report.restorable == (older,)
        assert [(finding.version, finding.key) for finding in report.suspicious] == [
            (newer, layout.record_key(newer))
        ]
        assert "what a save writes after all its data is there" in str(report.suspicious[0])
    assert verify(store).leftovers[0].place == f"versions/{newer}"
    for lost in ("manifest", "state/main.json"):  # the other one tells that all data had been put
        (store / layout.version_key(newer, lost)).rename(store / "aside")
        assert [finding.version for finding in verify(store).suspicious] == [newer]
        (store / "aside").rename(store / layout.version_key(newer, lost))


def test_lost_record_that_a_later_version_refers_to(store: Path) -> None:
    older, newer = ids(store)
    (store / layout.record_key(older)).unlink()
    report = verify(store)
    assert report.restorable == ()
    assert f"version {newer} refers to it" in str(report.problems[0])
    tombstone = store / layout.version_key(older, prefix=layout.TOMBSTONES)
    tombstone.parent.mkdir()
    tombstone.write_bytes(b"{}")
    assert layout.record_key(older) not in keys(verify(store))


def test_attempts_that_were_given_up(tmp_path: Path) -> None:
    job = Job(open_backend(tmp_path), "sgd", Setting("consecutive", 4))
    job.train({"items": [1]})
    job.save()
    job.train({"items": [2]})
    assert job.save(spoil=Spoil("record", "before")) is None
    job.close()
    report = verify(tmp_path, deep=True)
    assert (report.ok, report.suspicious, report.leftovers, len(report.voids)) == (True, (), (), 1)
    for name in ("manifest", "state/main.json"):  # what could not be removed
        job.backend.put(f"versions/{report.voids[0]}/{name}", b"123")
    report = verify(tmp_path, deep=True)
    assert report.ok
    assert not report.suspicious
    assert len(report.voids) == len(report.leftovers) == 1
    assert report.leftovers[0].objects == len(files(tmp_path / report.leftovers[0].place)) - 1


def test_attempt_that_never_ended(store: Path) -> None:
    (store / "versions" / ATTEMPT).mkdir()
    (store / "versions" / ATTEMPT / "x").write_bytes(b"123")
    report = verify(store)
    assert report.ok
    assert not report.suspicious
    assert (report.leftovers[0].objects, report.leftovers[0].nbytes) == (1, 3)


def test_objects_that_no_manifest_knows(store: Path) -> None:
    older, _ = ids(store)
    (store / "versions" / older / WEIGHT / "c/9").mkdir()
    (store / "versions" / older / WEIGHT / "c/9/0").write_bytes(b"12345")
    report = verify(store, deep=True)
    assert report.ok
    (left,) = report.leftovers
    key = f"versions/{older}/{WEIGHT}/c/9/0"
    assert (left.objects, left.nbytes, left.example) == (1, 5, key)


def test_version_that_is_being_removed(store: Path) -> None:
    older, newer = ids(store)
    tombstone = store / layout.version_key(older, prefix=layout.TOMBSTONES)
    tombstone.parent.mkdir()
    tombstone.write_bytes(b"{}")
    report = verify(store)
    assert report.ok
    assert report.restorable == (older, newer)
    assert "marked for removal" in str(report.suspicious[0])


def test_damaged_fold(store: Path) -> None:
    """Reading takes no longer way round by itself; the report says that there is one."""
    older, newer = ids(store)
    cnr_store.compact(store)
    assert verify(store, newer, deep=True).restorable == (newer,)
    record = layout.record_key(newer, layout.FOLDS)
    (shard,) = (store / "folds" / newer).glob(f"*/{WEIGHT}/c/0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    report = verify(store)
    assert report.restorable == (older,)
    assert keys(report) == {str(shard.relative_to(store)), record}
    assert "remove" in str(report.problems[-1])
    assert not _loads(store, newer)
    (store / record).unlink()
    report = verify(store, deep=True)
    assert report.ok
    assert report.restorable == (older, newer)
    assert [finding.key for finding in report.suspicious] == [record]
    assert _loads(store, newer)


def test_a_fold_stands_for_what_lies_beneath_it(store: Path) -> None:
    older, newer = ids(store)
    cnr_store.compact(store)
    (store / "versions" / older / WEIGHT / "c/0/0").unlink()
    assert verify(store, newer, deep=True).ok
    report = verify(store, deep=True)
    assert report.restorable == (newer,)
    assert _loads(store, newer)


@pytest.mark.parametrize("change", [None, b"{", b'{"token": 5}', b'{"generation": 1, "token": "00000000"}'])
def test_claims_must_be_readable(store: Path, change: bytes | None) -> None:
    claim, _ = sorted(files(store / "writers"))  # and the mark that closes it
    if change is None:
        claim.unlink()
    else:
        claim.write_bytes(change)
    report = verify(store)
    assert keys(report) == {f"writers/{claim.name}"}
    assert report.restorable == tuple(ids(store))


def test_rows_that_no_object_holds(base: Path, tmp_path: Path) -> None:
    """A manifest that is signed but incomplete: quick and deep checks count what there must be."""

    def one_row_more(forgery: Forgery) -> None:
        forgery.entry(WEIGHT)["rows"] += 1

    def no_shards(forgery: Forgery) -> None:
        forgery.manifest["arrays"][WEIGHT] = {"index": [], "bytes": [], "tail": []}

    for number, change in enumerate((one_row_more, no_shards)):
        forgery = Forgery(base, tmp_path / str(number))
        change(forgery)
        forgery.sign()
        report = verify(forgery.url, deep=True)
        assert {finding.path for finding in report.problems} == {WEIGHT}
        assert forgery.id not in report.restorable


def test_damage_is_never_raised(store: Path) -> None:
    older, newer = ids(store)
    for key in (layout.record_key(newer), layout.record_key(older), layout.ROOT_KEY):
        (store / key).write_bytes(b"[" * 100)
        asked: tuple[str | int | None, ...] = (None, newer, "latest", 1)
        for version in asked:
            assert not verify(store, version).ok
    assert verify(store).restorable == ()


def test_places_with_nothing_to_check(store: Path, tmp_path: Path) -> None:
    for version in (None, "latest"):
        with pytest.raises(EmptyStoreError):
            verify(tmp_path / "empty", version)
    unknown: tuple[str | int, ...] = ("000009-0123abcd.00000001", "newest", 77)
    for wanted in unknown:
        with pytest.raises(VersionNotFoundError):
            verify(store, wanted)
    zarr.create_group(tmp_path / "other")
    for version in (None, "latest"):
        with pytest.raises(FormatError):
            verify(tmp_path / "other", version)


@pytest.mark.slow
@pytest.mark.parametrize("deep", [False, True])
def test_a_storage_that_does_not_answer_is_no_damage(base: Path, deep: bool) -> None:
    backend = FaultyBackend(open_backend(base), lambda *_: None, reads=True)
    verify(backend, deep=deep)
    for number in range(len(backend.log)):
        broken = FaultyBackend(open_backend(base), fault_at(number, "before"), reads=True)
        with pytest.raises(StorageError):
            verify(broken, deep=deep, workers=1)


class _Removing(FaultyBackend):
    """Removes a version while somebody looks at it."""

    def __init__(self, inner: Backend, version: str, at: str) -> None:
        super().__init__(inner, self._remove, reads=True)
        self._version = version
        self._at = at

    def _remove(self, operation: str, key: str, _: int) -> None:
        folder = layout.version_key(self._version)
        if operation == self._at and key.startswith(folder):
            self.inner.delete(layout.record_key(self._version))
            for gone, _size in list(self.inner.list_keys(folder)):
                self.inner.delete(gone)


@pytest.mark.parametrize("at", ["list_keys", "get_range"])  # the latter is the first read of a chunk
def test_versions_that_are_removed_meanwhile_are_not_damaged(store: Path, at: str) -> None:
    older, newer = ids(store)
    report = verify(_Removing(open_backend(store), newer, at), deep=True)
    assert report.ok
    assert report.versions == report.restorable == (older,)


def test_retention_that_is_faster_than_any_run_is_no_damage(tmp_path: Path) -> None:
    """Each run finds a version, which is removed before its objects are looked at."""
    model, steps = torch.nn.Embedding(9, 2), iter(range(99))
    cnr_store.save(tmp_path, model, step=next(steps))
    inner, removed = open_backend(tmp_path), list[str]()

    def remove(operation: str, key: str, _: int) -> None:
        newest = ids(tmp_path)[-1]
        if operation == "list_keys" and key == layout.version_key(newest):
            cnr_store.save(tmp_path, model, step=next(steps))
            _Removing(inner, newest, "list_keys")._remove(operation, key, 0)
            removed.append(newest)

    report = verify(FaultyBackend(inner, remove, reads=True))
    assert len(removed) == 3
    assert report.ok


@pytest.mark.parametrize("deep", [False, True])
def test_a_version_that_is_folded_meanwhile_is_not_damaged(store: Path, deep: bool) -> None:
    """An attempt was listed, whose record comes while the version beneath is checked."""
    older, newer = ids(store)
    inner = open_backend(store)
    inner.put(layout.version_key(newer, "ab" * 16, "manifest", prefix=layout.FOLDS), b"half")
    folded: list[str] = []

    def fold(operation: str, key: str, _: int) -> None:
        if operation == "list_keys" and key == layout.version_key(older) and not folded:
            folded.append(cnr_store.compact(inner, newer).outcome)

    report = verify(FaultyBackend(inner, fold, reads=True), newer, deep=deep)
    assert (folded, report.ok, report.restorable) == (["folded"], True, (newer,))


def test_long_chains_are_followed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from each version all the way down again."""
    steps = 0
    table = torch.nn.Embedding(50, 4, sparse=True)
    with cnr_store.Checkpointer(
        tmp_path, table, policy="consecutive", bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        for step in range(12):
            checkpointer.touch("weight", [step])
            checkpointer.save(step).result()

    def counted(*args: Any) -> Iterator[Record]:
        nonlocal steps
        for link in chain(*args):
            steps += 1
            yield link

    monkeypatch.setattr("cnr_store.maintenance.verification.verify.chain", counted)
    report = verify(tmp_path)
    assert report.ok
    assert report.restorable == tuple(ids(tmp_path))
    assert steps <= 5 * 12


_MEASURE = """
import resource, sys
from cnr_store import verify
def peak():
    return [int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line][0]
verify(sys.argv[1], deep=True)
before = peak()
assert verify(sys.argv[2], deep=True, workers=1).ok
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_chunks_in_flight(base: Path, tmp_path: Path) -> None:
    """Two regions of 8 MiB are in flight, and twenty times as much is read."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(10 << 20, 8)
    cnr_store.save(tmp_path, table, codec={"id": "cnr_uniform", "scheme": "symmetric", "bits": 2})
    shown = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(base), str(tmp_path)], capture_output=True, check=True
    )
    assert int(shown.stdout) < 48 << 10, "KiB more than for a store of a few rows"


@pytest.mark.slow
def test_restorable_means_that_it_loads(base: Path, tmp_path: Path) -> None:
    """Whatever object is lost."""
    objects = [path.relative_to(base) for path in files(base / "versions")]
    folder = tmp_path / "store"
    shutil.copytree(base, folder)
    for name in objects:
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        report = verify(folder)
        for version in ids(folder):
            assert _loads(folder, version) == (version in report.restorable), (name, version)
        (folder / name).write_bytes(kept)


def _loads(url: Path, version: str) -> bool:
    model = Model(1)
    try:
        cnr_store.load(url, model, torch.optim.Adagrad(model.parameters(), lr=0.1), version)
    except CheckpointError:
        return False
    return True
