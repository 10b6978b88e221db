"""The ranks of a torch.distributed job: control over the keys of its store, arrays and messages over gloo."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import MAX_MARGIN_SECONDS, Decisions, absence, decode, encode, pauses
from cnr_store.ranks.group import Alone, Document, Group, Judge, LostRankError, Piece, joined
from cnr_store.ranks.keyvalue import KeyValue

T = TypeVar("T")
POLL_SECONDS = 0.05
ABORT_SECONDS = 0.3
"""How long a rank that lost a connection listens for why: what it lost may be a rank that gave up first."""
FOREVER = timedelta(days=1)
"""Waiting in gloo for less would break the group."""
BREAK_TAG = 2**30 + 1
"""Of no message."""
Store: TypeAlias = Any
"""A `torch.distributed.Store`, which the types of torch do not export."""
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

    `group`: a gloo group that nobody else uses.
    `rank`: this rank, within the group.
    `timeout_seconds`: how long to wait without a message where the caller does not watch.
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
                elif time.monotonic() - waiting.moved > self._timeout:
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
        self.moved = time.monotonic()  # when a transfer was complete
        if transfers:
            threading.Thread(target=self._run, name="cnr-exchange", daemon=True).start()
        else:
            self.done.set()

    def _run(self) -> None:
        try:
            for transfer in self._transfers:
                self.rank = transfer.rank
                transfer.work.wait(FOREVER)
                self.moved = time.monotonic()
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


ROLL_CALL_SECONDS = 2.0


class TorchGroup(Group):
    """The ranks of a process group of torch.distributed. All of them make it, at the same point of the program.

    It has two gloo groups of its own, one for the training thread and one for the background, and keys of its own in
    the store of the process group, so that it never meets what training sends. torch knows nothing of these groups: the
    names of those it knows come from how many there are, which may differ between ranks, and return when one is gone.

    `process_group`: the ranks that train together; by default all of them. Of any backend.
    `timeout_seconds`: how long a rank that does not come or makes no progress is waited for.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout_seconds: float = 600) -> None:
        parent = process_group or dist.group.WORLD
        assert parent is not None
        self.rank = dist.get_rank(parent)
        self.world = dist.get_world_size(parent)
        self.timeout_seconds = timeout_seconds
        self._phase = "construct"
        self._broken = False
        self._groups: list[Gloo] = []
        self._messages: Messages | None = None
        self._store = _own_connection(_store(parent))
        hello = TorchKeyValue(self._store, "cnr/hello/", timeout_seconds)
        try:
            self._token = agree_on_token(hello, self.rank, self.world, timeout_seconds)
        finally:
            hello.close()
        self.keyvalue: TorchKeyValue = TorchKeyValue(self._store, f"cnr/{self._token}/", timeout_seconds)
        self._decisions = Decisions(self.keyvalue, self.rank, self.world, timeout_seconds)
        try:
            self._connect()
        except RanksError:
            self.close()
            raise

    def decide(self, phase: str, said: Document, judge: Judge) -> Document:
        """See `Group.decide`. Connects the ranks anew where a connection broke since the last decision."""
        self._phase = phase

        def judge_all(documents: list[Document]) -> Document:
            return {
                "verdict": judge([document["said"] for document in documents]),
                "broken": any(document["broken"] for document in documents),
            }

        found = self._decisions.decide(phase, {"said": said, "broken": self._broken}, judge_all)
        if found["broken"]:
            self._disconnect()
            self._connect()
        verdict: Document = found["verdict"]
        return verdict

    def refuse(self, phase: str, reason: str) -> None:
        self._decisions.refuse(phase, reason)

    def break_off(self) -> None:
        self._broken = True
        for group in self._groups:
            break_connections(group)

    def working(self, phase: str, progress: Callable[[], int]) -> AbstractContextManager[None]:
        return self._decisions.beats.working(phase, progress)

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Group.sum`. The values are left as they are."""
        return self._reduced("sum", values, dist.ReduceOp.SUM)

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See `Group.either`. The bits are left as they are."""
        return self._reduced("either", bits, dist.ReduceOp.BOR)

    def broadcast(self, data: bytes | None) -> bytes:
        size = torch.tensor([len(data or b"")])
        self._run("broadcast", lambda group: group.broadcast(size, 0))
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        if self.rank != 0:
            sent = torch.empty(int(size), dtype=torch.uint8)
        if len(sent):
            self._run("broadcast", lambda group: group.broadcast(sent, 0))
        return sent.numpy().tobytes()

    def exchange(
        self,
        messages: Mapping[int, Sequence[Piece]],
        expected: Collection[int],
        number: int = 0,
        still_alive: Callable[[], None] | None = None,
    ) -> dict[int, memoryview]:
        sent = self._messages
        if self._broken or sent is None:
            raise RanksError("exchange: the connection between the ranks is broken until their next decision")
        try:
            return sent.exchange(messages, expected, number, still_alive)
        except BaseException:
            if sent is self._messages:  # else the groups were replaced meanwhile
                self._broken = True
            raise

    def close(self) -> None:
        """Close the connections. Training's stay."""
        self._disconnect()
        self.keyvalue.close()

    def _reduced(self, name: str, values: NDArray[Any], operation: Any) -> NDArray[Any]:
        tensor = torch.from_numpy(values.copy())
        if values.size:
            self._run(name, lambda group: group.allreduce([tensor], operation))
        return np.asarray(tensor.numpy())

    def _run(self, name: str, collective: Callable[[Gloo], dist.Work]) -> None:
        """Run a collective of all ranks on the training thread."""
        if self._broken:
            raise RanksError(f"{name}: the connection between the ranks is broken until their next decision")
        try:
            collective(self._groups[0]).wait()
        except RuntimeError as error:
            raise self._lost(name, error) from error

    def _lost(self, name: str, cause: RuntimeError) -> RanksError:
        """Break the connections, so that no rank waits on, and call the roll: whoever is silent is to blame."""
        self.break_off()
        roll = Decisions(
            self.keyvalue, self.rank, self.world, ROLL_CALL_SECONDS, f"roll/{self._decisions.number}"
        )
        what = f"{self._phase}: {name}"
        try:
            roll.decide("the connection between the ranks broke", {}, lambda _: {})
        except RanksError as error:
            return RanksError(f"{what}: {error}")
        return RanksError(
            f"{what}: the connection between the ranks broke, but all answer: try again ({cause})"
        )

    def _connect(self) -> None:
        """Make both gloo groups, on all ranks at once."""
        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            store = _own_connection(self._store)  # a group that waits for others must not keep the keys busy
            for number in range(2):
                # Of a name that no other group ever had: gloo would take the addresses of that for those of this one.
                prefix = f"cnr/{self._token}/gloo/{self._decisions.number}/{number}/"
                own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # public, as in `TorchKeyValue`
                group: Gloo = dist.ProcessGroupGloo(own, self.rank, self.world, timeout=timeout)
                self._groups.append(group)
                group.barrier().wait()
        except RuntimeError as error:
            raise self._lost("connect", error) from error
        self._messages = Messages(self._groups[1], self.rank, self.timeout_seconds)
        self._broken = False

    def _disconnect(self) -> None:
        self._messages = None
        while self._groups:  # a group that nothing refers to ends
            group = self._groups.pop()
            if self._broken:
                break_connections(group)


def job_group(process_group: dist.ProcessGroup | None = None, timeout_seconds: float = 600) -> Group:
    """The ranks of this job: `Alone` where torch.distributed is not in use.

    `process_group`: the ranks that train together; by default all of them.
    `timeout_seconds`: how long a rank that does not come or makes no progress is waited for.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return Alone(timeout_seconds)
    return TorchGroup(process_group, timeout_seconds)


def _store(group: dist.ProcessGroup) -> Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._world.pg_map[group][1]  # torch < 2.6


def _own_connection(store: Store) -> Store:
    """A store over a connection of its own where this torch can clone it: others may block theirs."""
    return store.clone() if hasattr(store, "clone") else store


MAX_PART_BYTES = 4 << 20
"""Of one value. A TCPStore ends the connection over values of more than 8 MiB, which training then lacks, too."""
READ_TOGETHER = 256
"""Values of one answer: all that the ranks say to one of them may be large."""
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
