"""Ranks that are threads of one process, over keys in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cnr_store.ranks.keyvalue import KeyValue


class StoppedStore:
    """Keys that a rank reaches until the store is stopped, which answers as a store whose process ended."""

    def __init__(self, keys: KeyValue, error: Exception) -> None:
        self.stopped = False
        self._keys = keys
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if self.stopped:
            raise self._error
        return getattr(self._keys, name)


def on_threads(*ranks: Callable[[], Any]) -> list[Any]:
    """Call a function for each rank at once: what each returned, or the exception it raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]
