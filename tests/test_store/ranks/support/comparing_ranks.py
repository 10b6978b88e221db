"""Jobs under Adam whose comparison fails, is interrupted or takes long on one rank, or that go on with other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

import cnr_store
from cnr_store.training.tracking.comparison import Comparison
from tests.test_store.ranks.support.differing_ranks import told
from tests.test_store.ranks.support.shared_model import cut_small
from tests.test_store.training.saving.test_compared import FORMS, MAKERS, Job

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
    options: dict[str, Any] = FORMS["relative"] | {"policy": "consecutive", "timeout_seconds": 20}
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        save(checkpointer, job, random, 0)
        armed[0] = True
        error, text, _ = told(lambda: save(checkpointer, job, random, 1))
        armed[0] = False
        return error, text, save(checkpointer, job, random, 2)


def compare_slowly(url: str, timeout_seconds: float) -> Rows:
    """Save twice; one rank takes more for a comparison than the others wait, but not for an array of it."""
    cut_small()
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(0)
    before: Callable[..., Any] = Comparison.changed

    def changed(self: Comparison, *arguments: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(timeout_seconds * 0.6)
        return before(self, *arguments)

    Comparison.changed = changed  # type: ignore[assignment, method-assign]
    options: dict[str, Any] = FORMS["relative"] | {"timeout_seconds": timeout_seconds}
    with cnr_store.Checkpointer(url, job.model, job.optimizer, **options) as checkpointer:
        return [save(checkpointer, job, random, step) for step in range(2)]
