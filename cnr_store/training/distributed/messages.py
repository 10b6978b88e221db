"""Messages between pairs of ranks over gloo, on a background thread, that can be given up at any time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import pauses
from cnr_store.ranks.group import LostRankError, Piece, joined

POLL_SECONDS = 0.05
ABORT_SECONDS = 0.3
"""How long a rank that lost a connection listens for why: what it lost may be a rank that gave up first."""
FOREVER = timedelta(days=1)
"""Waiting in gloo for less would break the group."""
BREAK_TAG = 2**30 + 1
"""Of no message."""
Gloo: TypeAlias = Any
"""A `torch.distributed.ProcessGroupGloo`, whose methods the types of torch do not list."""


@dataclass(frozen=True)
class _Transfer:
    """A message on its way. Its tensor must live as long as gloo may touch it."""

    rank: int
    work: dist.Work
    tensor: torch.Tensor


class Messages:
    """Exchanges over one gloo group.

    Parameters
    ----------
    group
        A gloo group that nobody else uses.
    rank
        This rank, within the group.
    timeout_seconds
        How long to wait without a message where the caller does not watch.
    """

    def __init__(self, group: Gloo, rank: int, timeout_seconds: float) -> None:
        self._group = group
        self._rank = rank
        self._timeout = timeout_seconds
        self._rounds: Counter[int] = Counter()
        self._unfinished: list[_Transfer] = []

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int,
        still_alive: Callable[[], None] | None,
    ) -> dict[int, memoryview]:
        """See `cnr_store.ranks.group.Group.exchange`."""
        tag = self._next_tag(number)
        outgoing = {rank: joined(pieces) for rank, pieces in messages.items()}
        received = {rank: outgoing[rank] for rank in expected if rank == self._rank}
        others = [rank for rank in sorted(expected) if rank != self._rank]
        outgoing.pop(self._rank, None)
        try:
            sizes = [self._receive(rank, 1, torch.int64, tag) for rank in others]
            sending = [self._send(rank, torch.tensor([data.nbytes]), tag) for rank, data in outgoing.items()]
            sending += [
                self._send(rank, torch.frombuffer(data, dtype=torch.uint8), tag + 1)
                for rank, data in outgoing.items()
                if data.nbytes
            ]
            self._wait(sizes, still_alive)
            coming = {each.rank: int(each.tensor) for each in sizes}
            arriving = [
                self._receive(rank, size, torch.uint8, tag + 1) for rank, size in coming.items() if size
            ]
            self._wait([*arriving, *sending], still_alive)
        except LostRankError:
            for _ in pauses(ABORT_SECONDS):
                if still_alive is not None:
                    still_alive()
            raise
        received |= {rank: memoryview(b"") for rank in others}
        received |= {each.rank: each.tensor.numpy().data for each in arriving}
        self._unfinished.clear()
        return received

    def _next_tag(self, number: int) -> int:
        """Different for each round of each of many saves, and alike on all ranks."""
        if number not in self._rounds:
            self._rounds.clear()
        self._rounds[number] += 1
        return (number * 4096 + self._rounds[number] % 4096) % 2**29 * 2

    def _send(self, rank: int, tensor: torch.Tensor, tag: int) -> _Transfer:
        return self._started(self._group.send, rank, tensor, tag)

    def _receive(self, rank: int, size: int, dtype: torch.dtype, tag: int) -> _Transfer:
        return self._started(self._group.recv, rank, torch.empty(size, dtype=dtype), tag)

    def _started(
        self, start: Callable[..., dist.Work], rank: int, tensor: torch.Tensor, tag: int
    ) -> _Transfer:
        try:
            work = start([tensor], rank, tag)
        except RuntimeError as error:
            raise _lost(rank, error) from error
        transfer = _Transfer(rank, work, tensor)
        self._unfinished.append(transfer)
        return transfer

    def _wait(self, transfers: Sequence[_Transfer], still_alive: Callable[[], None] | None) -> None:
        """Wait for all. gloo can't be asked whether a message has come: a thread waits, and this one watches."""
        waiting = _Waiting(transfers)
        try:
            while not waiting.done.wait(POLL_SECONDS):
                if still_alive is not None:
                    still_alive()
                elif waiting.idle_seconds() > self._timeout:
                    raise RanksError(
                        f"exchange: rank {waiting.rank} neither sent nor received anything for {self._timeout:g} s: "
                        "restart the job if the rank ended or hangs"
                    )
        except BaseException:
            break_connections(self._group)
            waiting.done.wait(ABORT_SECONDS)
            raise
        if waiting.error is not None:
            raise _lost(waiting.rank, waiting.error) from waiting.error


def _lost(rank: int, cause: RuntimeError) -> LostRankError:
    message = f"exchange: the connection to rank {rank} broke ({cause}): restart the job if the rank ended"
    return LostRankError(rank, message)


class _Waiting:
    """A thread that waits for transfers in turn."""

    def __init__(self, transfers: Sequence[_Transfer]) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None
        self.rank = transfers[0].rank if transfers else 0
        self._transfers = transfers
        self._moved = time.monotonic()
        if transfers:
            threading.Thread(target=self._run, name="cnr-exchange", daemon=True).start()
        else:
            self.done.set()

    def idle_seconds(self) -> float:
        """The time since a transfer was complete."""
        return time.monotonic() - self._moved

    def _run(self) -> None:
        try:
            for transfer in self._transfers:
                self.rank = transfer.rank
                transfer.work.wait(FOREVER)
                self._moved = time.monotonic()
        except RuntimeError as error:
            self.error = error
        finally:
            self.done.set()


def break_connections(group: Gloo) -> None:
    """Close a gloo group's connections, so that whoever waits in it, here or elsewhere, waits no more.

    gloo has no call for it, but does it when a receive comes too late.
    """
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError, ValueError):
        work = group.recv([torch.empty(1, dtype=torch.uint8)], other, BREAK_TAG)
        work.wait(timedelta(milliseconds=1))
