"""Pieces come to host memory in order, through a ring that is bounded, and none is overwritten before it is there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from cnr_store.training.devices import moving
from cnr_store.training.devices.moving import LEAST_STAGED_BYTES, PIECE_BYTES, RING_SLOTS, SLOT_BYTES, Mover
from tests.test_store.training.devices.device import DEVICE

SLOT, PIECE = 8, 64
_SCRIBBLE = 0xEE
SECONDS = 30


@dataclass
class Moment:
    """A moment on the stream of a device."""

    name: str
    come: threading.Event = field(default_factory=threading.Event)

    def synchronize(self) -> None:
        assert self.come.wait(SECONDS), f"{self.name} never came"


@dataclass
class Copied:
    """The end of a copy, which a device makes when it likes: here, as late as may be."""

    device: Device
    moment: Moment
    source: torch.Tensor
    slot: torch.Tensor

    def synchronize(self) -> None:
        self.moment.synchronize()
        self.slot.copy_(self.source)
        self.device.under_way.remove(self)


class Device:
    """A pretended device: copies are made at the last moment, and what is in a slot before is spoilt."""

    def __init__(self) -> None:
        self.free = 0
        self.are_held = False
        self.moments: list[Moment] = []
        self.slots: list[torch.Tensor] = []
        self.under_way: list[Copied] = []
        self.copies: list[tuple[str, bytes]] = []
        self.most_under_way = 0
        self.fails: Callable[[], bool] = lambda: False

    def moment(self) -> Moment:
        found = Moment(f"moment {len(self.moments)}")
        if not self.are_held:
            found.come.set()
        self.moments.append(found)
        return found

    def free_bytes(self) -> int:
        return self.free

    def slot(self) -> torch.Tensor:
        self.slots.append(torch.zeros(SLOT, dtype=torch.uint8))
        return self.slots[-1]

    def copy(self, moment: moving.Event, source: torch.Tensor, slot: torch.Tensor) -> Copied:
        assert isinstance(moment, Moment)
        if self.fails():
            raise RuntimeError("CUDA error: device lost")
        assert all(each.slot.data_ptr() != slot.data_ptr() for each in self.under_way)
        slot.fill_(_SCRIBBLE)
        self.copies.append((moment.name, source.numpy().tobytes()))
        self.under_way.append(Copied(self, moment, source, slot))
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return self.under_way[-1]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(moving, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(moving, "LEAST_STAGED_BYTES", 2 * PIECE)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mover(device: Device) -> Iterator[Mover]:
    found = Mover(device)
    yield found
    for each in device.moments:
        each.come.set()
    found.close()


def piece(seed: int) -> list[torch.Tensor]:
    """Tensors of several types, some of them empty, of no whole number of slots."""
    random = np.random.default_rng(seed)
    octets = torch.from_numpy(random.integers(0, 255, (random.integers(1, 6), 3)).astype(np.uint8))
    return [torch.randn(2, 3), torch.randn(0, 4).half(), octets, torch.tensor([seed, -1])]


def test_pieces_arrive_in_order_and_unspoilt(mover: Mover, device: Device) -> None:
    pieces = [piece(seed) for seed in range(20)]
    waiting = [mover.move(each) for each in pieces]
    for wait, tensors in reversed(list(zip(waiting, pieces, strict=True))):
        for found, wanted in zip(wait(), tensors, strict=True):
            assert found.dtype == wanted.numpy().dtype
            np.testing.assert_array_equal(found, wanted.numpy())
    order = [
        b"".join(octets for name, octets in device.copies if name == each.name) for each in device.moments
    ]
    assert order == [b"".join(each.numpy().tobytes() for each in tensors) for tensors in pieces]
    assert [name for name, _ in device.copies] == sorted(
        (name for name, _ in device.copies), key=lambda name: int(name.split()[1])
    )


def test_ring_is_bounded(mover: Mover, device: Device) -> None:
    large = torch.arange(1000)
    for _ in range(3):
        (found,) = mover.move([large])()
        np.testing.assert_array_equal(found, large.numpy())
    assert len(device.slots) == device.most_under_way == RING_SLOTS
    assert not device.under_way


def test_bounds_are_those_that_the_page_states() -> None:
    assert RING_SLOTS * SLOT_BYTES == 64 << 20
    assert LEAST_STAGED_BYTES == 2 * PIECE_BYTES == 128 << 20


def test_a_slot_is_used_again_only_when_its_bytes_were_taken(mover: Mover, device: Device) -> None:
    """As long as the first copy is not done, there are no more copies than slots."""
    device.are_held, device.free = True, 1 << 20
    wait = mover.move([torch.arange(100)])
    device.are_held = False
    others = [mover.move([torch.full((3,), value)]) for value in range(2)]
    device.moments[0].come.set()
    np.testing.assert_array_equal(wait()[0], np.arange(100))
    assert [each()[0].tolist() for each in others] == [[value] * 3 for value in range(2)]
    assert device.most_under_way == RING_SLOTS


@pytest.mark.parametrize(("free", "fit"), [(0, 1), (8 * PIECE, 3)])
def test_who_brings_more_than_there_is_room_for_waits(
    mover: Mover, device: Device, free: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is what a save may have on the device: half of what is free there without it, or two pieces."""
    device.are_held, waited = True, list[int]()
    wait_for = mover._changed.wait_for

    def let_one_pass(is_there: Callable[[], bool]) -> bool:
        if not is_there():
            waited.append(len(device.moments))
            next(each for each in device.moments if not each.come.is_set()).come.set()
        return wait_for(is_there, SECONDS)

    monkeypatch.setattr(mover._changed, "wait_for", let_one_pass)
    most = max(2 * PIECE, free // 2)
    waiting = []
    for number in range(8):
        device.free = free - mover.staged_bytes - PIECE
        waiting.append(mover.move([torch.full((PIECE,), number, dtype=torch.uint8)]))
        assert mover.staged_bytes + PIECE <= most
    assert waited[0] == fit + 1
    for each in device.moments:
        each.come.set()
    assert [int(wait()[0][-1]) for wait in waiting] == list(range(8))
    assert mover.staged_bytes == 0


def test_a_piece_that_fails_is_told_to_who_waits_for_it_alone(mover: Mover, device: Device) -> None:
    fails = iter([False] * 3 + [True])
    device.fails = lambda: next(fails, False)
    failing, sound = mover.move([torch.arange(40)]), mover.move([torch.arange(50)])
    with pytest.raises(RuntimeError, match="device lost"):
        failing()
    np.testing.assert_array_equal(sound()[0], np.arange(50))
    # Its copies may still be written to the slots that it had.
    assert len(device.slots) == 2 * RING_SLOTS
    assert mover.staged_bytes == 0


def test_a_piece_is_let_go_once_it_is_there(mover: Mover) -> None:
    tensors = [torch.arange(40)]
    wait = mover.move(tensors)
    wait()
    gone = weakref.ref(tensors[0])
    del tensors
    assert gone() is None
    np.testing.assert_array_equal(wait()[0], np.arange(40))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_on_a_device_a_piece_is_as_it_was_when_it_was_given() -> None:
    """It is copied once what was queued has made it, and before its memory is used for something else."""
    lane = moving._Cuda(torch.empty(0, device=DEVICE).device)
    assert lane.slot().is_pinned()
    assert lane.free_bytes() > 0
    mover, waiting = Mover(lane), []
    work = torch.eye(2048, device=DEVICE)
    for number in range(20):
        for _ in range(20):
            work = work @ work
        made = torch.full((100,), number, device=DEVICE) + (work[0, :100] > 2)
        waiting.append(mover.move([made]))
        del made
        torch.full((100,), -1, device=DEVICE)
    for number, wait in enumerate(waiting):
        np.testing.assert_array_equal(wait()[0], np.full(100, number))
    mover.close()
