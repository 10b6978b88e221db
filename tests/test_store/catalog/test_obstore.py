"""Stores of obstore, through Zarr, as they are: whole round trips, and exclusive creation."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from zarr.abc.store import Store
from zarr.storage import ObjectStore

import cnr_store
from cnr_backends import ObjectExistsError, open_backend
from cnr_store import Checkpointer, SupersededError
from tests.s3_server import BUCKET
from tests.test_store.support.small_model import Ids, make_model, other_state, row_state

if TYPE_CHECKING:
    from tests.s3_server import S3Server

obstore = pytest.importorskip("obstore.store")

FIRST: Ids = {"users": [1, 2, 3], "tags": [4], "items": [0, 264]}
SECOND: Ids = {"users": [2, 299], "items": [7, 8, 9]}
PLACES = ["memory", "local", pytest.param("s3", marks=pytest.mark.server)]


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield ObjectStore(obstore.MemoryStore())
    elif request.param == "local":
        yield ObjectStore(obstore.LocalStore(tmp_path))
    else:
        yield ObjectStore(_s3(request.getfixturevalue("s3_server")))


def _s3(server: S3Server) -> Any:
    options = server.storage_options
    return obstore.S3Store(
        BUCKET,
        prefix=uuid.uuid4().hex,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


@pytest.mark.slow
def test_what_was_saved_comes_back(store: Store) -> None:
    model, optimizers = make_model("adagrad", seed=1)
    saved = []
    with Checkpointer(
        store, model, optimizers, policy="consecutive", bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        for step, ids in enumerate([FIRST, SECOND]):
            model(ids).backward()
            for optimizer in optimizers:
                optimizer.step()
            info = checkpointer.save(step).result()
            saved.append((info, row_state(model, optimizers), other_state(model, optimizers)))
    assert [info.kind for info, *_ in saved] == ["baseline", "delta"]
    assert cnr_store.versions(store) == [info for info, *_ in saved]
    for info, rows, other in saved:
        found, found_optimizers = make_model("adagrad", seed=2)
        cnr_store.load(store, found, found_optimizers, version=info)
        there = row_state(found, found_optimizers)
        assert {path: each.tobytes() for path, each in there.items()} == {
            path: each.tobytes() for path, each in rows.items()
        }
        assert other_state(found, found_optimizers) == other
    assert cnr_store.verify(store, deep=True).ok
    assert cnr_store.compact(store).bytes
    assert cnr_store.verify(store, deep=True).ok


def test_an_older_writer_is_superseded(store: Store) -> None:
    model, optimizers = make_model("sgd", seed=1)
    with (
        Checkpointer(store, model, optimizers, job=cnr_store.Job(rng=False)) as older,
        Checkpointer(store, model, optimizers, job=cnr_store.Job(rng=False)) as newer,
    ):
        older.save(1).result()
        newer.load()
        newer.save(2).result()
        with pytest.raises(SupersededError):
            older.save(3).result()
    assert [info.step for info in cnr_store.versions(store)] == [1, 2]


def test_exactly_one_of_many_creates(store: Store) -> None:
    backend, created = open_backend(store), []
    assert backend.atomic_create
    together = threading.Barrier(4)

    def create(number: int) -> None:
        together.wait(30)
        try:
            backend.create("claim", f"{number}".encode())
        except ObjectExistsError:
            return
        created.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{number}".encode() for number in created] == [backend.get("claim")]
