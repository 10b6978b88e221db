"""Turns termination signals into a flag, so that training can save and stop between two steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from cnr_store.errors import OptionError, RanksError
from cnr_store.ranks.decisions import named, pauses
from cnr_store.ranks.group import Group


class Preemption:
    """True once one of the signals has arrived.

    Attributes
    ----------
    signal
        The first signal that arrived, or None. ``sys.exit(128 + signal)`` reports it to whoever started the process.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self.signal is not None

    def close(self) -> None:
        """Look for no more signals."""

    def _notice(self, number: int, _: object) -> None:
        # A handler may run between any two lines, inside a step or a save, so it only sets the flag.
        if os.getpid() != self._process:
            # A fork, such as a data loader's worker, never tests the flag: it must end as if there were no handler.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif self.signal is None:
            self.signal = signal.Signals(number)


@contextmanager
def watch_signals(
    signals: Iterable[int], make: Callable[[], Preemption] = Preemption
) -> Iterator[Preemption]:
    """Turn signals into a flag while the block runs, then restore the previous handlers.

    `make`: makes the flag.
    """
    numbers = _numbers(signals)
    if threading.current_thread() is not threading.main_thread():
        raise OptionError("signals can be handled on the main thread alone; enter the block there")
    preempted = make()
    previous: dict[signal.Signals, object] = {}
    try:
        for number in numbers:
            previous[number] = signal.getsignal(number)
            signal.signal(number, preempted._notice)
        yield preempted
    finally:
        for number, handler in previous.items():
            # None stands for a handler that Python did not install and can't restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        preempted.close()


def _numbers(signals: Iterable[int]) -> list[signal.Signals]:
    numbers: list[signal.Signals] = []
    with suppress(TypeError, ValueError):
        numbers = [signal.Signals(number) for number in signals]
    if not numbers or {signal.SIGKILL, signal.SIGSTOP} & set(numbers):
        raise OptionError(f"signals={signals!r}: give signals that can be handled, such as (signal.SIGTERM,)")
    return numbers


log = logging.getLogger("cnr_store")

_LOOK_SECONDS = 0.5


class JointPreemption(Preemption):
    """True on all ranks from the same test on, once one of the signals has arrived on any of them.

    Every rank tests it once a step. A thread looks whether a rank was signalled. If so, each rank tells how many tests
    it has begun, and its next test waits until the first rank has heard of all: they turn true at the test after the
    greatest number told, which no rank can have passed.

    `group`: the ranks.
    `number`: which preemption of the group it is, the same on all ranks.
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__()
        self._group, self._prefix = group, f"preemption/{number}"
        self._lock = threading.Lock()
        self._tests = 0
        self._first_true: int | None = None
        self._is_noticed = False
        self._is_known, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cnr-preemption", daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        with self._lock:
            self._tests += 1
            tests, is_noticed = self._tests, self._is_noticed
        if not is_noticed:
            return False
        self._is_known.wait()
        return self._first_true is None or tests >= self._first_true

    def close(self) -> None:
        """Look no more. Others need not wait for this rank: they hear how many tests it has begun."""
        self._is_over.set()
        self._thread.join()
        try:
            self._tell_begun()
            if self._group.rank == 0:  # nobody else tells the test; it stays as it was told
                self._group.keyvalue.compare_set(f"{self._prefix}/first_true", b"0")
        except RanksError as error:
            log.warning("other ranks may wait for this one after a signal: %s", error)

    def _watch(self) -> None:
        try:
            while not self._is_over.wait(max(_LOOK_SECONDS, self._group.world / 500)):
                if self._look():
                    return
        except RanksError as error:
            log.warning("a signal on another rank may go unnoticed: %s", error)
            self._is_noticed = self.signal is not None
        finally:
            self._is_known.set()  # no test waits for what nobody tells any more

    def _look(self) -> bool:
        """Whether a rank was signalled. If so, agree with the others on the test that is true."""
        keys = self._group.keyvalue
        if self.signal is not None:
            keys.compare_set(f"{self._prefix}/signal", str(int(self.signal)).encode())
        told = keys.get(f"{self._prefix}/signal")
        if told is None:
            return False
        if self.signal is None:
            self.signal = signal.Signals(int(told))
        self._tell_begun()
        if self._group.rank == 0:
            keys.set(f"{self._prefix}/first_true", str(self._greatest() + 1).encode())
        for _ in pauses(self._group.timeout_seconds + 1):
            if (first := keys.get(f"{self._prefix}/first_true")) is not None:
                self._first_true = int(first)
                return True
            if self._is_over.is_set():  # this rank tests no more
                return True
        log.error("rank 0 does not tell at which step to save after a signal; this rank goes on without it")
        return True

    def _tell_begun(self) -> None:
        """Have later tests of this rank wait, and tell how many it has begun; what was told once stays."""
        with self._lock:
            self._is_noticed, begun = self._is_noticed or self.signal is not None, self._tests
        self._group.keyvalue.compare_set(f"{self._prefix}/begun/{self._group.rank}", str(begun).encode())

    def _greatest(self) -> int:
        """The greatest number of tests that any rank has begun."""
        found: dict[int, int] = {}
        for _ in pauses(self._group.timeout_seconds):
            for rank in {*range(self._group.world)} - found.keys():
                if (begun := self._group.keyvalue.get(f"{self._prefix}/begun/{rank}")) is not None:
                    found[rank] = int(begun)
            if len(found) == self._group.world:
                break
        else:
            absent = named({*range(self._group.world)} - found.keys())
            log.error("%s did not answer after a signal; the others save without waiting for it", absent)
        return max(found.values(), default=0)
