"""Keeps the interpreter alive until saves under way have ended."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

_under_way: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def finish_before_exit(future: Future[Any]) -> None:
    """Let the interpreter wait for a save, or for maintenance after it, before it stops the thread pools."""
    _under_way.add(future)


def _finish_all() -> None:
    while _under_way:
        with suppress(Exception):  # its failure was logged when it happened
            _under_way.pop().exception()


# A thread pool's own exit hook refuses new work, which a save that is still being written needs. Hooks run last in,
# first out, and only hooks registered here run before threads are joined.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
if hasattr(os, "register_at_fork"):
    # A fork lacks the threads that would finish them: a data loader's worker would wait forever.
    os.register_at_fork(after_in_child=_under_way.clear)
