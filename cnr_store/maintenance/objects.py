"""What all of maintenance shares: deleting objects, and reports of progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cnr_backends import Backend, Transfer

Progress = Callable[[int, int], None]
"""Called with (done, all), in units that depend on the job."""


def no_progress(done: int, known: int) -> None:
    """Report nothing."""


def delete_objects(backend: Backend, transfer: Transfer, keys: Iterable[str]) -> None:
    """Delete objects, in any order. Missing ones are no error."""
    for _ in transfer.map(backend.delete, keys):
        pass
