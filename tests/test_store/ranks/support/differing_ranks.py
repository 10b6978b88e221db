"""Jobs whose ranks do not do the same, or of which one is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import cnr_store
from cnr_store import Checkpointer
from cnr_store.ranks.protocol import SaveRound
from cnr_store.training.saving import coordinator
from cnr_store.training.saving.save_queue import SaveQueue
from tests.test_store.ranks.support.shared_model import SharedModel, Values, checkpointer_of, cut_small

SHORT_SECONDS, LONG_SECONDS = 3.0, 60.0
"""How long ranks wait for each other: where one does not come, and where an error is to come at once."""
Told = tuple[str, str, float]
"""Class and message of an error, and the seconds until it came; "" of a call that raised none."""


def told(call: Callable[[], object]) -> Told:
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - interrupts, too
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def open_checkpointer(
    url: str, timeout_seconds: float = SHORT_SECONDS, **options: Any
) -> tuple[SharedModel, Checkpointer]:
    model = SharedModel(dist.get_rank(), dist.get_world_size())
    cut_small()
    return model, checkpointer_of(
        model, url, failures=cnr_store.Failures(retry_seconds=2, timeout_seconds=timeout_seconds), **options
    )


def make_differently(folder: str, option: str) -> Told:
    """Make a checkpointer that differs in one option on the last rank."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    urls = {"url": "other", "secret": "store"}
    url = str(Path(folder) / (urls.get(option, "store") if is_last else "store"))
    if option == "memory":
        url = "memory://store"
    differing: dict[str, dict[str, Any]] = {
        "keep_last": {"keep_last": 3},
        "wrong": {"keep_last": -1},
        "overlap": {"limits": cnr_store.Limits(workers=1, overlap="skip")},
        "exact_parents": {"limits": cnr_store.Limits(exact_parents=True)},
    }
    options = differing.get(option, {})
    if is_last and option == "absent":
        return "", "", 0.0
    timeout = SHORT_SECONDS if option == "absent" else LONG_SECONDS
    return told(lambda: open_checkpointer(url, timeout, **(options if is_last else {})))


def save_differently(url: str, how: str) -> tuple[Told, Told, Values]:
    """Save differently on the last rank, then alike on all."""
    model, checkpointer = open_checkpointer(url, SHORT_SECONDS if how == "absent" else LONG_SECONDS)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model.train(1, checkpointer)
    checkpointer.save(1).result()
    model.train(2, checkpointer)
    step, full = 3 if is_last and how == "step" else 2, is_last and how == "full"
    if is_last and how.startswith("interrupt"):
        interrupt(how)
    if is_last and how == "absent":
        first: Told = "", "", 0.0
    elif is_last and how == "closed":
        first = told(checkpointer.close)
    else:
        first = told(lambda: checkpointer.save(step, full=full).result())
    second: Told = "", "", 0.0
    if how not in ("absent", "closed"):
        model.train(4, checkpointer)
        second = told(lambda: checkpointer.save(4).result())
        checkpointer.close()
    return first, second, model.values()


def interrupt(where: str) -> None:
    """Have a Ctrl-C come once in the next save of this rank."""
    owner: Any
    owner, name = {
        "interrupt in snapshot": (coordinator, "take_snapshot"),
        "interrupt in settling": (coordinator, "divide_dense"),
        "interrupt in planning": (SaveQueue, "_plan"),
    }[where]
    original = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        setattr(owner, name, original)
        raise KeyboardInterrupt

    setattr(owner, name, call)


def lose_outcome(url: str) -> tuple[Told, str, Values]:
    """The last rank never reads the outcome of the second save, and can't ask the store either."""
    model, checkpointer = open_checkpointer(url)
    model.train(1, checkpointer)
    checkpointer.save(1).result()
    model.train(2, checkpointer)
    backend = checkpointer._saves.writer.backend
    if dist.get_rank() == dist.get_world_size() - 1:
        original = backend.inner

        class Deaf:
            def __getattr__(self, name: str) -> Any:
                return getattr(original, name)

            def get(self, key: str) -> bytes:
                if key.startswith("writers/"):  # before this rank votes
                    return original.get(key)
                backend.inner = original
                raise OSError("injected")

        backend.inner = Deaf()  # type: ignore[assignment]
        hear = SaveRound.outcome

        def hear_nothing(save: SaveRound) -> None:
            hear(save)  # by then it is committed

        with patch.object(SaveRound, "outcome", hear_nothing):
            first = told(lambda: checkpointer.save(2).result())
    else:
        first = told(lambda: checkpointer.save(2).result())
    model.train(3, checkpointer)
    version = checkpointer.save(3).result().id
    checkpointer.close()
    return first, version, model.values()
