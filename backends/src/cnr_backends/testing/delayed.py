"""A backend with the latency that a test or a benchmark gives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cnr_backends.backend import Backend
from cnr_backends.wrapper import CHANGES, WrapperBackend

Result = TypeVar("Result")


class DelayedBackend(WrapperBackend):
    """Passes every operation on to another backend, after a pause like that of a remote server.

    Operations that run at the same time wait at the same time.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    put_seconds
        Seconds that each put, create and delete waits.
    get_seconds
        Seconds that each read and each listing waits.
    """

    def __init__(self, inner: Backend, put_seconds: float = 0.0, get_seconds: float = 0.0) -> None:
        super().__init__(inner)
        self._put_seconds = put_seconds
        self._get_seconds = get_seconds

    def _pass(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        time.sleep(self._put_seconds if operation in CHANGES else self._get_seconds)
        return call()
