"""Bytes a row of the deltas that were really written, by which policies estimate the next (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cnr_store.policies.past import Since

_MIN_ROWS = 256
"""Of fewer, the head of a shard is a large share."""

_OTHER: dict[Since, Since] = {"baseline": "previous", "previous": "baseline"}


@dataclass
class DeltaBytes:
    """What rows of deltas took in this process, by array and by what the delta covered."""

    _row_bytes: dict[tuple[str, Since], float] = field(default_factory=dict)

    def note(self, path: str, since: Since, nbytes: int, rows: int) -> None:
        """Take down what a delta of an array took. The newest of each kind counts."""
        if rows >= _MIN_ROWS:
            self._row_bytes[path, since] = nbytes / rows

    def estimate(self, path: str, row_bytes: float, rows: Mapping[Since, int]) -> dict[Since, float]:
        """The bytes of the next delta of an array, if it covers so many rows, by what it covers.

        A row takes what it took in the last such delta; else in one of the other kind, so that the two differ by their
        rows alone; else `row_bytes`, which the codec estimates.
        """
        found = self._row_bytes
        taken = {
            each: found.get((path, each), found.get((path, other), row_bytes))
            for each, other in _OTHER.items()
        }
        return {since: taken[since] * count for since, count in rows.items()}
