"""Jobs killed while they save: the newest committed version stays exact, and leftovers never mix into others."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_codecs import RowCodec, decode_into, parse
from cnr_store import Checkpointer, VersionInfo
from cnr_store.policies.policy import PolicyName
from tests.nightly import NIGHT, by_day
from tests.test_store.support import killed_trainer
from tests.test_store.support.fork_server import ForkServer
from tests.test_store.support.killed_trainer import (
    RELATIVE,
    TABLES,
    Job,
    codec_of,
    make_training,
    state_arrays,
    state_codec_of,
)
from tests.test_store.support.same_arrays import assert_same_arrays

pytestmark = pytest.mark.slow

Arrays = dict[str, np.ndarray[Any, Any]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

# At night six stores: at least 48 kills, of which at least 30 leave objects without a commit record.
CASES = [
    ("full", 8),
    ("one-shot", 4),
    ("consecutive", 2),
    ("consecutive", 32),
    ("intermittent", 3),
    ("intermittent", 8),
    ("consecutive", RELATIVE),
]
AT_NIGHT = [("consecutive", 2), ("intermittent", 8)]
KILLS, LEFTOVERS = (8, 5) if NIGHT else (5, 3)
MOST_KILLS = 40
DEADLINE_SECONDS = 60
POLL_SECONDS = 0.0003


class Trainers(ForkServer):
    """The process that forks training jobs."""

    def __init__(self) -> None:
        super().__init__(killed_trainer)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    found = Trainers()
    yield found
    found.close()


@dataclass
class Expected:
    """What a version must load to, and which rows its chain wrote over the last whole version."""

    arrays: Arrays
    step: int
    changed: dict[str, Flags]


@dataclass
class Oracle:
    """Computes each version from what its job noted before saving, by the policy's definition alone."""

    side: Path
    policy: PolicyName
    bits: int
    known: dict[str, Expected] = field(default_factory=dict)

    def expect(self, infos: list[VersionInfo]) -> None:
        for info in infos:
            if info.id not in self.known:
                self.known[info.id] = self._compute(info)

    def _compute(self, info: VersionInfo) -> Expected:
        job, save = info.metadata
        with np.load(self.side / f"{job}-{save}.npz") as noted:
            arrays: Arrays = dict(noted)
        before = self.known[info.previous] if info.previous else None
        changed, rows_written = {}, 0
        for name, (rows, _) in TABLES.items():
            written = np.zeros(rows, bool)
            written[arrays.pop(f"touched/{name}")] = True
            if info.kind == "baseline" or before is None:
                written[:], changed[name] = True, np.zeros(rows, bool)
            else:
                changed[name] = written | before.changed[name]
                written = written if self.policy == "consecutive" else changed[name]
            for kind, codec in (("model", codec_of(self.bits)), ("sum", state_codec_of(self.bits))):
                key = f"{kind}/tables.{name}.weight"
                arrays[key] = _stored(arrays[key], codec)
                if before is not None:
                    arrays[key][~written] = before.arrays[key][~written]
            rows_written += int(written.sum())
        assert info.rows == rows_written, "rows were written that the policy does not ask for, or too few"
        step = int(arrays.pop("step"))
        assert info.step == step
        return Expected(arrays, step, changed)

    def check(self, url: str, info: VersionInfo) -> None:
        """Load a version into a fresh model and compare everything, bit for bit."""
        model, optimizer = make_training(seed=12345)
        with Checkpointer(url, model, optimizer) as checkpointer:
            restored = checkpointer.load(info)
        expected = self.known[info.id]
        assert restored.version.id == info.id
        assert (restored.step, restored.reader) == (expected.step, {"step": expected.step})
        assert_same_arrays(state_arrays(model, optimizer), expected.arrays)


def _stored(values: np.ndarray[Any, Any], codec: RowCodec) -> np.ndarray[Any, Any]:
    payload = parse(codec.encode_rows(values, None, len(values), element="float32"))
    out = np.empty_like(values)
    decode_into(payload, out, np.ones(len(out), np.uint8))
    return out


def _objects(folder: Path) -> dict[str, Path]:
    """Objects below a folder by their relative name; temporary files are none."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".tmp-")
    }


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()} if folder.exists() else set()


def _leftovers(store: Path) -> dict[str, dict[str, str]]:
    """Attempts without a commit record that left objects: the digest of each object."""
    return {
        attempt: {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in _objects(store / "versions" / attempt).items()
        }
        for attempt in _names(store / "versions")
        if not (store / "versions" / attempt / "zarr.json").exists()
        and _objects(store / "versions" / attempt)
    }


@dataclass
class Killer:
    """Starts jobs over one store and kills each at a random moment of one of its saves."""

    trainers: Trainers
    store: Path
    side: Path
    policy: PolicyName
    bits: int
    draw: np.random.Generator
    jobs: int = 0

    def kill_one(self) -> None:
        pipe_path = self.side / f"{self.jobs}.pipe"
        os.mkfifo(pipe_path)
        pipe = os.open(pipe_path, os.O_RDONLY | os.O_NONBLOCK)
        moment = self._moment()
        job: Job = {
            "url": str(self.store),
            "side": str(self.side),
            "policy": self.policy,
            "bits": self.bits,
            "seed": 7,
            "job": self.jobs,
        }
        self.jobs += 1
        process = self.trainers.ask(job)
        try:
            self._wait_for(moment, pipe)
        finally:
            os.kill(process, signal.SIGKILL)  # nobody has waited for it, so the id is still its own
            ended = self.trainers.ask("reap")
            os.close(pipe)
        assert ended["signal"] == signal.SIGKILL

    def _moment(self) -> Callable[[], bool]:
        """A random condition on the folder: a claim, so many objects of the n-th attempt, or its commit record."""
        versions, writers = self.store / "versions", self.store / "writers"
        before = _names(versions)
        claims = len(list(writers.iterdir())) if writers.exists() else 0
        position = int(self.draw.integers(0, 3))
        usual = max((len(_objects(versions / name)) for name in before), default=32)
        wanted = int(self.draw.integers(1, usual + 1))
        if self.draw.random() < 0.1:
            return lambda: writers.exists() and len(list(writers.iterdir())) > claims

        def reached() -> bool:
            made = sorted(_names(versions) - before)
            if len(made) <= position:
                return False
            objects = _objects(versions / made[position])
            return len(objects) >= wanted or "zarr.json" in objects

        return reached

    def _wait_for(self, moment: Callable[[], bool], pipe: int) -> None:
        began = time.monotonic()
        while not moment():
            readable, _, _ = select.select([pipe], [], [], POLL_SECONDS)
            if readable and os.read(pipe, 64) == b"":
                failure = self.side / "failure"
                pytest.fail(f"the job ended by itself: {failure.read_text() if failure.exists() else '?'}")
            if time.monotonic() - began > DEADLINE_SECONDS:
                pytest.fail("the job did not get so far")


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("policy", "bits"), by_day(CASES, AT_NIGHT))
def test_newest_version_survives_kills(
    trainers: Trainers, tmp_path: Path, policy: PolicyName, bits: int
) -> None:
    store, side = tmp_path / "store", tmp_path / "side"
    side.mkdir()
    seed = CASES.index((policy, bits))
    killer = Killer(trainers, store, side, policy, bits, np.random.default_rng(seed))
    oracle = Oracle(side, policy, bits)
    leftovers: dict[str, dict[str, str]] = {}
    newest = ""
    while killer.jobs < KILLS or len(leftovers) < LEFTOVERS or not newest:
        assert killer.jobs < MOST_KILLS, f"{len(leftovers)} of {killer.jobs} kills left objects behind"
        attempts = _names(store / "versions")
        killer.kill_one()
        fresh = _names(store / "versions") - attempts
        assert not attempts or not fresh or min(fresh) > max(attempts), "an id was used again"
        now = _leftovers(store)
        assert {attempt: now.get(attempt) for attempt in leftovers} == leftovers, "leftovers were touched"
        leftovers = now
        infos = cnr_store.versions(str(store))
        assert not leftovers.keys() & {info.id for info in infos}
        if infos:
            assert infos[-1].id >= newest, "a committed version is gone"
            newest = infos[-1].id
            oracle.expect(infos)
            oracle.check(str(store), infos[-1])
    _go_on(store)
    for attempt in leftovers:
        shutil.rmtree(store / "versions" / attempt)
    infos = cnr_store.versions(str(store))
    for info in infos[:-1]:
        oracle.check(str(store), info)
    assert infos[-1].previous == newest


def _go_on(store: Path) -> None:
    """A job that nobody kills continues the store."""
    model, optimizer = make_training(seed=1)
    with Checkpointer(str(store), model, optimizer, bits=32) as checkpointer:
        restored = checkpointer.load()
        info = checkpointer.save(restored.step + 1).result()
    assert info.previous == restored.version.id
    other, other_optimizer = make_training(seed=2)
    assert cnr_store.load(str(store), other, other_optimizer).version.id == info.id
