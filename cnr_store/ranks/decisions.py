"""Decisions of all ranks over shared keys, with a deadline that names who is absent or makes no progress."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cnr_store import errors
from cnr_store.errors import CheckpointError, RanksError, listed
from cnr_store.ranks.group import Document, Judge
from cnr_store.ranks.keyvalue import KeyValue

FOREVER_SECONDS = 1e9


class Watch:
    """How long the beats of ranks have stood still, in time that this rank itself was awake.

    `keyvalue`: the keys that the ranks share.
    `prefix`: what begins the keys of beats.
    `timeout_seconds`: how long a rank may make no progress.
    """

    def __init__(self, keyvalue: KeyValue, prefix: str, timeout_seconds: float) -> None:
        self._keys = keyvalue
        self._prefix = prefix
        self._timeout = timeout_seconds
        self._looked = time.monotonic()
        self._last: dict[int, bytes | None] = {}
        self._silent_seconds: dict[int, float] = {}

    def silent(self, ranks: Collection[int]) -> dict[int, str]:
        """The ranks that have made no progress for the timeout, with the last phase of each."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < self._timeout / 20:
            return {}
        self._looked = now
        gone = {}
        for rank in ranks:
            value = self._keys.get(f"{self._prefix}/beat/{rank}")
            moved = value != self._last.get(rank)
            self._last[rank] = value
            # One that was stopped itself has seen nothing meanwhile: a look counts a quarter of the timeout at most.
            self._silent_seconds[rank] = (
                0 if moved else self._silent_seconds.get(rank, 0) + min(elapsed, self._timeout / 4)
            )
            if self._silent_seconds[rank] >= self._timeout:
                gone[rank] = "begin" if value is None else str(json.loads(value)["phase"])
        return gone


class Beats:
    """The beats of one rank.

    `keyvalue`: the keys that the ranks share.
    `prefix`: what begins the keys of beats.
    `rank`: this rank.
    `pause_seconds`: how long no other beat follows one.

    `phase`: what it works on.
    `count`: how often `beat` was called.
    """

    def __init__(self, keyvalue: KeyValue, prefix: str, rank: int, pause_seconds: float) -> None:
        self.phase, self.count = "begin", 0
        self._keys = keyvalue
        self._key = f"{prefix}/beat/{rank}"
        self._pause_seconds = pause_seconds
        self.begin()

    def begin(self) -> None:
        """Begin to wait or to work: the first beat comes only after a while."""
        self._beaten = time.monotonic()

    def beat(self, phase: str, *, at_once: bool = False) -> None:
        """Tell that this rank is well. Cheap to call often."""
        self.count += 1
        now = time.monotonic()
        if at_once or now - self._beaten >= self._pause_seconds:
            self.phase, self._beaten = phase, now
            self._keys.set(self._key, encode({"count": self.count, "phase": phase}))

    @contextmanager
    def working(self, phase: str, progress: Callable[[], int]) -> Iterator[None]:
        """Beat while the block runs, whenever `progress` gives another number than before."""
        is_over = threading.Event()

        def watch() -> None:
            last = progress()
            while not is_over.wait(self._pause_seconds):
                now = progress()
                if now != last:
                    last = now
                    try:
                        self.beat(phase)
                    except RanksError:  # whoever decides next finds out
                        return

        thread = threading.Thread(target=watch, name="cnr-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


MAX_PAUSE_SECONDS = 0.2
MAX_LOOK_SECONDS = 1.0
"""After how long rank 0 looks which of the others have come, and where they are."""
MAX_MARGIN_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that its verdict reaches them."""


class Decisions:
    """The decisions of one group, numbered alike on all ranks.

    Each rank writes its document, rank 0 reads them and writes the verdict, the others read that. A verdict is
    written once, by `KeyValue.compare_set`: where others have given up rank 0, it finds their verdict and believes it.

    `keyvalue`: keys that nobody else uses.
    `rank`, `world`: the number of this rank, and of all ranks.
    `timeout_seconds`: how long rank 0 waits for the others while they make no progress.
    `prefix`: what begins the keys.

    `number`: how many decisions there were.
    `beats`: tell the others that this rank, which they wait for, makes progress.
    """

    def __init__(
        self, keyvalue: KeyValue, rank: int, world: int, timeout_seconds: float, prefix: str = "decide"
    ) -> None:
        self.number = 0
        self._keys = keyvalue
        self._prefix = prefix
        self._rank = rank
        self._world = world
        self._timeout = timeout_seconds
        self._margin = min(MAX_MARGIN_SECONDS, timeout_seconds / 4)
        self._verdicts: list[str] = []
        self._given_up = ""  # the phase of the last decision, if the others gave this rank up in it
        self.beats = Beats(keyvalue, prefix, rank, timeout_seconds / 6)

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        """See `cnr_store.ranks.group.Group.decide`."""
        try:
            prefix = self._next(phase)
            self._keys.set(f"{prefix}/{self._rank}", encode({"phase": phase, "said": said}))
            self._keys.delete(f"{self._prefix}/{self.number - 1}/{self._rank}")
            verdict = self._lead(prefix, phase, judge) if self._rank == 0 else self._follow(prefix, phase)
        except RanksError as error:
            raise RanksError(f"{phase}: {error}") from error
        except BaseException as error:  # an interrupt: no other rank should wait for this one
            self._refuse(phase, type(error).__name__)
            raise
        if "error" in verdict:
            raise error_from(verdict)
        found: Document = verdict["verdict"]
        return found

    def refuse(self, phase: str, reason: str) -> None:
        """Fail the next decision of all ranks, which this one will not come to.

        `phase`: what this rank was about to do.
        `reason`: why it does not.
        """
        self.number += 1
        self._refuse(phase, reason)

    def _refuse(self, phase: str, reason: str) -> None:
        error = RanksError(f"{phase}: {named([self._rank])} does not take part: {reason}")
        with suppress(RanksError):  # the store is gone: the others find out as this rank did
            self._conclude(f"{self._prefix}/{self.number}", error_document(error))

    def _next(self, phase: str) -> str:
        """The prefix of the next decision, past those in which the others gave this rank up in another phase.

        In the same phase it is late, and fails as they did. If that happens twice in a row it missed one, and would be
        one behind for ever.
        """
        while True:
            self.number += 1
            prefix = f"{self._prefix}/{self.number}"
            value = self._keys.get(f"{prefix}/verdict")
            verdict = {} if value is None else decode(value)
            is_given_up = self._rank in verdict.get("without", ())
            if not is_given_up or phase == verdict["phase"] != self._given_up:
                self._given_up = phase if is_given_up else ""
                return prefix

    def _lead(self, prefix: str, phase: str, judge: Judge) -> Document:
        found: dict[int, Document] = {}
        watch = Watch(self._keys, self._prefix, self._timeout)
        gone: Collection[int] = ()
        self.beats.begin()
        looked, rest = time.monotonic(), min(MAX_LOOK_SECONDS, self._timeout / 20)
        for _ in pauses(FOREVER_SECONDS, self._timeout / 10):
            if self._keys.get(f"{prefix}/verdict") is not None:
                break
            missing = [rank for rank in range(self._world) if rank not in found]
            values = self._keys.get_all([f"{prefix}/{rank}" for rank in missing])
            if values is not None:
                found |= zip(missing, map(decode, values), strict=True)
                break
            self.beats.beat(phase)
            if time.monotonic() - looked < rest:
                continue
            looked = time.monotonic()
            come = {rank: self._keys.get(f"{prefix}/{rank}") for rank in missing}
            found |= {rank: decode(value) for rank, value in come.items() if value is not None}
            if any(document["phase"] != phase for document in found.values()):
                break
            gone = watch.silent([rank for rank in missing if rank not in found])
            if gone:
                break
        verdict = self._judged(phase, dict(sorted(found.items())), gone, judge)
        current = self._conclude(prefix, verdict)
        if len(found) == self._world:  # all have read the earlier verdicts
            while self._verdicts:
                self._keys.delete(self._verdicts.pop())
        self._verdicts.append(f"{prefix}/verdict")
        return current

    def _judged(
        self, phase: str, found: dict[int, Document], gone: Collection[int], judge: Judge
    ) -> Document:
        phases = {document["phase"] for document in found.values()}
        if len(phases) > 1:
            where = "; ".join(
                f"{named(rank for rank in found if found[rank]['phase'] == each)} in {each}"
                for each in sorted(phases)
            )
            return error_document(
                RanksError(f"ranks are in different calls: {where}: call the same on every rank")
            )
        if len(found) < self._world:
            return self._absent(phase, gone, found)
        try:
            return {"verdict": judge([document["said"] for document in found.values()])}
        except CheckpointError as error:
            return error_document(error)

    def _follow(self, prefix: str, phase: str) -> Document:
        watch, has_come = self._watch_first(), False
        for _ in pauses(FOREVER_SECONDS, self._timeout / 10):
            value = self._keys.get(f"{prefix}/verdict")
            if value is not None:
                return decode(value)
            if not watch.silent([0]):
                continue
            if has_come or self._keys.get(f"{prefix}/0") is None:
                break
            watch, has_come = self._watch_first(), True  # it came late, and waits for the others in turn
        return self._conclude(prefix, self._absent(phase, [0], [self._rank]))

    def _watch_first(self) -> Watch:
        return Watch(self._keys, self._prefix, self._timeout + self._margin)

    def _absent(self, phase: str, absent: Collection[int], present: Iterable[int]) -> Document:
        error = RanksError(f"{phase}: {absence(absent, present, self._timeout)}")
        return {**error_document(error), "phase": phase, "without": sorted(absent)}

    def _conclude(self, prefix: str, verdict: Document) -> Document:
        return decode(self._keys.compare_set(f"{prefix}/verdict", encode(verdict)))


def error_document(error: BaseException) -> Document:
    """An error for the other ranks. Of a class that `cnr_store.errors` lacks, the nearest one it has is told."""
    kinds = [base.__name__ for base in type(error).__mro__]
    return {"error": next((kind for kind in kinds if hasattr(errors, kind)), kinds[0]), "text": str(error)}


def error_from(doc: Document, otherwise: type[CheckpointError] = RanksError) -> CheckpointError:
    """The error that another rank met, of the same class if that is one of this package."""
    kind = getattr(errors, str(doc.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)) or kind is RanksError:
        kind = otherwise
    return kind(str(doc.get("text")))


def absence(absent: Iterable[int], present: Iterable[int], timeout_seconds: float) -> str:
    """What to say of ranks that did not come."""
    return (
        f"{named(absent)} did not answer within {timeout_seconds:g} s ({named(present)} did): "
        "call the same method on every rank, or restart the job if a rank ended or hangs"
    )


def pauses(limit_seconds: float, longest_seconds: float = MAX_PAUSE_SECONDS) -> Iterator[None]:
    """Return at once, then after pauses that grow from 1 ms; end when the limit has passed."""
    deadline = time.monotonic() + limit_seconds
    pause = 0.001
    longest = min(MAX_PAUSE_SECONDS, longest_seconds, limit_seconds / 10)
    while True:
        before = time.monotonic()
        yield
        now = time.monotonic()
        if before >= deadline:
            return
        pause = min(pause * 1.5, longest)
        # A look at many keys takes its time: the store is at rest for as long.
        time.sleep(max(0, min(max(pause, now - before), deadline - now)))


def named(ranks: Iterable[int]) -> str:
    """Ranks in words, such as ``rank 2`` or ``ranks 0, 1``."""
    found = sorted(ranks)
    return f"rank{'s' * (len(found) != 1)} {listed(found, 20) or 'none'}"


def encode(document: Document) -> bytes:
    """Bytes of a document."""
    return json.dumps(document).encode()


def decode(value: bytes) -> dict[str, Any]:
    """The document of some bytes."""
    document: dict[str, Any] = json.loads(value)
    return document
