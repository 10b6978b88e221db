"""Who makes progress: ranks write beats that change while they work, and others look at them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from cnr_store.errors import RanksError
from cnr_store.ranks.keyvalue import KeyValue

FOREVER_SECONDS = 1e9


class Watch:
    """How long the beats of ranks have stood still, in time that this rank itself was awake.

    Parameters
    ----------
    keyvalue
        The keys that the ranks share.
    prefix
        What begins the keys of beats.
    timeout_seconds
        How long a rank may make no progress.
    """

    def __init__(self, keyvalue: KeyValue, prefix: str, timeout_seconds: float) -> None:
        self._keys = keyvalue
        self._prefix = prefix
        self._timeout = timeout_seconds
        self._looked = time.monotonic()
        self._last: dict[int, bytes | None] = {}
        self._silent_seconds: dict[int, float] = {}

    def silent(self, ranks: Collection[int]) -> dict[int, str]:
        """The ranks that have made no progress for the timeout, with the last phase of each."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < self._timeout / 20:
            return {}
        self._looked = now
        gone = {}
        for rank in ranks:
            value = self._keys.get(f"{self._prefix}/beat/{rank}")
            moved = value != self._last.get(rank)
            self._last[rank] = value
            # One that was stopped itself has seen nothing meanwhile: a look counts a quarter of the timeout at most.
            self._silent_seconds[rank] = (
                0 if moved else self._silent_seconds.get(rank, 0) + min(elapsed, self._timeout / 4)
            )
            if self._silent_seconds[rank] >= self._timeout:
                gone[rank] = "begin" if value is None else str(json.loads(value)["phase"])
        return gone


class Beats:
    """The beats of one rank.

    Parameters
    ----------
    keyvalue
        The keys that the ranks share.
    prefix
        What begins the keys of beats.
    rank
        This rank.
    timeout_seconds
        How long others wait for a beat.
    """

    def __init__(self, keyvalue: KeyValue, prefix: str, rank: int, timeout_seconds: float) -> None:
        self._keys = keyvalue
        self._key = f"{prefix}/beat/{rank}"
        self._pause_seconds = timeout_seconds / 6
        self._count = 0
        self.begin()

    def begin(self) -> None:
        """Begin to wait or to work: the first beat comes only after a while."""
        self._beaten = time.monotonic()

    def beat(self, phase: str) -> None:
        """Tell that this rank is well. Cheap to call often."""
        now = time.monotonic()
        if now - self._beaten >= self._pause_seconds:
            self._beaten = now
            self._count += 1
            self._keys.set(self._key, json.dumps({"count": self._count, "phase": phase}).encode())

    @contextmanager
    def working(self, phase: str, progress: Callable[[], int]) -> Iterator[None]:
        """Beat while the block runs, whenever `progress` gives another number than before."""
        is_over = threading.Event()

        def watch() -> None:
            last = progress()
            while not is_over.wait(self._pause_seconds):
                now = progress()
                if now != last:
                    last = now
                    try:
                        self.beat(phase)
                    except RanksError:  # whoever decides next finds out
                        return

        thread = threading.Thread(target=watch, name="cnr-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
