"""The ranks of a job: what they decide together, and what they send to one another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cnr_store.errors import RanksError
from cnr_store.ranks.keyvalue import KeyValue, MemoryKeyValue

Document: TypeAlias = Mapping[str, Any]
"""A JSON object."""
Judge: TypeAlias = Callable[[list[Document]], Document]
"""From the documents of all ranks, in rank order, to what they decide. A pure function."""
Piece: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""A part of a message. Arrays are contiguous."""


class LostRankError(RanksError):
    """The connection to a rank broke in an exchange.

    `rank`: which one.
    `message`: what broke it.

    `rank`: as given.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Group(ABC):
    """The ranks that save and load together.

    All ranks call `decide`, `gather`, `sum`, `either` and `broadcast` from the training thread, in the same order.
    `exchange` is called from a background thread, in the same rounds on all ranks, and may run beside the others.
    """

    rank: int  # the number of this process, from 0
    world: int  # the number of ranks
    timeout_seconds: float  # how long a rank that does not come or makes no progress is waited for
    keyvalue: KeyValue  # the keys that the ranks share, for `cnr_store.ranks.protocol.SaveRound`

    @abstractmethod
    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        """Decide alike on all ranks.

        `phase`: what the ranks are about to do, such as ``"save"``. Ranks that are in different phases fail at once.
        `said`: what this rank has to say.
        `judge`: makes the verdict of all documents, in rank order. Rank 0 runs it. A `CheckpointError` that it raises
        is raised on every rank.

        Returns: the verdict, the same on all ranks.
        """

    def refuse(self, phase: str, reason: str) -> None:  # noqa: B027 - one rank alone has nobody to tell
        """Fail the next decision on the other ranks at once, because this rank does not come to it.

        `phase`: what this rank was about to do.
        `reason`: why it does not.
        """

    def break_off(self) -> None:  # noqa: B027 - as above
        """Let no rank wait for this one in `sum`, `either` or `exchange`, which work again after the next decision."""

    def working(self, phase: str, progress: Callable[[], int]) -> AbstractContextManager[None]:
        """Have ranks that wait in a decision for this one wait on while the block makes progress.

        `phase`: what the block does.
        `progress`: gives another number whenever something was done. Called on another thread.
        """
        return nullcontext()

    @abstractmethod
    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add arrays of one shape over all ranks, right after a `decide`."""

    @abstractmethod
    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """OR the bits of arrays of one shape over all ranks, right after a `decide`."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """Send the bytes of rank 0 to every rank, right after a `decide`. Other ranks pass None."""

    @abstractmethod
    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        """Send a message to each of some ranks, and receive one from each of some others.

        `messages`: per receiving rank, the pieces of its message, which arrives as one. May hold this rank itself.
        `expected`: the ranks that have a message for this one.
        `number`: the number of the save. Messages of one save never reach an exchange of another.
        `still_alive`: called many times a second while waiting, such as a `SaveRound.beat`. What it raises ends the
        exchange. Without it, an exchange ends after ``timeout_seconds`` without a message.

        Returns: per sending rank, its message.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the group holds. Must come last."""


class Alone(Group):
    """A job of one rank."""

    rank = 0
    world = 1

    def __init__(self, timeout_seconds: float = 600) -> None:
        self.timeout_seconds = timeout_seconds
        self.keyvalue = MemoryKeyValue()

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        """Judge the one document."""
        return judge([said])

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values themselves."""
        return values

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bits themselves."""
        return bits

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes themselves."""
        assert data is not None
        return data

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        """Receive what this rank sent to itself."""
        return {rank: joined(messages[rank]) for rank in expected}

    def close(self) -> None:
        """Nothing is held."""


def joined(pieces: Sequence[Piece]) -> memoryview:
    """The pieces of a message as one, which may be written into."""
    views = [piece.data if isinstance(piece, np.ndarray) else memoryview(piece) for piece in pieces]
    return memoryview(bytearray().join(view.cast("B") for view in views if view.nbytes))
