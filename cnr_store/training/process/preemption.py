"""Turns termination signals into a flag, so that training can save and stop between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from cnr_store.errors import OptionError


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

    Parameters
    ----------
    make
        Makes the flag.

    Raises
    ------
    OptionError
        One is not a signal that can be handled, or this is not the main thread; no other can handle signals.
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
