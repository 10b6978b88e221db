"""The keys of a torch.distributed store, read without ever blocking for good, and how ranks find one another in it."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import MAX_MARGIN_SECONDS, absence, decode, encode, pauses
from cnr_store.ranks.keyvalue import KeyValue

T = TypeVar("T")

MAX_PART_BYTES = 4 << 20
"""Of one value. A TCPStore ends the connection over values of more than 8 MiB, which training then lacks, too."""
READ_TOGETHER = 256
"""Values of one answer: all that the ranks say to one of them may be large."""
Store: TypeAlias = Any
"""A `torch.distributed.Store`, which the types of torch do not export."""
_Call = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class TorchKeyValue:
    """A `KeyValue` over a store of torch.distributed.

    A store whose process is stopped blocks whoever asks it. So one thread asks, and the caller gives up in time.

    `store`: the store.
    `prefix`: what begins all keys.
    `timeout_seconds`: how long one request may take.
    """

    def __init__(self, store: Store, prefix: str, timeout_seconds: float) -> None:
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # public, if its types do not say so
        self._timeout = timeout_seconds
        self._parts: dict[str, list[str]] = {}
        """Of the large values that were written here, by key; also of those written over, which may be being read."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(self._calls,), name="cnr-keys", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        written = self._put_parts(key, value)
        self._ask(self._store.set, key, written)
        self._remember(key, written)

    def get(self, key: str) -> bytes | None:
        value = self._ask(_get, self._store, key)
        return None if value is None else self._whole(value)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read many values, in two requests for most of the ranks there are; None while one of them is missing."""
        if not self._ask(self._store.check, list(keys)):
            return None
        values: list[bytes] = []
        for start in range(0, len(keys), READ_TOGETHER):
            values += self._ask(self._store.multi_get, list(keys[start : start + READ_TOGETHER]))
        found = [value for value in map(self._whole, values) if value is not None]
        return found if len(found) == len(keys) else None

    def compare_set(self, key: str, value: bytes) -> bytes:
        written = self._put_parts(key, value)
        current = self._ask(self._store.compare_set, key, "", written)
        if current == written:
            self._remember(key, written)
        else:
            self._remove(_parts(written))
        found = self._whole(current)
        if found is None:
            raise RanksError(f"{key} was removed while it was read: try again")
        return found

    def delete(self, key: str) -> None:
        self._remove([key, *self._parts.pop(key, ())])

    def _remember(self, key: str, written: bytes) -> None:
        if names := _parts(written):
            self._parts.setdefault(key, []).extend(names)

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask(self._store.delete_key, key)

    def _put_parts(self, key: str, value: bytes) -> bytes:
        """What to write for a value: itself, or the names of its parts, which are written first."""
        if len(value) <= MAX_PART_BYTES:
            return b"=" + value
        names = []
        for start in range(0, len(value), MAX_PART_BYTES):
            names.append(f"{key}/{uuid.uuid4().hex}")
            self._ask(self._store.set, names[-1], value[start : start + MAX_PART_BYTES])
        return b"/" + " ".join(names).encode()

    def _whole(self, written: bytes) -> bytes | None:
        """A value from what was written for it; None where its parts were removed meanwhile."""
        names = _parts(written)
        if not names:
            return written[1:]
        if not self._ask(self._store.check, names):  # a store waits for what it lacks
            return None
        return b"".join(self._ask(self._store.get, name) for name in names)

    def close(self) -> None:
        """End the thread that asks."""
        self._calls.put(None)

    def _ask(self, call: Callable[..., T], *arguments: Any) -> T:
        answer: Future[T] = Future()
        self._calls.put((call, arguments, answer))
        try:
            return answer.result(self._timeout)
        except (RuntimeError, TimeoutError) as error:  # a store that ended, or is stopped
            raise RanksError(
                f"the store of the process group did not answer ({str(error) or type(error).__name__}): "
                "restart the job if its process ended or hangs"
            ) from error


def _parts(written: bytes) -> list[str]:
    """The names of the parts of a value; none where it is written as one."""
    return written[1:].decode().split(" ") if written[:1] == b"/" else []


def _get(store: Store, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _answer(calls: queue.SimpleQueue[_Call | None]) -> None:
    for call, arguments, answer in iter(calls.get, None):
        try:
            answer.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            answer.set_exception(error)


PHASE = "construct"


def agree_on_token(keyvalue: KeyValue, rank: int, world: int, timeout_seconds: float) -> str:
    """Agree on the random name of a new group, on all ranks at once.

    Every rank writes a random greeting, rank 0 writes the token with the greetings it has read. A rank that finds its
    own among these knows that the token is new, and acknowledges it under the token's name: so rank 0 knows that the
    rank is there now.

    `keyvalue`: keys that only this function uses.
    `rank`, `world`: the number of this rank, and of all ranks.
    `timeout_seconds`: how long a rank waits for the others.
    """
    try:
        if rank == 0:
            return _lead(keyvalue, world, timeout_seconds)
        return _follow(keyvalue, rank, timeout_seconds)
    except RanksError as error:
        raise RanksError(f"{PHASE}: {error}") from error


def _lead(keyvalue: KeyValue, world: int, timeout_seconds: float) -> str:
    token = uuid.uuid4().hex
    answered: dict[str, str] = {}
    missing = set(range(1, world))
    for _ in pauses(timeout_seconds):
        greetings = {str(rank): keyvalue.get(f"greeting/{rank}") for rank in missing}
        fresh = {rank: value.decode() for rank, value in greetings.items() if value is not None}
        if not fresh.items() <= answered.items():
            answered |= fresh
            keyvalue.set("token", encode({"token": token, "greetings": answered}))
        missing = {rank for rank in missing if keyvalue.get(f"{token}/{rank}") is None}
        if not missing:
            break
    error = absence(missing, set(range(world)) - missing, timeout_seconds) if missing else ""
    keyvalue.set(f"{token}/go", encode({"error": error}))
    if error:
        raise RanksError(error)
    return token


def _follow(keyvalue: KeyValue, rank: int, timeout_seconds: float) -> str:
    greeting = uuid.uuid4().hex
    keyvalue.set(f"greeting/{rank}", greeting.encode())
    token = ""
    for _ in range(2):
        for _ in pauses(timeout_seconds + min(MAX_MARGIN_SECONDS, timeout_seconds / 4)):
            value = keyvalue.get(f"{token}/go" if token else "token")
            if value is None:
                continue
            document = decode(value)
            if token:
                if document["error"]:
                    raise RanksError(document["error"])
                return token
            if document["greetings"].get(str(rank)) == greeting:
                token = document["token"]
                keyvalue.set(f"{token}/{rank}", b"here")
        if not token:  # else rank 0 is there, and waits for the others in turn
            break
    raise RanksError(absence([0], [rank], timeout_seconds))
