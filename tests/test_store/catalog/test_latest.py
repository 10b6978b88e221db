"""`latest` never goes back: the newest version may be removed between its listing and its read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from tests.test_store.support.places import memory_url
from tests.test_store.support.retention_helpers import Trainer, save_many, visible

READS: dict[str, Callable[[Backend], Any]] = {
    "tag": lambda backend: cnr_store.tag(backend, "best"),
    "pin": cnr_store.pin,
    "versions": lambda backend: cnr_store.versions(backend)[-1].id,
    "compact": lambda backend: cnr_store.compact(backend).version,
    "load": lambda backend: Trainer(backend).checkpointer.load().version.id,
    "fallback": lambda backend: Trainer(backend).checkpointer.load(fallback=True).version.id,
}


@pytest.fixture
def backend() -> Iterator[Backend]:
    with memory_url() as url:
        yield open_backend(url)


@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("read", READS)
def test_latest_is_the_newest_although_it_goes_while_it_is_read(
    backend: Backend, read: str, times: int, pinned: bool
) -> None:
    trainer = Trainer(backend, policy="full", keep_last=1)
    made = [trainer.save(1), trainer.save(2)]
    trainer.checkpointer._upkeep.wait()
    if pinned:
        cnr_store.pin(backend, made[-1])
    made.append(trainer.save(3))
    trainer.checkpointer._upkeep.wait()

    def fault(operation: str, key: str, _: int) -> Fault:
        # The newest is listed, and about to be read: the job saves once more, and removes it.
        if operation == "get" and len(made) < 3 + times and key == f"versions/{made[-1]}/zarr.json":
            made.append(trainer.save(len(made) + 1))
            trainer.checkpointer._upkeep.wait()
        return None

    found = READS[read](FaultyBackend(backend, fault, reads=True))
    assert len(made) == 3 + times
    assert found == made[-1]
    trainer.close()


def test_what_is_there_is_listed_once(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    reading = FaultyBackend(backend, lambda *_: None, reads=True)
    assert visible(reading) == made
    assert reading.log.count(("list_names", "versions")) == 1
    reading.log.clear()
    backend.put(f"versions/{made[-1][:-1]}9/manifest", b"of a save under way")
    assert visible(reading) == made
    assert reading.log.count(("list_names", "versions")) == 2


def test_an_attempt_that_is_committed_meanwhile_is_found(backend: Backend) -> None:
    """It had no record when it was read first; then it was committed, and the version before it removed."""
    trainer = Trainer(backend, policy="full", keep_last=1)
    cnr_store.pin(backend, trainer.save(1))
    second = trainer.save(2)
    trainer.checkpointer._upkeep.wait()
    third = second.replace(".00000002", ".00000003")
    backend.put(f"versions/{third}/state/other", b"an attempt under way")
    made: list[str] = []

    def fault(operation: str, key: str, _: int) -> Fault:
        if operation == "get" and key == f"versions/{second}/zarr.json" and not made:
            made.append(trainer.save(3))
            trainer.checkpointer._upkeep.wait()
        return None

    assert visible(FaultyBackend(backend, fault, reads=True))[-1] == third
    assert made == [third]
    trainer.close()
