"""Jobs on one URL, killed and stopped at any moment: versions stay exact; nothing newer is lost to an older job."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from tests.nightly import FACTOR, NIGHT
from tests.test_store.storm import storm_process
from tests.test_store.storm.published import publish
from tests.test_store.support.fork_server import ForkServer
from tests.test_store.support.lasting_store import make_model

pytestmark = pytest.mark.slow

KEEP_LAST = 3
MONTH_SECONDS = 30 * 86_400
OTHER_JOBS = ("load", "collect", "fold", "repair", "end_run")
ROUNDS_A_STORE = 12 if NIGHT else 6


@dataclass
class Job:
    """A process of the storm."""

    name: str
    process: int
    stopped: bool = False


@dataclass
class Storm:
    """Jobs over one store, and what is known of what they did."""

    jobs: ForkServer
    folder: Path
    draw: random.Random
    counts: Counter[str]
    policy: str
    running: list[Job] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.folder / "store")

    def start(self, name: str) -> None:
        command = {
            "job": name,
            "url": self.url,
            "side": str(self.folder),
            "seed": self.draw.randrange(1 << 30),
            "keep_last": KEEP_LAST,
            "policy": self.policy,
            "max_chain": self.draw.choice([2, 4, 64]),
            "skew_seconds": self.draw.choice([0, -MONTH_SECONDS, MONTH_SECONDS]),
        }
        self.running.append(Job(name, self.jobs.ask(command)))
        self.counts[f"jobs that {name}"] += 1

    def round(self) -> None:
        """Two or three trainers and another job: some killed, some stopped while others go on."""
        for _ in range(self.draw.choice([2, 2, 3])):
            self.start("train")
            time.sleep(self.draw.random() * 0.1)
        if self.draw.random() < 0.7:
            self.start(self.draw.choice(OTHER_JOBS))
        if self.draw.random() < 0.3:
            self._stop(self.draw.choice(self.running))
            self.start("train")
        time.sleep(self.draw.random() * 0.4)
        for job in self.running:
            if job.stopped and self.draw.random() < 0.8:
                self._wake(job)
        for job in list(self.running):
            if self.draw.random() < 0.75:
                self._kill(job)
            else:
                if job.stopped:
                    self._wake(job)
                self._end(job, wait=True)

    def _stop(self, job: Job) -> None:
        os.kill(job.process, signal.SIGSTOP)  # until it is reaped, its id is its own
        job.stopped = True

    def _wake(self, job: Job) -> None:
        os.kill(job.process, signal.SIGCONT)
        job.stopped = False
        self.counts["stopped and continued"] += 1

    def _kill(self, job: Job) -> None:
        time.sleep(self.draw.random() * 0.1)
        os.kill(job.process, signal.SIGKILL)
        ended = self._end(job, wait=True)
        self.counts["killed"] += ended["signal"] == signal.SIGKILL

    def _end(self, job: Job, *, wait: bool) -> Any:
        ended = self.jobs.ask({"reap": job.process, "wait": wait})
        self.running.remove(job)
        failure = self.folder / f"failure-{job.process}"
        assert ended["status"] in (0, signal.SIGKILL), failure.read_text() if failure.exists() else ended
        return ended

    def check(self, *, everything: bool) -> None:
        """Check, while nobody writes, all that the jobs were promised."""
        journal = _read(self.folder / "journal")
        acknowledged = {event["version"]: event for event in journal if event["event"] == "committed"}
        infos = cnr_store.versions(self.url)
        listed = {info.id for info in infos}
        newest = sorted(listed | acknowledged.keys())[-KEEP_LAST:]
        assert listed.issuperset(newest), f"{sorted(set(newest) - listed)} are lost"
        self._check_lines(journal, acknowledged)
        model = make_model()
        for info in infos if everything else infos[-1:]:
            restored = cnr_store.load(self.url, model, version=info)
            assert restored.metadata == storm_process.digest(model), f"{info.id} is not what was saved"
            self.counts["versions loaded and equal"] += 1

    @staticmethod
    def _check_lines(journal: list[dict[str, Any]], acknowledged: dict[str, dict[str, Any]]) -> None:
        """Each version continues the newest that was there, but one that an older job committed after its claim."""
        first_save: dict[int, float] = {}
        for event in journal:
            if event["event"] == "saving":
                first_save.setdefault(event["process"], event["at"])
        ids = sorted(acknowledged)
        for version, event in acknowledged.items():
            between = [each for each in ids if (event["previous"] or "") < each < version]
            passed_over = [
                each for each in between if acknowledged[each]["at"] <= first_save[event["process"]]
            ]
            assert not passed_over, f"{version} continues {event['previous']} and passes over {passed_over}"


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weather(jobs: ForkServer, folder: Path, seed: int, kills: int, pairs: int) -> Counter[str]:
    """A storm of at least so many kills, and so many times stopped and continued."""
    draw, counts = random.Random(seed), Counter[str]()
    while counts["killed"] < kills or counts["stopped and continued"] < pairs:
        counts["stores"] += 1
        place = folder / str(counts["stores"])
        place.mkdir()
        storm = Storm(jobs, place, draw, counts, draw.choice(["consecutive", "intermittent", "one-shot"]))
        for _ in range(ROUNDS_A_STORE):
            storm.round()
            storm.check(everything=False)
        storm.check(everything=True)
        journal = Counter(event["event"] for event in _read(place / "journal"))
        counts.update({f"times {event}": count for event, count in journal.items()})
    return counts


def test_a_storm_of_kills_loses_nothing(jobs: ForkServer, tmp_path: Path) -> None:
    counts = weather(jobs, tmp_path, 20261122, kills=2, pairs=1)
    assert counts["times committed"] > 20 * ROUNDS_A_STORE / 12
    assert counts["times superseded"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_night_of_kills_loses_nothing(jobs: ForkServer, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    counts = weather(jobs, tmp_path, seed, kills=100 * FACTOR, pairs=20 * FACTOR)
    publish("kills", seed, counts)
