"""A store copied by ``cp -r`` while jobs write, or cut afterwards: each version is exact, or an error of our tree."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import BackendError
from cnr_store import CheckpointError
from tests.nightly import FACTOR
from tests.test_store.storm import storm_process
from tests.test_store.storm.published import publish
from tests.test_store.support.fork_server import ForkServer
from tests.test_store.support.lasting_store import make_model

pytestmark = pytest.mark.slow


def copies_are_exact(jobs: ForkServer, folder: Path, copies: int, seed: int) -> Counter[str]:
    """Copy a store `copies` times while a trainer and a collector run, and read every version of each copy."""
    draw, counts = random.Random(seed), Counter[str]()
    store, running = folder / "store", dict[str, int]()
    for number in range(copies):
        for name in ("train", "collect"):
            if name in running and jobs.ask({"reap": running[name], "wait": False}) is not None:
                del running[name]
            if name not in running:
                command = {
                    "job": name,
                    "url": str(store),
                    "side": str(folder),
                    "keep_last": 3,
                    "max_chain": 3,
                }
                command |= {"policy": draw.choice(["consecutive", "one-shot"]), "skew_seconds": 0}
                running[name] = jobs.ask({**command, "seed": draw.randrange(1 << 30)})
        time.sleep(draw.random() * 0.1)
        copy = folder / f"copy-{number}"
        # What is deleted meanwhile makes cp fail, after it has copied the rest.
        subprocess.run(["cp", "-r", str(store), str(copy)], check=False, capture_output=True)
        if copy.exists():
            counts["copies"] += 1
            if draw.random() < 0.5:
                _cut(copy, draw)
                counts["cut"] += 1
            counts.update(_read_all(copy))
    for process in running.values():
        ended = jobs.ask({"reap": process, "wait": True})
        assert ended == {"signal": 0, "status": 0}, f"{signal.Signals(ended['signal'] or 1)}, {ended}"
    return counts


def _cut(copy: Path, draw: random.Random) -> None:
    """Lose what a copy that was broken off lacks: a file, or the end of one."""
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    if not files:
        return
    path = draw.choice(files)
    if draw.random() < 0.5:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])


def _read_all(copy: Path) -> Counter[str]:
    counts, model = Counter[str](), make_model()
    try:
        versions: list[cnr_store.VersionInfo | str] = list(cnr_store.versions(str(copy)))
    except (CheckpointError, BackendError):
        # Each version by itself, since one damaged record hides the list.
        versions = [path.name for path in sorted((copy / "versions").glob("*.*")) if path.is_dir()]
    for version in versions:
        try:
            restored = cnr_store.load(str(copy), model, version=version)
        except (CheckpointError, BackendError):
            counts["errors"] += 1
        else:
            assert restored.metadata == storm_process.digest(model), f"{version} of {copy} is wrong"
            counts["exact"] += 1
    return counts


def test_copies_of_a_live_store_are_exact_or_refused(jobs: ForkServer, tmp_path: Path) -> None:
    counts = copies_are_exact(jobs, tmp_path, copies=12, seed=20261122)
    assert counts["exact"] > 12
    assert counts["cut"] > 0  # at night some that are needed, too


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_night_of_copies_is_exact_or_refused(jobs: ForkServer, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    counts = copies_are_exact(jobs, tmp_path, copies=100 * FACTOR, seed=seed)
    publish("copies", seed, counts)
