"""Jobs under Adam whose comparison fails, is interrupted or takes long on one rank, or that go on with other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch.distributed as dist

import cnr_store
from cnr_store.training.saving import planner
from cnr_store.training.tracking import comparison
from cnr_store.training.tracking.comparison import Comparison
from tests.test_store.ranks.support.differing_ranks import told
from tests.test_store.ranks.support.failing_save import POINT, TIMEOUT_SECONDS
from tests.test_store.ranks.support.rank_processes import reach
from tests.test_store.ranks.support.shared_model import cut_small
from tests.test_store.training.saving.test_compared import FORMS, MAKERS, ROWS, Job

Rows = list[tuple[str, int]]
"""Of each version: its kind, and the rows that it holds."""


def save(checkpointer: Any, job: Job, random: np.random.Generator, step: int) -> tuple[str, int]:
    """Train a little and save."""
    job.train(random)
    info = checkpointer.save(step).result()
    return info.kind, info.rows


def go_on(url: str, form: str, first_step: int) -> Rows:
    """Load what there is, and save twice."""
    cut_small()
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(first_step)
    with cnr_store.Checkpointer(
        url, job.model, job.optimizer, policy="consecutive", **FORMS[form]
    ) as checkpointer:
        checkpointer.resume()
        return [save(checkpointer, job, random, first_step + number) for number in range(2)]


def compare_with_trouble(url: str, victim: int, how: str) -> tuple[str, str, tuple[str, int]]:
    """Save, then meet trouble as one rank compares, then save again: what was told, and what the last version holds."""
    cut_small()
    job, random, armed = Job(MAKERS["Adam"]), np.random.default_rng(0), [False]
    before: Callable[..., Any] = Comparison.changed

    def changed(self: Comparison, *arguments: Any) -> Any:
        if armed[0] and dist.get_rank() == victim:
            armed[0] = False
            raise KeyboardInterrupt if how == "interrupt" else MemoryError("injected")
        return before(self, *arguments)

    Comparison.changed = changed  # type: ignore[assignment, method-assign]
    options: dict[str, Any] = FORMS["relative"] | {
        "policy": "consecutive",
        "failures": cnr_store.Failures(timeout_seconds=20),
    }
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        save(checkpointer, job, random, 0)
        armed[0] = True
        error, text, _ = told(lambda: save(checkpointer, job, random, 1))
        armed[0] = False
        return error, text, save(checkpointer, job, random, 2)


def compare_slowly(url: str, timeout_seconds: float) -> Rows:
    """Save twice; one rank takes more for the comparison of one array than the others wait, but not for a block."""
    cut_small()
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(0)
    before: Callable[..., Any] = comparison._values
    comparison._BLOCK_BYTES = 1 << 10

    def values(array: Any, block: slice) -> Any:
        if dist.get_rank() == 0 and array.path == "tables/a/weight":
            time.sleep(timeout_seconds * 0.2)
        return before(array, block)

    comparison._values = values
    options: dict[str, Any] = FORMS["relative"] | {
        "failures": cnr_store.Failures(timeout_seconds=timeout_seconds)
    }
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        return [save(checkpointer, job, random, step) for step in range(2)]


Held = dict[str, np.ndarray[Any, Any]]
"""What a rank holds, by path."""


def held(job: Job) -> Held:
    return {path: tensor.numpy().copy() for path, tensor in job.arrays().items()}


def know_unlike(url: str, form: str, policy: Any, poor: Collection[int]) -> list[tuple[str, Held]]:
    """Save a few versions, also after a load; some ranks have no memory for codes, and keep digests.

    What changes rows, also a collective, is seen by nobody.

    Returns each version, and what the model held.
    """
    cut_small()
    if dist.get_rank() in poor:
        planner.free_bytes = lambda: 0  # type: ignore[attr-defined]  # which it has from another module
    job, random, found = Job(MAKERS["Adam"]), np.random.default_rng(0), list[tuple[str, Held]]()
    options: dict[str, Any] = FORMS[form] | {
        "policy": policy,
        "failures": cnr_store.Failures(timeout_seconds=20),
        "tracking": cnr_store.Tracking(audit=False),
    }
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        for step in range(5):
            if step == 3:
                checkpointer.load()
            job.train(random)
            if step == 4:
                part = job.weight.data[100:170]
                part *= (dist.get_rank() + 2) / 6
                dist.all_reduce(part)
            else:
                job.weight.data[random.integers(ROWS, size=80)] += 0.5
            found.append((checkpointer.save(step).result().id, held(job)))
    return found


def fall_silent(url: str, victim: int) -> tuple[str, str, float, Held]:
    """Save; then one rank is stopped or killed as it compares. What was told, after how long; what version 0 held."""
    cut_small()
    job, random, armed = Job(MAKERS["Adam"]), np.random.default_rng(0), [False]
    before: Callable[..., Any] = comparison._values

    def values(array: Any, block: slice) -> Any:
        if armed[0] and dist.get_rank() == victim:
            armed[0] = False
            reach(POINT)
        return before(array, block)

    comparison._values = values
    options: dict[str, Any] = FORMS["relative"] | {
        "failures": cnr_store.Failures(timeout_seconds=TIMEOUT_SECONDS, retry_seconds=0)
    }
    checkpointer = cnr_store.Checkpointer(url, job.model, job.optimizer, **options)
    save(checkpointer, job, random, 0)
    first, armed[0] = held(job), True
    return *told(lambda: save(checkpointer, job, random, 1)), first


def go_on_after_silence(url: str) -> tuple[Rows, list[tuple[str, Held]]]:
    """Load what there is, write one row, and save; then train, and save again."""
    cut_small()
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(7)
    rows, found = list[tuple[str, int]](), list[tuple[str, Held]]()
    options: dict[str, Any] = FORMS["relative"] | {
        "policy": "consecutive",
        "failures": cnr_store.Failures(timeout_seconds=20),
    }
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        checkpointer.resume()
        found.append(("", held(job)))
        for step in (2, 3):
            job.weight.data[5] += 1
            info = checkpointer.save(step).result()
            rows.append((info.kind, info.rows))
            found.append((info.id, held(job)))
            job.train(random)
    return rows, found
