"""Copies what a device made to host memory, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

Arrays = list[np.ndarray[Any, Any]]


def start_copy(tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
    """Begin to copy tensors of one device, which nothing else writes to.

    On CUDA a stream of its own takes them to pinned memory, once what is queued on the current stream has made them.
    Nothing that is queued there later waits for it. Elsewhere they are copied here.

    Returns
    -------
    What waits for the copies, on any thread, and returns them.
    """
    if not tensors[0].is_cuda:
        found: Arrays = [each.cpu().numpy() for each in tensors]
        return lambda: found
    device = tensors[0].device
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        copies = []
        for each in tensors:
            pinned = torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
            copies.append(pinned.copy_(each, non_blocking=True))
            each.record_stream(side)  # its memory is not used again before the copy is made
        done = side.record_event()

    def wait() -> Arrays:
        done.synchronize()
        return [each.numpy() for each in copies]

    return wait


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
