"""The ranks of a torch.distributed job: control over the store, arrays and messages over gloo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import Decisions
from cnr_store.ranks.group import Alone, Document, Group, Judge, Piece
from cnr_store.training.distributed.hello import agree_on_token
from cnr_store.training.distributed.messages import Gloo, Messages, break_connections
from cnr_store.training.distributed.shared_keys import Store, TorchKeyValue

ROLL_CALL_SECONDS = 2.0


class TorchGroup(Group):
    """The ranks of a process group of torch.distributed. All of them make it, at the same point of the program.

    It has two gloo groups of its own, one for the training thread and one for the background, and keys of its own in
    the store of the process group, so that it never meets what training sends. torch knows nothing of these groups: the
    names of those it knows come from how many there are, which may differ between ranks, and return when one is gone.

    Parameters
    ----------
    process_group
        The ranks that train together; by default all of them. Of any backend.
    timeout_seconds
        How long a rank that does not come or makes no progress is waited for.

    Raises
    ------
    RanksError
        Some ranks did not make the group, or could not be connected.
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
        """See `Group.refuse`."""
        self._decisions.refuse(phase, reason)

    def break_off(self) -> None:
        """See `Group.break_off`."""
        self._broken = True
        for group in self._groups:
            break_connections(group)

    def working(self, phase: str, progress: Callable[[], int]) -> AbstractContextManager[None]:
        """See `Group.working`."""
        return self._decisions.beats.working(phase, progress)

    def sum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Group.sum`. The values are left as they are."""
        return self._reduced("sum", values, dist.ReduceOp.SUM)

    def either(self, bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See `Group.either`. The bits are left as they are."""
        return self._reduced("either", bits, dist.ReduceOp.BOR)

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Group.broadcast`."""
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
        """See `Group.exchange`."""
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

    Parameters
    ----------
    process_group
        The ranks that train together; by default all of them.
    timeout_seconds
        How long a rank that does not come or makes no progress is waited for.
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
