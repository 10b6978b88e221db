"""Keeps the interpreter alive until saves under way have ended."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

log = logging.getLogger("cnr_store")

_LONGEST_WAIT_SECONDS = 1.0

_under_way: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
_exiting = threading.Event()


def finish_before_exit(future: Future[Any]) -> None:
    """Let the interpreter wait for a save, or for maintenance after it, before it stops the thread pools."""
    _under_way.add(future)


def is_exiting() -> bool:
    """Whether the interpreter waits for what is under way."""
    return _exiting.is_set()


def _finish_all() -> None:
    try:
        _exiting.set()
        _wait_for_all()
    except KeyboardInterrupt:
        try:
            log.warning(
                "a save is still being written, and the process ends after it; interrupt again to drop it"
            )
            _wait_for_all()
        except KeyboardInterrupt:
            log.error(
                "interrupted: the process ends without waiting for its save; the versions before it are untouched"
            )
            # The interpreter would drop an exception of a hook, and end with status 0.
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


def _wait_for_all() -> None:
    while under_way := tuple(_under_way):  # a commit adds the maintenance after it
        # An interrupt that arrives just before a wait begins does not end it: it is served when the wait has.
        done, _ = wait(under_way, timeout=_LONGEST_WAIT_SECONDS)
        _under_way.difference_update(done)  # not before: an interrupt must not forget them


# A thread pool's own exit hook refuses new work, which a save that is still being written needs. Hooks run last in,
# first out, and only hooks registered here run before threads are joined.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
if hasattr(os, "register_at_fork"):
    # A fork lacks the threads that would finish them: a data loader's worker would wait forever.
    os.register_at_fork(after_in_child=_under_way.clear)
