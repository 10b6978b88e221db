"""Training that dies again and again and is resumed ends where training that never died ends."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_store.policies.policy import PolicyName
from tests.nightly import NIGHT, by_day
from tests.test_store.support import resumed_trainer
from tests.test_store.support.fork_server import ForkServer
from tests.test_store.support.resumed_trainer import STEPS, Job

pytestmark = pytest.mark.slow

Arrays = dict[str, np.ndarray[Any, Any]]

LOSSLESS = [
    ("full", "momentum"),
    ("one-shot", "adagrad"),
    ("consecutive", "adam"),
    ("intermittent", "adagrad"),
    ("auto", "adam"),
]
# By day there is one for each optimizer.
LOSSLESS_AT_NIGHT = [("one-shot", "adagrad"), ("auto", "adam")]
# How much more or less than without an interruption the loss may be after four restores or more, relative to it:
# about twice what docs/loading.md says was measured.
QUANTIZED = [
    ("intermittent", 8, 0.05),
    ("consecutive", 4, 0.12),
    ("one-shot", 3, 0.2),
    ("intermittent", 2, 0.5),
]
QUANTIZED_AT_NIGHT = [("consecutive", 4, 0.12), ("intermittent", 2, 0.5)]
# Of each of nine trainings: at night at least 36 kills in all. The job that ends has resumed, too.
KILLS, RESUMED, MOST_KILLS = (4, 3, 12) if NIGHT else (3, 2, 12)
MOST_STEPS = STEPS // (KILLS + 2)
DEADLINE_SECONDS = 60


class Trainers(ForkServer):
    """The process that forks training jobs, and the jobs' pipes."""

    def __init__(self) -> None:
        super().__init__(resumed_trainer)
        self._jobs = 0

    def finish(self, folder: Path, kind: str, policy: PolicyName | None = None, bits: int = 32) -> Arrays:
        """Run a job to its end. How training ended."""
        job = self._job(folder, kind, policy, bits)
        with Pipes(folder, job["job"]) as pipes:
            self.ask(job)
            pipes.permit(STEPS)
            killed_by = self.ask("reap")["signal"]
        assert killed_by == 0
        _check_no_failure(folder)
        with np.load(folder / f"{job['job']}.npz") as found:
            return dict(found)

    def kill_one(
        self, folder: Path, kind: str, policy: PolicyName, bits: int, draw: np.random.Generator
    ) -> None:
        """Run a job for a few steps and kill it while or after it makes them: at once, or at a random object."""
        steps = int(draw.integers(1, MOST_STEPS))
        wanted = _objects(folder) + int(draw.integers(0, 120)) if draw.random() < 0.7 else None
        job = self._job(folder, kind, policy, bits)
        with Pipes(folder, job["job"]) as pipes:
            process = self.ask(job)
            try:
                pipes.permit(steps)
                while steps and (wanted is None or _objects(folder) < wanted):
                    steps -= pipes.steps_done(folder)
            finally:
                os.kill(process, signal.SIGKILL)  # nobody has waited for it, so the id is still its own
                killed_by = self.ask("reap")["signal"]
        _check_no_failure(folder)
        assert killed_by == signal.SIGKILL

    def _job(self, folder: Path, kind: str, policy: PolicyName | None, bits: int) -> Job:
        self._jobs += 1
        return {
            "url": str(folder / "store"),
            "side": str(folder),
            "policy": policy,
            "bits": bits,
            "kind": kind,
            "job": self._jobs,
        }


class Pipes:
    """What holds a job back, and what it says."""

    def __init__(self, folder: Path, job: int) -> None:
        self._began = time.monotonic()
        for name in ("permits", "done"):
            os.mkfifo(folder / f"{job}.{name}")
        # For reading, too: opening waits for nobody, and the job's end of it never sees an end.
        self._permits = os.open(folder / f"{job}.permits", os.O_RDWR)
        self._done = os.open(folder / f"{job}.done", os.O_RDWR | os.O_NONBLOCK)

    def permit(self, steps: int) -> None:
        os.write(self._permits, b"s" * steps)

    def steps_done(self, folder: Path) -> int:
        """Steps made since it was asked the last time."""
        if time.monotonic() - self._began > DEADLINE_SECONDS:
            _check_no_failure(folder)
            pytest.fail("the job did not get so far")
        readable, _, _ = select.select([self._done], [], [], 0.0003)
        return len(os.read(self._done, STEPS)) if readable else 0

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._permits)
        os.close(self._done)


def _objects(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder / "store"))


def _check_no_failure(folder: Path) -> None:
    failure = folder / "failure"
    if failure.exists():
        pytest.fail(failure.read_text())


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    found = Trainers()
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Arrays]:
    """How training of a kind ends that neither saves nor dies."""
    return cache(lambda kind: trainers.finish(tmp_path_factory.mktemp(kind), kind))


def _interrupted(
    trainers: Trainers, folder: Path, kind: str, policy: PolicyName, bits: int, seed: int
) -> Arrays:
    draw = np.random.default_rng(seed)
    kills = resumed = 0
    while kills < KILLS or resumed < RESUMED:
        assert kills < MOST_KILLS
        resumed += bool(cnr_store.versions(str(folder / "store")))
        trainers.kill_one(folder, kind, policy, bits, draw)
        kills += 1
    return trainers.finish(folder, kind, policy, bits)


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("policy", "kind"), by_day(LOSSLESS, LOSSLESS_AT_NIGHT))
def test_lossless_training_ends_bit_for_bit_alike(
    trainers: Trainers,
    undisturbed: Callable[[str], Arrays],
    tmp_path: Path,
    policy: PolicyName,
    kind: str,
) -> None:
    seed = LOSSLESS.index((policy, kind))
    found, expected = _interrupted(trainers, tmp_path, kind, policy, 32, seed), undisturbed(kind)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert found[name].tobytes() == values.tobytes(), name


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("policy", "bits", "most"), by_day(QUANTIZED, QUANTIZED_AT_NIGHT))
def test_quantized_training_ends_at_nearly_the_same_loss(
    trainers: Trainers,
    undisturbed: Callable[[str], Arrays],
    tmp_path: Path,
    policy: PolicyName,
    bits: int,
    most: float,
) -> None:
    found = _interrupted(trainers, tmp_path, "adagrad", policy, bits, 100 + bits)
    expected = undisturbed("adagrad")
    assert abs(found["loss"] / expected["loss"] - 1) <= most
    for name in ("reader", "rng", "optimizer 0 lr"):  # what is not quantized is as exact as ever
        assert found[name].tobytes() == expected[name].tobytes(), name
