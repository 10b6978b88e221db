"""An S3 server that is killed and restarted in the middle of saves, loads and collections: nothing is lost or wrong."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import cnr_store
from cnr_backends import BackendError
from cnr_store import Checkpointer, CheckpointError, CorruptionError, SaveError
from tests.nightly import FACTOR
from tests.s3_server import NoServerError, S3Server, serving
from tests.test_store.storm.published import publish
from tests.test_store.storm.storm_process import digest
from tests.test_store.support.lasting_store import ROWS, change, make_model

pytestmark = [pytest.mark.server, pytest.mark.slow]

KEEP_LAST = 20
RETRIES = {"connect_timeout": 1, "read_timeout": 5, "retries": {"max_attempts": 1}}
"""So that a server that is away is noticed in seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server of this module's own, since it is killed."""
    pytest.importorskip("s3fs")
    try:
        with serving(tmp_path_factory.mktemp("killed")) as found:
            yield found
    except NoServerError as error:
        pytest.skip(str(error))


def train_through_outages(server: S3Server, seed: int, outages: int) -> Counter[str]:
    """Save, load and collect while the server is killed at random moments; then compare all that is there."""
    draw, counts = random.Random(seed), Counter[str]()
    url, options = server.url(f"killed-{seed}"), {**server.storage_options, "config_kwargs": RETRIES}
    model, other = make_model(1), make_model(2)
    committed: list[str] = []
    step = 0
    with Checkpointer(
        url,
        model,
        bits=32,
        policy="consecutive",
        storage_options=options,
        failures=cnr_store.Failures(retry_seconds=1),
    ) as checkpointer:
        while counts["outages"] < outages:
            committed.append(_save_at_last(checkpointer, step := step + 1, digest(model)))
            killer = threading.Timer(2 * draw.random(), server.kill)
            killer.start()
            while killer.is_alive() or server.process is not None:
                step += 1
                change(checkpointer, model, [draw.randrange(ROWS) for _ in range(5)])
                try:
                    committed.append(checkpointer.save(step, metadata=digest(model)).result().id)
                    counts["saves committed"] += 1
                except SaveError:
                    counts["saves failed"] += 1
                try:
                    restored = cnr_store.load(url, other, storage_options=options)
                    assert restored.metadata == digest(other)
                    cnr_store.gc(url, keep_last=KEEP_LAST, **options)
                    counts["loads and collections"] += 1
                except CorruptionError:
                    raise  # a server that is away is no damage
                except (CheckpointError, BackendError):
                    counts["loads or collections failed"] += 1
            server.start()
            counts["outages"] += 1
        committed.append(_save_at_last(checkpointer, step + 1, digest(model)))
    listed = {info.id: info for info in cnr_store.versions(url, **options)}
    assert set(committed[-KEEP_LAST:]) <= listed.keys()
    for info in listed.values():
        restored = cnr_store.load(url, other, version=info, storage_options=options)
        assert restored.metadata == digest(other), f"{info.id} is not what was saved"
        counts["versions loaded and equal"] += 1
    cnr_store.load(url, other, storage_options=options)
    assert torch.equal(other.get_parameter("t.weight"), model.get_parameter("t.weight"))
    return counts


def _save_at_last(checkpointer: Checkpointer, step: int, metadata: str) -> str:
    """Save once the server stores again, which it does some seconds after it answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return checkpointer.save(step, metadata=metadata).result().id
        except SaveError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.mark.nightly
def test_a_server_that_is_killed_loses_nothing(server: S3Server) -> None:
    counts = train_through_outages(server, 20261122, outages=1)
    assert counts["versions loaded and equal"] > 2
    assert counts["outages"] == 1


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_night_of_outages_loses_nothing(server: S3Server) -> None:
    seed = secrets.randbits(32)
    counts = train_through_outages(server, seed, outages=5 * FACTOR)
    publish("server killed", seed, counts)
