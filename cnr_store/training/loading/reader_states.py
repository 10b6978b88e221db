"""What the state of a loader tells of how exactly it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("cnr_store")


def warn_of_skipping(state: Any) -> None:
    """Warn about a state of torchdata's `StatefulDataLoader` with which only one resume in an epoch is exact.

    Of an iterable dataset without a state of its own, it reads and drops the batches before the position. It counts
    them, and the position besides: a state that is taken later in the epoch is too far ahead.
    """
    if _skips_by_reading(state) and position(state):
        log.warning(
            "the reader's dataset is an iterable without a state of its own: StatefulDataLoader reads the batches "
            "before the position again and counts them twice, so if this epoch is resumed once more, batches are left "
            "out. Give the dataset state_dict() and load_state_dict(), or use a TrackedReader"
        )


def position(state: Any) -> int | None:
    """How many batches a `StatefulDataLoader` had given in an epoch that has more. None of another state."""
    if not isinstance(state, Mapping) or state.get("_iterator_finished", True):
        return None
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping):
        counts = snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot")
    else:
        counts = state.get("_num_yielded"), 0
    first, more = counts
    return first + more if isinstance(first, int) and isinstance(more, int) else None


def _skips_by_reading(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    snapshot = state.get("_snapshot")
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    return any(map(_has_no_state, workers.values() if isinstance(workers, Mapping) else [state]))


def _has_no_state(part: Any) -> bool:
    """Whether neither the dataset nor its iterator had a state. Of datasets that are no iterables, nothing is kept."""
    fetcher = part.get("fetcher_state") if isinstance(part, Mapping) else None
    if not isinstance(fetcher, Mapping) or "dataset_iter_state" not in fetcher:
        return False
    return fetcher["dataset_iter_state"] is None and part.get("dataset_state") is None
