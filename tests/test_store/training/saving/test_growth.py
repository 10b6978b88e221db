"""Versions that add up: neither a record, nor what a save asks of the storage, grows with their number."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import Checkpointer, VersionInfo
from cnr_store.catalog.catalog import Catalog
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.policies.policy import PolicyName

MAX_CHAIN = 8


class Training:
    """Saves a table of which a few rows change each time, and waits for the fold after each save."""

    def __init__(self, backend: Backend, **options: Any) -> None:
        self.backend = backend
        self.table = nn.Embedding(2000, 8, sparse=True)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(
            backend,
            self.table,
            self.optimizer,
            **{
                "job": cnr_store.Job(rng=False),
                "retention": cnr_store.Retention(max_chain=MAX_CHAIN),
                **options,
            },
        )
        self.infos: list[VersionInfo] = []

    def save(self) -> Record:
        self.table(torch.randint(0, 2000, (4,))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.infos.append(self.checkpointer.save(len(self.infos)).result())
        self.checkpointer._upkeep.wait()  # nothing public tells of folds behind a save
        return Catalog(self.backend).record(self.infos[-1].id)


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("policy", "saves"), [("consecutive", 200), ("auto", 80), ("one-shot", 80)])
def test_records_stay_small_however_many_versions_there_are(policy: PolicyName, saves: int) -> None:
    training = Training(open_backend(f"memory://{uuid.uuid4()}"), policy=policy)
    records = [training.save() for _ in range(saves)]
    training.checkpointer.close()
    assert max(len(record.needs) for record in records) <= MAX_CHAIN
    early, late = (
        max(record.record_bytes for record in records[part]) for part in (slice(16, 42), slice(-26, None))
    )
    assert late <= early + 100  # numbers have more digits


@pytest.mark.slow
def test_chains_of_more_than_64_versions_are_folded_unless_told_otherwise() -> None:
    backend = open_backend(f"memory://{uuid.uuid4()}")
    table = nn.Embedding(100, 2, sparse=True)
    with Checkpointer(backend, table, policy="consecutive", job=cnr_store.Job(rng=False)) as checkpointer:
        for step in range(70):
            checkpointer.touch("weight", [step])
            checkpointer.save(step).result()
            checkpointer._upkeep.wait()
    infos = cnr_store.versions(backend)
    assert backend.list_names(layout.FOLDS) == [infos[64].id]
    assert [len(Catalog(backend).record(info.id).needs) for info in infos[62:67]] == [62, 63, 64, 1, 2]


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("options", [{}, {"keep_last": 3}])
def test_a_save_asks_the_storage_for_as_much_among_many_versions(options: dict[str, Any]) -> None:
    """Beside as many needed versions. Nor does it list the versions, which takes longer the more there are."""
    backend = FaultyBackend(
        open_backend(f"memory://{uuid.uuid4()}"), lambda operation, key, index: None, reads=True
    )
    training = Training(backend, policy="consecutive", **options)
    asked = []
    for _ in range(6 * MAX_CHAIN):
        backend.log.clear()
        needs = len(training.save().needs)
        asked.append((needs, Counter(operation for operation, _ in backend.log)))
        if not options and len(asked) > 1:
            assert ("list_names", layout.VERSIONS) not in backend.log
    training.checkpointer.close()
    by_needs: dict[int, list[Counter[str]]] = {}
    for needs, counts in asked[2 * MAX_CHAIN :]:
        by_needs.setdefault(needs, []).append(counts)
    for needs, found in by_needs.items():
        if needs < MAX_CHAIN:  # else it was folded, which reads the chain
            assert found[-1] == found[0], needs
