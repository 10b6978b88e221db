"""Moves what a device made to host memory, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Semaphore
from typing import Any

import numpy as np
import torch

Arrays = list[np.ndarray[Any, Any]]
MOST_PIECES = 32
"""That wait on a device until they are copied. Who brings more waits, too."""


def start_copy(tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
    """Begin to move tensors, as they will be once what is queued on the stream that is current is done.

    `tensors`: contiguous, of one device. Nothing else writes to them, and no one else keeps them.

    Returns: What waits until they are there, on any thread, and returns them.
    """
    if tensors[0].is_cuda:
        return _mover(tensors[0].device).move(tensors)
    found = [each.cpu().numpy() for each in tensors]
    return lambda: found


class _Mover:
    """Moves pieces from a CUDA device through pinned memory, on a stream of its own.

    Of two threads, one waits for the device while the other takes what was copied to ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._room = device, Semaphore(MOST_PIECES)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="cnr-move")

    def move(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        moment = torch.cuda.current_stream(self._device).record_event()
        self._room.acquire()
        try:
            return self._threads.submit(self._moved, moment, list(tensors)).result
        except BaseException:
            self._room.release()
            raise

    def _moved(self, moment: torch.cuda.Event, tensors: list[torch.Tensor]) -> Arrays:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._side):
                self._side.wait_event(moment)
                staged = [_pinned_like(each).copy_(each, non_blocking=True) for each in tensors]
                copied = self._side.record_event()
            copied.synchronize()
            return [each.numpy().copy() for each in staged]
        finally:
            tensors.clear()  # whoever still has the future
            self._room.release()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be pinned: copies to other memory are only slower
        return torch.empty_like(tensor, device="cpu")


@cache
def _mover(device: torch.device) -> _Mover:
    return _Mover(device)
