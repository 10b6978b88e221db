"""Loads of many ranks: the first rank chooses the version, and all of them load it, or none counts it as loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from cnr_store.errors import CheckpointError, RanksError
from cnr_store.format.record import Record
from cnr_store.ranks.group import Document, Group
from cnr_store.training.loading.load_result import Restored
from cnr_store.writing.team import error_document, error_from

T = TypeVar("T")
PIECE_BYTES = 8 << 20
"""Sent at once: a large store's metadata takes long, and a rank is waited for as long as it makes progress."""
Attempt = Callable[[Record], Restored]
JointAttempt = Callable[[Callable[[], Record]], Restored]


def on_all(group: Group, phase: str, work: Callable[[], T], progress: Callable[[], int]) -> T:
    """Do something on all ranks, which fails on all if it fails on one.

    `progress`: gives another number whenever something was done: the other ranks wait as long as that goes on.
    """
    if group.world == 1:
        return work()
    failure: Exception | None = None
    result: T | None = None
    try:
        with group.working(phase, progress):
            result = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        failure = error
    except BaseException as error:  # an interrupt
        group.refuse(phase, type(error).__name__)
        raise
    found = group.decide(phase, {} if failure is None else error_document(failure), _first_error)
    if failure is not None:
        raise failure
    if found:
        raise error_from({**found, "text": f"{phase}: {found['text']}"}, RanksError)
    return result  # type: ignore[return-value]  # there was no failure


def on_first_then_all(
    group: Group,
    phase: str,
    work: Callable[[], T],
    progress: Callable[[], int],
    pack: Callable[[T], bytes],
    unpack: Callable[[bytes], None],
) -> T:
    """Do something on the first rank, then on the others with what that one has read, as `on_all` does.

    `pack`: what the first rank has read, for `unpack` of the others.
    """
    if group.world == 1:
        return work()
    first = on_all(group, phase, lambda: [work()] if group.rank == 0 else [], progress)

    def follow() -> T:
        data = _broadcast(group, lambda: pack(first[0]))
        if group.rank == 0:
            return first[0]
        unpack(data)
        return work()

    return on_all(group, phase, follow, progress)


def _broadcast(group: Group, pack: Callable[[], bytes]) -> bytes:
    """What rank 0 packs, on all ranks, right after a decision."""
    try:
        data = pack() if group.rank == 0 else b""
        head = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        told = json.loads(group.broadcast(json.dumps(head).encode() if group.rank == 0 else None))
        pieces = [
            group.broadcast(data[begin : begin + PIECE_BYTES] if group.rank == 0 else None)
            for begin in range(0, told["bytes"], PIECE_BYTES)
        ]
    except BaseException as error:
        if not isinstance(error, RanksError):  # the others may wait for this rank
            group.break_off()
        raise
    data = data or b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != told["sha256"]:
        raise RanksError(f"rank {group.rank} got other bytes than rank 0 sent: load again")
    return data


def _first_error(documents: list[Document]) -> Document:
    failed = ((rank, doc) for rank, doc in enumerate(documents) if "error" in doc)
    return next(({**doc, "text": f"rank {rank}: {doc['text']}"} for rank, doc in failed), {})


def load_jointly(
    group: Group,
    choose: Callable[[Attempt], Restored],
    attempt: JointAttempt,
    find: Callable[[str], Record],
) -> Restored:
    """Load on all ranks what the first one chooses.

    `choose`: calls what it is given for the versions that it tries. Only the first rank runs it.
    `attempt`: loads one version, together with the other ranks. Gets a function that finds its record, which may fail.
    `find`: the record of a version by its id.
    """
    if group.world == 1:
        return choose(lambda record: attempt(lambda: record))
    if group.rank > 0:
        return _follow(group, attempt, find)

    def try_together(record: Record) -> Restored:
        _tell(group, {"try": record.id})
        return attempt(lambda: record)

    try:
        restored = choose(try_together)
    except Exception as error:
        _tell(group, error_document(error))
        raise
    except BaseException as error:  # an interrupt
        group.refuse("load", type(error).__name__)
        raise
    _tell(group, {"skipped": [list(each) for each in restored.skipped]})
    return restored


def _follow(group: Group, attempt: JointAttempt, find: Callable[[str], Record]) -> Restored:
    restored: Restored | None = None
    failure: Exception | None = None
    while "try" in (told := _tell(group, {})):
        restored, failure = None, None
        try:
            restored = attempt(partial(find, str(told["try"])))
        except Exception as error:  # noqa: BLE001 - the first rank has heard of it, and decides what is tried next
            failure = error
        except BaseException as error:  # an interrupt: the first rank comes to its next decision
            group.refuse("load", type(error).__name__)
            raise
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure  # the storage's, say, which the others only heard of
    if "error" in told or restored is None:
        raise error_from(told, RanksError)
    return restored


def _tell(group: Group, said: Document) -> Document:
    """What the first rank says."""
    return group.decide("load", said, lambda documents: documents[0])
