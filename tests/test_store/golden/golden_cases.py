"""How each golden store was written, through public names alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cnr_store
from cnr_store import Checkpointer, TrackedReader
from tests.test_store.golden import golden_histories
from tests.test_store.golden.golden_codecs import FOLLOWED, KMEANS, UNIFORM, Odd, Roomy
from tests.test_store.golden.golden_histories import change
from tests.test_store.golden.golden_jobs import JOBS, RowWise, batches, train
from tests.test_store.golden.golden_notes import Notes
from tests.test_store.golden.golden_states import arrays, everything, plain_values, tensors

Make = Callable[[Path], Notes]


def codecs(kind: str, codec: Mapping[str, Any], exact: Sequence[str], changed: Sequence[str]) -> Make:
    """A baseline of one table for each codec, and a delta of some."""

    def make(url: Path) -> Notes:
        notes = Notes(url, tuple(f"tables/{name}/weight" for name in codec if name not in exact))
        job = JOBS[kind](1)
        with Checkpointer(url, job.model, codec=codec, job=cnr_store.Job(rng=False)) as checkpointer:
            notes.save(checkpointer, kind, job, 10)
            for at, name in enumerate(changed):
                change(checkpointer, job, name, [0, 1, 3, 7, 8, 12, 13, 14, 21], 70 + at)
            notes.save(checkpointer, kind, job, 20)
        return notes

    return make


def policy(name: str, saves: int, changed: int, **options: Any) -> Make:
    """Saves under one policy, each after other rows have changed."""

    def make(url: Path) -> Notes:
        notes = Notes(url, ("tables/users/weight",))
        job = JOBS["stepped"](1)
        draw = np.random.default_rng(5)
        options_of = {
            "policy": name,
            "job": cnr_store.Job(rng=False),
            **(options if "codec" in options else {"bits": {"*": 4}, **options}),
        }
        with Checkpointer(url, job.model, job.optimizers, **options_of) as checkpointer:
            for save in range(saves):
                notes.save(checkpointer, "stepped", job, 100 * save, metadata={"save": save})
                ids = sorted(draw.choice(300, changed, replace=False).tolist())
                change(checkpointer, job, "users", ids, save)
        return notes

    return make


def changed_once(
    kind: str, lossy: tuple[str, ...], changed: Mapping[str, Sequence[int]], **options: Any
) -> Make:
    """A version of a job, and where rows are to be changed another one."""

    def make(url: Path) -> Notes:
        notes, job = Notes(url, lossy), JOBS[kind](1)
        with Checkpointer(
            url, job.model, job.optimizers, job=cnr_store.Job(rng=False), **options
        ) as checkpointer:
            notes.save(checkpointer, kind, job, 1)
            for at, (table, ids) in enumerate(changed.items()):
                change(checkpointer, job, table, ids, at)
            if changed:
                notes.save(checkpointer, kind, job, 2)
        return notes

    return make


def widths(url: Path) -> Notes:
    """Two bits by the restores that are expected, and eight once there were more."""
    notes = Notes(url, ("tables/users/weight",))
    expected = {"failures_per_node_hour": 0.5, "nodes": 1, "hours": 1}
    for run in range(3):
        job = JOBS["widths"](run)
        with Checkpointer(
            url, job.model, job=cnr_store.Job(expected_restores=expected, rng=False)
        ) as checkpointer:
            if run:
                checkpointer.load()
            change(checkpointer, job, "users", range(run, 264, 50), run)
            change(checkpointer, job, "small", [run], run)
            notes.save(checkpointer, "widths", job, run)
    return notes


def trained(kind: str, lossy: tuple[str, ...], rows: Mapping[str, Sequence[int]], **options: Any) -> Make:
    """A version before the first step of the optimizers, one after it, and one after two more."""

    def make(url: Path) -> Notes:
        notes, job = Notes(url, lossy), JOBS[kind](1)
        options_of = {"policy": "consecutive", "job": cnr_store.Job(rng=False), **options}
        with Checkpointer(url, job.model, job.optimizers, **options_of) as checkpointer:
            for step in range(4):
                if step:
                    train(job, {name: [*ids, step] for name, ids in rows.items()})
                if step in (1, 3):
                    notes.save(checkpointer, kind, job, step)
        return notes

    return make


def stateful(url: Path) -> Notes:
    """Every type of state, schedulers, random number generators, and a reader's position."""
    notes, job = Notes(url), JOBS["stateful"](1)
    options: dict[str, Any] = {"state": job.objects, "policy": "consecutive"}
    with Checkpointer(url, job.model, job.optimizers, **options) as checkpointer:
        job.objects["keeper"].value = {1: tensors()["large"], "list": [(arrays()["large"],)]}
        notes.save(checkpointer, "stateful", job, 1, everything(), plain_values(), rng=True)
        train(job, {"users": [1, 2]})
        for name in ("cosine", "steps", "lambda"):
            job.objects[name].step()
        job.objects["keeper"].value = [tensors()["large half"], None]
        job.model["extra"].value = tensors()["large"]
        rest = [batch.tolist() for batch in TrackedReader(batches())][1:]
        reader: TrackedReader[Any] = TrackedReader(batches())
        next(iter(reader))
        notes.save(checkpointer, "stateful", job, 2, reader, {"rest": rest}, rng=True)
    return notes


_STATE_BITS = {"by2": 2, "by3": 3, "by4/exp_avg*": 4, "*": 8}
_OPTIMIZED = {name: [0, 3, 9] for name in ("sgd", "adagrad", "sparseadam", "adam", "rowwise")}

_FLOATING: Mapping[str, int | str] = {"by2": "m2", "by3": "m3", "by4/exp_avg": 4, "*": "m7"}
_LATTICE = {"id": "cnr_lattice", "rms_step": 0.28}

CASES: Mapping[str, Make] = {
    "uniform": codecs("uniform", UNIFORM, ["exact"], ["symmetric3", "adaptive4"]),
    "kmeans": codecs("kmeans", KMEANS, [], ["row4", "block", "cluster"]),
    "compressed": codecs("compressed", FOLLOWED, ["blosc", "shuffled", "lz4", "four"], ["zstd", "four"]),
    "one-shot": policy("one-shot", 3, 30),
    "consecutive": policy("consecutive", 4, 30),
    "intermittent": policy("intermittent", 6, 90),
    "auto": policy("auto", 7, 40, job=cnr_store.Job(restores_per_save=0.0, rng=False)),
    "full": changed_once("bare", (), {"weight": [3, 4]}, policy="full"),
    "widths": widths,
    "elements": changed_once(
        "elements",
        tuple(f"tables/as_{name}_8/weight" for name in ("float32", "float16", "bfloat16")),
        {"as_float32_8": range(3, 25), "as_bfloat16": range(20), "as_bfloat16_8": range(20), "row": [0]},
        bits={"*_8": 8, "*": 32},
    ),
    "dense": changed_once("dense", (), {}),
    "named": changed_once("named", (), {"ä/日本": [1], "__lead": [0], "c0": [2]}),
    "shards": changed_once(
        "shards",
        ("tables/users/weight", "tables/odd/weight"),
        {"users": range(0, 1200, 37), "odd": [0, 4, 5, 9, 20]},
        codec={"users": Roomy(32768.0), "odd": Odd()},
    ),
    "large": changed_once("large", (), {}),
    "tall": golden_histories.tall,
    "optimizers": trained(
        "optimizers", (), _OPTIMIZED, bits=32, tracking=cnr_store.Tracking(trusted_optimizers=[RowWise])
    ),
    "state-bits": trained(
        "squares",
        tuple(f"tables/by{bits}/{slot}" for bits in (2, 3, 4, 8) for slot in ("exp_avg", "exp_avg_sq")),
        {f"by{bits}": range(0, 24, 2) for bits in (2, 3, 4, 8)},
        bits=32,
        state_bits=_STATE_BITS,
    ),
    "stateful": stateful,
    "generations": golden_histories.generations,
    "doomed": golden_histories.doomed,
    "collected": golden_histories.collected,
    "changing": golden_histories.changing,
    "imported": golden_histories.imported,
    "floating": trained(
        "squares",
        tuple(f"tables/by{bits}/{slot}" for bits in (2, 3, 4, 8) for slot in ("exp_avg", "exp_avg_sq")),
        {f"by{bits}": range(0, 24, 2) for bits in (2, 3, 4, 8)},
        bits=32,
        state_bits=_FLOATING,
    ),
    "meeting": changed_once("meeting", (), {"Users": [1], "users": [2, 3]}, bits=32),
    "lattices": policy("intermittent", 3, 30, codec={"users": _LATTICE}),
    "relative": golden_histories.relative,
    "moving": golden_histories.moving,
}
"""By their names, in the order in which they are written."""
