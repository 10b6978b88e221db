"""Moves what a device made to host memory, while training goes on.

Pieces pass through a ring of pinned memory, `RING_SLOTS` slots of `SLOT_BYTES`, on a stream of its own: a slot is
filled again once what it held stands in ordinary memory. A piece stays on the device until it is there. Pieces that
wait have half of the device's free memory, or `LEAST_STAGED_BYTES`: who brings more waits until some are moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Condition
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

Arrays = list[np.ndarray[Any, Any]]
Octets = npt.NDArray[np.uint8]
RING_SLOTS, SLOT_BYTES = 4, 16 << 20
PIECE_BYTES = 64 << 20
"""Of a piece, about."""
LEAST_STAGED_BYTES = 2 * PIECE_BYTES


class Event(Protocol):
    """A moment on a stream."""

    def synchronize(self) -> None:
        """Wait for it."""


class Lane(Protocol):
    """How bytes leave a device."""

    def moment(self) -> Event:
        """The moment at which all is done that is queued on the stream that is current."""

    def free_bytes(self) -> int:
        """The memory of the device that nobody has."""

    def slot(self) -> torch.Tensor:
        """Host memory that the device can write to, uint8 (SLOT_BYTES,)."""

    def copy(self, moment: Event, source: torch.Tensor, slot: torch.Tensor) -> Event:
        """Begin to copy bytes into a slot, after a moment and all earlier copies: the moment at which it is done."""


class Mover:
    """Moves pieces from one device to host memory, in the order in which they are given."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._slots: list[torch.Tensor] = []
        self._staged_bytes = 0
        self._changed = Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cnr-move")

    @property
    def staged_bytes(self) -> int:
        """What pieces that are not moved yet have on the device."""
        return self._staged_bytes

    def close(self) -> None:
        """Wait until all is moved, and move nothing more."""
        self._thread.shutdown()

    def move(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        """Begin to move a piece, as it will be once what is queued on the stream that is current is done.

        It waits until there is room for another piece on the device.

        Parameters
        ----------
        tensors
            Contiguous. Nothing else writes to them, and no one else keeps them.

        Returns
        -------
        What waits until the piece is there, on any thread, and returns it.
        """
        nbytes, held = sum(each.nbytes for each in tensors), list(tensors)
        moment = self._lane.moment()
        self._stage(nbytes)
        try:
            moved = self._thread.submit(self._moved, moment, held, nbytes)
        except BaseException:
            self._stage(-nbytes)
            raise
        if self._staged_bytes + PIECE_BYTES > LEAST_STAGED_BYTES:
            most = max(LEAST_STAGED_BYTES, (self._lane.free_bytes() + self._staged_bytes) // 2)
            with self._changed:
                self._changed.wait_for(lambda: self._staged_bytes + PIECE_BYTES <= most)
        return moved.result

    def _stage(self, nbytes: int) -> None:
        with self._changed:
            self._staged_bytes += nbytes
            self._changed.notify_all()

    def _moved(self, moment: Event, tensors: list[torch.Tensor], nbytes: int) -> Arrays:
        try:
            self._slots = self._slots or [self._lane.slot() for _ in range(RING_SLOTS)]
            found: Arrays = [torch.empty(each.shape, dtype=each.dtype).numpy() for each in tensors]
            self._fill(moment, _slices(tensors, found))
            return found
        finally:
            tensors.clear()  # whoever still has the future
            self._stage(-nbytes)

    def _fill(self, moment: Event, slices: Iterator[tuple[torch.Tensor, Octets]]) -> None:
        free, under_way = deque(self._slots), deque[tuple[Event, torch.Tensor, Octets]]()

        def land() -> None:
            done, slot, target = under_way.popleft()
            done.synchronize()
            target[:] = slot[: len(target)].numpy()
            free.append(slot)

        try:
            for source, target in slices:
                if not free:
                    land()
                slot = free.popleft()
                under_way.append((self._lane.copy(moment, source, slot[: len(source)]), slot, target))
            while under_way:
                land()
        except BaseException:
            self._slots = []  # some may still be written to
            raise


def _slices(sources: Sequence[torch.Tensor], targets: Arrays) -> Iterator[tuple[torch.Tensor, Octets]]:
    """The bytes of each, as many together as a slot holds."""
    for source, target in zip(sources, targets, strict=True):
        flat, to = source.reshape(-1).view(torch.uint8), target.reshape(-1).view(np.uint8)
        for first in range(0, len(flat), SLOT_BYTES):
            yield flat[first : first + SLOT_BYTES], to[first : first + SLOT_BYTES]


def start_copy(tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
    """Begin to move tensors of one device, as `Mover.move`."""
    return _mover(tensors[0].device).move(tensors)


@cache
def _mover(device: torch.device) -> Mover:
    return Mover(_Cuda(device) if device.type == "cuda" else _Host())


class _Cuda:
    """A CUDA device: pinned memory, and a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def moment(self) -> Event:
        found: Event = torch.cuda.current_stream(self._device).record_event()
        return found

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + unused)

    def slot(self) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device):  # else a thread would begin to use the first one
                return torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no more memory may be pinned: copies to other memory are only slower
            return torch.empty(SLOT_BYTES, dtype=torch.uint8)

    def copy(self, moment: Event, source: torch.Tensor, slot: torch.Tensor) -> Event:
        with torch.cuda.stream(self._side):
            self._side.wait_event(cast(torch.cuda.Event, moment))
            slot.copy_(source, non_blocking=True)
            found: Event = self._side.record_event()
        return found


class _Host:
    """Host memory that is taken for a device's: for tests."""

    def moment(self) -> Event:
        return self

    def synchronize(self) -> None:
        """All is done at once."""

    def free_bytes(self) -> int:
        return 0

    def slot(self) -> torch.Tensor:
        return torch.empty(SLOT_BYTES, dtype=torch.uint8)

    def copy(self, moment: Event, source: torch.Tensor, slot: torch.Tensor) -> Event:
        slot.copy_(source)
        return moment
