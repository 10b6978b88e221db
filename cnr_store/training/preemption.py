"""Notices that the machine is about to be taken away, so that training can save and stop between two steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from cnr_store.errors import OptionError

log = logging.getLogger("cnr_store")


class Preemption:
    """True once one of the signals has come.

    Attributes
    ----------
    signal
        The first that came; None before. ``sys.exit(128 + signal)`` is how a process says that it ended by it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self.signal is not None

    def _notice(self, number: int, _: object) -> None:
        # A handler runs between any two lines, within a step or a save: it must not do more than this.
        if os.getpid() != self._process:
            # A fork, as a data loader's worker is, asks nobody whether it is to end: it does so as others do.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif self.signal is None:
            self.signal = signal.Signals(number)


@contextmanager
def watch_signals(signals: Iterable[int]) -> Iterator[Preemption]:
    """Turn signals into a flag while the block runs; then whoever handled them before does so again.

    Raises
    ------
    OptionError
        These are not signals that can be handled, or this is not the main thread, which alone can handle any.
    """
    numbers = _numbers(signals)
    if threading.current_thread() is not threading.main_thread():
        raise OptionError("signals can be watched for on the main thread alone; enter the block there")
    noticed = Preemption()
    former: dict[signal.Signals, object] = {}
    try:
        for number in numbers:
            former[number] = signal.getsignal(number)
            signal.signal(number, noticed._notice)
        yield noticed
    finally:
        for number, handler in former.items():
            # None: not Python's, so it can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]


def _numbers(signals: Iterable[int]) -> list[signal.Signals]:
    numbers: list[signal.Signals] = []
    with suppress(TypeError, ValueError):
        numbers = [signal.Signals(number) for number in signals]
    if not numbers or {signal.SIGKILL, signal.SIGSTOP} & set(numbers):
        raise OptionError(f"signals={signals!r}: give signals that can be handled, such as (signal.SIGTERM,)")
    return numbers
