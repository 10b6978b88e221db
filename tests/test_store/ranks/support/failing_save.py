"""A job of several ranks, one of which fails, is killed or is stopped in a chosen phase of its second save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.errors import RanksError
from cnr_store.ranks.group import Document
from cnr_store.ranks.protocol import SaveRound
from cnr_store.training.distributed.torch_group import TorchGroup, TorchKeyValue
from cnr_store.training.saving import coordinator
from cnr_store.writing import writer
from cnr_store.writing.writer import Writer
from tests.test_store.ranks.support.rank_processes import reach
from tests.test_store.ranks.support.shared_model import SharedModel, Values, checkpointer_of, cut_small

TIMEOUT_SECONDS = 3.0
POINT = "strike"


@dataclass(frozen=True)
class Report:
    """What a rank saw of the second save, and what it held.

    Attributes
    ----------
    version
        What was committed; "" of a failed save.
    error, text
        Class and message of the failure.
    seconds
        From the call until the outcome.
    struck
        Whether the fault came on this rank.
    values
        By step, what the rank held after it.
    """

    version: str
    error: str
    text: str
    seconds: float
    struck: bool
    values: dict[int, Values]


class Trouble:
    """A fault that comes once, when armed, as an error or as a point that the test's signals wait for."""

    def __init__(self, how: str, error: Exception) -> None:
        self._raises = how == "raise"
        self._error = error
        self.armed = self.struck = False

    def strike(self) -> None:
        if not self.armed or self.struck:
            return
        self.struck = True
        if self._raises:
            raise self._error
        reach(POINT)

    def before(self, owner: Any, name: str, applies: Callable[..., bool] = lambda *_: True) -> None:
        """Have the fault come before a function or method is called."""
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if applies(*arguments):
                self.strike()
            return original(*arguments, **named)

        setattr(owner, name, call)

    def deafen(self) -> None:
        """Have this rank hear no outcome, once it is armed."""
        original = SaveRound.outcome

        def outcome(save: SaveRound) -> Document | None:
            found = original(save)
            return None if self.armed and not self.struck else found

        SaveRound.outcome = outcome  # type: ignore[assignment, method-assign]

    def in_storage(self, operation: str, part: str, kind: Fault) -> Callable[[str, str, int], Fault]:
        """Have the fault come with an operation of a key."""

        def decide(found: str, key: str, _: int) -> Fault:
            if found != operation or part not in key or not self.armed or self.struck:
                return None
            if not self._raises:
                self.strike()
                return None
            self.struck = True
            return kind

        return decide


def _nothing(*_: object) -> Fault:
    return None


def prepare(url: str, phase: str, how: str, rank: int) -> tuple[Trouble, FaultyBackend]:
    """Have trouble come on this rank in a phase of a save, once it is armed."""
    trouble = Trouble(how, RanksError("injected") if phase == "record" else OSError("injected"))
    storage: Callable[[str, str, int], Fault] = _nothing
    if phase == "":
        pass
    elif phase == "agree":
        trouble.before(TorchKeyValue, "set", lambda _, key, *__: key.startswith("decide/"))
    elif phase == "snapshot":
        trouble.before(coordinator, "take_snapshot")
    elif phase == "claim":
        trouble.before(Writer, "_check_shared" if rank else "_claimed")
    elif phase == "encode":
        trouble.before(writer, "stage")
    elif phase == "exchange":
        trouble.before(TorchGroup, "exchange")
    elif phase == "put":
        storage = trouble.in_storage("put", "/c/", "before")
    elif phase == "vote":
        trouble.before(TorchKeyValue, "set", lambda _, key, *__: "/vote/" in key)
    elif rank == 0:
        if phase == "outcome":
            trouble.before(SaveRound, "conclude")
        else:
            place = {"record": ("put", "manifest"), "commit": ("create", "zarr.json")}
            storage = trouble.in_storage(*place[phase], "before")
    elif phase == "record":
        trouble.before(TorchKeyValue, "get", lambda _, key: key.endswith("/outcome"))
    else:  # a rank that hears nothing of rank 0 asks the storage
        trouble.deafen()
        kind: Fault = "unreachable" if phase == "commit" else "unanswered"
        storage = trouble.in_storage("get", "zarr.json", kind)
    return trouble, FaultyBackend(open_backend(url), storage, reads=True)


def save_with_trouble(url: str, phase: str, victim: int, how: str) -> Report:
    """Save, then save again with trouble on one rank; after an error there, once more, on all ranks."""
    rank = dist.get_rank()
    model = SharedModel(rank, dist.get_world_size())
    trouble, backend = prepare(url, phase if rank == victim else "", how, rank)
    cut_small()
    checkpointer = checkpointer_of(
        model, backend, failures=cnr_store.Failures(retry_seconds=2, timeout_seconds=TIMEOUT_SECONDS)
    )
    values: dict[int, Values] = {}

    def save(step: int) -> VersionInfo:
        model.train(step, checkpointer)
        values[step] = model.values()
        return checkpointer.save(step).result()

    save(1)
    trouble.armed = True
    version, error, text = "", "", ""
    began = time.monotonic()
    try:
        version = save(2).id
    except Exception as failure:  # noqa: BLE001 - what the test looks at
        error, text = type(failure).__name__, str(failure)
    seconds = time.monotonic() - began
    if how == "raise":
        save(3)
        checkpointer.close()
    return Report(version, error, text, seconds, trouble.struck, values)


def load_everything(url: str) -> Values:
    """What a job of any number of ranks loads."""
    model = SharedModel(dist.get_rank(), dist.get_world_size())
    with checkpointer_of(
        model, url, failures=cnr_store.Failures(retry_seconds=2, timeout_seconds=20)
    ) as checkpointer:
        checkpointer.load()
        return model.values()
