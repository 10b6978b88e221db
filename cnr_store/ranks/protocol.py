"""The background part of one save over many ranks: who failed, who makes progress, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from cnr_store.errors import CheckpointError, OutageError, RanksError, SaveError
from cnr_store.ranks.decisions import FOREVER_SECONDS, Beats, Watch, decode, encode, error_from, named, pauses
from cnr_store.ranks.group import Alone, Document, Group, LostRankError, Piece
from cnr_store.ranks.keyvalue import KeyValue

MAX_BEAT_SECONDS = 0.5
MIN_CHECK_SECONDS = 0.05


class SaveRound:
    """One save on one rank, after the ranks have agreed to it.

    ::

        rank 0     announce  beat ...        votes  beat ...  conclude
        others     announced beat ...  vote                   outcome

    Any rank may `fail`; the first failure wins, and every later call but `outcome` raises it on every rank. A rank
    whose beats stop for ``timeout_seconds`` has failed, too: rank 0 watches all that have not voted, all watch rank 0.

    `keyvalue`: the keys that the ranks share.
    `rank`, `world`: the number of this rank, and of all ranks.
    `number`: the number of the save, alike on all ranks and never used twice.
    `timeout_seconds`: how long a rank may make no progress.

    `beats`: of this rank.
    """

    def __init__(
        self, keyvalue: KeyValue, rank: int, world: int, number: int, timeout_seconds: float
    ) -> None:
        self._keys = keyvalue
        self.rank, self.world = rank, world
        self._prefix = f"save/{number}"
        self._timeout = timeout_seconds
        # Beats of thousands of ranks must not keep the store busy.
        pause_seconds = min(timeout_seconds / 6, max(MAX_BEAT_SECONDS, world / 500))
        self.beats = Beats(keyvalue, self._prefix, rank, pause_seconds)
        self._lock = threading.RLock()
        self._checked = -FOREVER_SECONDS
        self._error: RanksError | None = None
        self._kind = ""
        self._watch = Watch(keyvalue, self._prefix, timeout_seconds)
        self._watched = frozenset(range(1, world)) if rank == 0 else frozenset([0])

    @property
    def failure(self) -> tuple[str, str]:
        """What this rank knows of a failure: the class of the error, "" where a rank was silent, and the message."""
        return self._kind, "" if self._error is None else str(self._error)

    def announce(self, document: Document) -> None:
        """Rank 0: tell the others, such as the id of the version that this save makes."""
        self.beat("announce")
        with self._heard("announce"):
            self._keys.set(f"{self._prefix}/announced", encode(document))

    def announced(self) -> Document:
        """Other ranks: wait for what rank 0 announces."""
        for _ in pauses(FOREVER_SECONDS):
            with self._heard("announce"):
                value = self._keys.get(f"{self._prefix}/announced")
            if value is not None:
                return decode(value)
            self.beat("announce")
        raise AssertionError("pauses without end")

    def beat(self, phase: str) -> None:
        """Tell that this rank makes progress, or waits and is well; then `check`. Cheap to call often.

        `phase`: what it works on. An error names the last phase of a rank that is gone.
        """
        with self._lock:
            with self._heard(phase):
                self.beats.beat(phase, at_once=phase != self.beats.phase)
            self.check()

    def pause(self) -> None:
        """Tell that this rank pauses and is well, whatever became of the others. Cheap to call often."""
        with self._lock, suppress(RanksError):  # the next beat finds out
            self.beats.beat(self.beats.phase)

    def check(self) -> None:
        """Raise `RanksError` if a rank has failed or is gone. Asks at most 20 times a second."""
        with self._lock:
            now = time.monotonic()
            if self._error is None and now - self._checked >= MIN_CHECK_SECONDS:
                self._checked = now
                with self._heard(self.beats.phase):
                    failure = self._keys.get(f"{self._prefix}/failure")
                    if failure is None:
                        self._fail_silent()
                    else:
                        self._note(decode(failure))
            if self._error is not None:
                raise self._error

    def fail(self, phase: str, message: str, kind: str = "") -> None:
        """Tell every rank that this one failed. Only the first failure of all ranks counts.

        `phase`: what it worked on.
        `message`: why it failed.
        `kind`: the class of the error.
        """
        self._fail({"ranks": [self.rank], "phase": phase, "message": f"failed: {message}", "kind": kind})

    def lose(self, rank: int, message: str) -> None:
        """Tell every rank that another one is gone, and what it last worked on.

        `rank`: which one.
        `message`: how this rank knows.
        """
        with suppress(RanksError):  # as in `fail`
            value = self._keys.get(f"{self._prefix}/beat/{rank}")
            phase = "begin" if value is None else decode(value)["phase"]
            self._fail({"ranks": [rank], "phase": phase, "message": f"is gone: {message}"})

    def vote(self, document: Document) -> None:
        """Tell rank 0 that this rank's part is written. It need not beat any more."""
        self.beat("vote")
        with self._heard("vote"):
            self._keys.set(f"{self._prefix}/vote/{self.rank}", encode(document))

    def votes(self) -> list[Document]:
        """Rank 0: wait for the votes of all ranks, its own among them, in rank order."""
        keys = [f"{self._prefix}/vote/{rank}" for rank in range(self.world)]
        for _ in pauses(FOREVER_SECONDS):
            with self._heard("vote"):
                votes = self._keys.get_all(keys)
            if votes is not None:
                self._watched = frozenset()
                return [decode(vote) for vote in votes]
            self.beat("vote")
        raise AssertionError("pauses without end")

    def conclude(self, document: Document) -> None:
        """Rank 0: tell what came of the save. A store that does not answer is passed over."""
        with suppress(RanksError):  # the others find out in the storage
            self._keys.set(f"{self._prefix}/outcome", encode(document))

    def outcome(self) -> Document | None:
        """Other ranks: wait for what came of the save, also after a failure.

        Returns: None where rank 0 made no progress for ``timeout_seconds``, or the store does not answer.
        """
        try:
            for _ in pauses(FOREVER_SECONDS):
                value = self._keys.get(f"{self._prefix}/outcome")
                if value is not None:
                    return decode(value)
                if self._fail_silent():  # so that rank 0 sees it should it wake
                    return None
        except RanksError:
            return None
        raise AssertionError("pauses without end")

    def forget(self) -> None:
        """Remove this rank's keys, once all ranks are known to be done with the save."""
        shared = ("announced", "failure", "outcome") if self.rank == 0 else ()
        with suppress(RanksError):  # whatever needs the keys next finds out
            for name in (*shared, f"vote/{self.rank}", f"beat/{self.rank}"):
                self._keys.delete(f"{self._prefix}/{name}")

    def _fail_silent(self) -> bool:
        """Tell of the watched ranks that are gone, if there are some."""
        gone = self._watch.silent(self._watched)
        if self.rank == 0:  # which need not beat any more
            voted = [rank for rank in gone if self._keys.get(f"{self._prefix}/vote/{rank}") is not None]
            self._watched = self._watched.difference(voted)
            gone = {rank: phase for rank, phase in gone.items() if rank not in voted}
        if gone:
            message = f"made no progress for {self._timeout:g} s"
            self._fail({"ranks": [*gone], "phase": next(iter(gone.values())), "message": message})
        return bool(gone)

    def _fail(self, failure: Document) -> None:
        with suppress(RanksError):  # the store is gone: the others find out as this rank did
            failure = decode(self._keys.compare_set(f"{self._prefix}/failure", encode(failure)))
        with self._lock:
            self._note(failure)

    def _note(self, failure: Document) -> None:
        if self._error is None:
            text = f"{failure['phase']}: {named(failure['ranks'])} {failure['message']}"
            self._error, self._kind = RanksError(text), failure.get("kind", "")

    @contextmanager
    def _heard(self, phase: str) -> Iterator[None]:
        """A store that does not answer is a failure of this rank, which the others learn from its silence."""
        try:
            yield
        except RanksError as error:
            self._error = RanksError(f"{phase}: rank {self.rank} failed: {error}")
            raise self._error from error


class Team(SaveRound):
    """One save of all ranks of a group, as the writer of each sees it. The first rank leads: it claims and commits.

    `group`: the ranks.
    `number`: which save of the group it is, the same on all ranks.
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.keyvalue, group.rank, group.world, number, group.timeout_seconds)
        self.group, self._number = group, number

    @classmethod
    def alone(cls) -> Self:
        """A team of this process."""
        return cls(Alone(), 0)

    def exchange(
        self, messages: Mapping[int, Sequence[Piece]], expected: Collection[int]
    ) -> Mapping[int, memoryview]:
        """Send each rank its message, and return those of the ranks expected."""
        self.beat("exchange")
        try:
            return self.group.exchange(messages, expected, self._number, lambda: self.beat("exchange"))
        except LostRankError as error:
            self.lose(error.rank, str(error))
            raise

    def give_up(self, error: BaseException, *, is_excused: bool = False) -> None:
        """Tell the other ranks that this one can't go on, so that none waits for it.

        If an outage has it excused, the failure is an `OutageError` on all ranks.
        """
        kind = type(error).__name__
        self.fail(self.beats.phase, f"{kind}: {error}", OutageError.__name__ if is_excused else kind)

    def told(self, error: Exception, describe: Callable[[str], str]) -> CheckpointError:
        """What the caller of this rank is told of an error: on all ranks one of the same class.

        `describe`: makes a message of what failed, on which rank and in which phase.
        """
        if isinstance(error, CheckpointError) and not isinstance(error, RanksError):
            return error
        kind, text = self.failure
        cause = str(error) if self.world == 1 else text or str(error)
        return error_from({"error": kind, "text": describe(cause)}, SaveError)
