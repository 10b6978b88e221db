"""Golden stores with a history: crashes, several writers, folds, removed versions, models that changed, imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import cnr_store
from cnr_backends import BackendError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import Checkpointer
from tests.test_store.golden.golden_codecs import Refusing
from tests.test_store.golden.golden_jobs import JOBS, train
from tests.test_store.golden.golden_modules import hard_rows
from tests.test_store.golden.golden_notes import Notes
from tests.test_store.golden.golden_values import Job, described, model_paths, own_arrays, own_tree


def change(checkpointer: Checkpointer, job: Job, table: str, ids: Sequence[int], seed: int) -> None:
    """Give rows of a table other values, among them hard ones where there are many."""
    weight = job.model.get_parameter("weight" if table == "weight" else f"{table}.weight")
    weight.detach()[list(ids)] = hard_rows(len(ids), weight.shape[1], seed, weight.dtype)
    checkpointer.touch(table, list(ids))


def generations(url: Path) -> Notes:
    """A save that failed, two that were killed, and a writer that another one overtook."""
    notes, job, refusing = Notes(url, ("tables/users/weight",)), JOBS["pair"](1), Refusing()
    options: dict[str, Any] = {
        "policy": "consecutive",
        "bits": {"users": 4, "ads": 32},
        "job": cnr_store.Job(rng=False),
    }
    codec = {"ads": refusing}
    with Checkpointer(
        url, job.model, codec=codec, policy="consecutive", bits={"users": 4}, job=cnr_store.Job(rng=False)
    ) as first:
        notes.save(first, "pair", job, 1)
        change(first, job, "users", [3, 4], 1)
        change(first, job, "ads", [0], 1)
        refusing.refuses = True
        try:
            first.save(2).result()
        except cnr_store.SaveError:
            refusing.refuses = False
        notes.save(first, "pair", job, 3)
    for part in ("/manifest", "create"):
        _die(url, part)
    behind, ahead = JOBS["pair"](4), JOBS["pair"](5)
    with (
        Checkpointer(url, behind.model, **options) as second,
        Checkpointer(url, ahead.model, **options) as third,
    ):
        second.load()
        change(second, behind, "users", [7, 8], 2)
        notes.save(second, "pair", behind, 4)
        third.load()
        change(third, ahead, "ads", [1], 3)
        notes.save(third, "pair", ahead, 5, metadata="overtakes")
        change(second, behind, "users", [9], 4)
        try:
            second.save(6).result()
        except cnr_store.SupersededError:
            notes.save(third, "pair", ahead, 7, full=True)
    _die(url, "/state/main.json")
    assert len(notes.saved) == 5
    return notes


def _die(url: Path, part: str) -> None:
    command = [sys.executable, "-m", "tests.test_store.golden.golden_crash", str(url), part]
    assert subprocess.run(command, check=False).returncode == 9


def collected(url: Path) -> Notes:
    """Folds, a pin, and the removal of what lay beneath a fold."""
    notes, job = Notes(url, ("tables/users/weight",)), JOBS["stepped"](1)
    options: dict[str, Any] = {"policy": "consecutive", "bits": {"*": 3}, "job": cnr_store.Job(rng=False)}
    draw = np.random.default_rng(6)
    with Checkpointer(url, job.model, job.optimizers, **options) as checkpointer:
        for step in (10, 20, 30, 40, 50, 60):
            notes.save(checkpointer, "stepped", job, step)
            change(checkpointer, job, "users", sorted(draw.choice(300, 20, replace=False).tolist()), step)
            if step == 40:
                assert cnr_store.compact(url).outcome == "folded"
        assert cnr_store.compact(url).outcome == "folded"
    job = JOBS["stepped"](2)
    with Checkpointer(url, job.model, job.optimizers, **options) as checkpointer:
        checkpointer.load()  # it leans on the fold alone
        change(checkpointer, job, "users", [4, 299], 70)
        notes.save(checkpointer, "stepped", job, 70)
    cnr_store.pin(url, 10)
    cnr_store.pin(url, 70)
    cnr_store.gc(url, keep_last=3)
    assert [info.step for info in cnr_store.versions(url)] == [10, 40, 50, 60, 70]
    return notes


def doomed(url: Path) -> Notes:
    """A removal that failed halfway: tombstones stand, and so do the versions."""
    notes, job = Notes(url), JOBS["pair"](1)
    with Checkpointer(
        url, job.model, policy="one-shot", bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        for step in range(5):
            notes.save(checkpointer, "pair", job, step, full=step == 2)
            change(checkpointer, job, "users", [step], step)

    def fault(operation: str, key: str, index: int) -> Fault:
        return "before" if key == f"versions/{first}/zarr.json" else None

    first = cnr_store.versions(url)[0].id
    try:
        cnr_store.gc(FaultyBackend(open_backend(url), fault), keep_last=2, grace_seconds=0)
    except BackendError:
        assert [info.step for info in cnr_store.versions(url)] == [0, 2, 3, 4]
    return notes


def changing(url: Path) -> Notes:
    """A table that grew, one that came and one that went."""
    notes = Notes(url, ("tables/a/weight",))
    for number in (1, 2, 3, 4):
        job = JOBS[f"changing-{number}"](number)
        bits = {"a": 8, "*": 32}
        with Checkpointer(
            url, job.model, job.optimizers, policy="consecutive", bits=bits, job=cnr_store.Job(rng=False)
        ) as checkpointer:
            if number > 1:
                checkpointer.load(strict="ignore")
            train(job, {name: [number, 5, 7] for name in job.model})
            notes.save(checkpointer, f"changing-{number}", job, number)
            if number in (2, 4):
                train(job, {"a": [2, 28]})
                notes.save(checkpointer, f"changing-{number}", job, 10 + number)
    return notes


def imported(url: Path) -> Notes:
    """Imports from a file of torch, and then from a safetensors one."""
    notes = Notes(url, ("tables/users/weight",))
    for step, kind in enumerate(("imported", "plain")):
        job, source = JOBS[kind](step), url.with_name(f"{kind}.file")
        if kind == "plain":
            save_file(dict(job.model.state_dict()), source)
        else:
            torch.save(job.model.state_dict(), source)
        info = cnr_store.import_file(source, url, step=step, bits={"users": 4}, tables=["users", "ads"])
        source.unlink()
        tree = {**own_tree(job, False), "reader": described(None), "metadata": described(None)}
        notes.note(info, kind, own_arrays(job), model_paths(job.model), tree)
    return notes


def tall(url: Path) -> Notes:
    """A delta of few rows of many, over compressed ones; and its fold."""
    notes, job = Notes(url), JOBS["tall"](1)
    codec = {"tall": {"id": "cnr_rows", "then": [{"id": "zstd", "level": 9}]}}
    with Checkpointer(url, job.model, codec=codec, job=cnr_store.Job(rng=False)) as checkpointer:
        notes.save(checkpointer, "tall", job, 1)
    with Checkpointer(url, job.model, bits=32, job=cnr_store.Job(rng=False)) as checkpointer:
        checkpointer.load()
        change(checkpointer, job, "tall", [5, 69_990], 1)
        notes.save(checkpointer, "tall", job, 2)
    assert cnr_store.compact(url).outcome == "folded"
    return notes


def relative(url: Path) -> Notes:
    """Deltas whose rows are differences of codes, on a step and on a floating grid, and the fold of one of them."""
    notes, job = Notes(url, ("tables/users/weight", "tables/users/exp_avg*")), JOBS["averaged"](1)
    options: dict[str, Any] = {
        "policy": "consecutive",
        "retention": cnr_store.Retention(max_chain=None),
        "job": cnr_store.Job(rng=False),
        "state_bits": {"users": "m3"},
    }
    codec = {"users": {"id": "cnr_lattice", "rms_step": 0.28, "relative": True}}
    with Checkpointer(url, job.model, job.optimizers, codec=codec, **options) as checkpointer:
        for step in range(4):
            train(job, {"users": [*range(0, 200, 7), step + 1]})
            notes.save(checkpointer, "averaged", job, step)
    cnr_store.compact(url, 2)
    return notes


def moving(url: Path) -> Notes:
    """Deltas of state whose floating grids move with it, over more than an octave, and the fold of one of them."""
    notes, job = Notes(url, ("tables/users/weight", "tables/users/exp_avg*")), JOBS["decaying"](1)
    options: dict[str, Any] = {
        "policy": "consecutive",
        "retention": cnr_store.Retention(max_chain=None),
        "job": cnr_store.Job(rng=False),
    }
    codec = {"users": {"id": "cnr_lattice", "rms_step": 0.28, "relative": True}}
    train(job, {"users": [*range(0, 600, 2)]})
    with Checkpointer(
        url, job.model, job.optimizers, codec=codec, state_bits={"users": "m3"}, **options
    ) as checkpointer:
        for step in range(4):
            for each in range(3):
                train(job, {"users": [*range(each, 90, 7)]})
            notes.save(checkpointer, "decaying", job, step)
    cnr_store.compact(url, 2)
    return notes
