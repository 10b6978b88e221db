"""Stores for tests of retention: how they are made, and everything that their versions hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import cnr_store
from cnr_backends import Backend, ObjectNotFoundError
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.format.layout import FOLDS, VERSIONS, record_key, version_key
from tests.test_store.support.small_model import make_model, table_weight

Content = dict[str, bytes]


class Trainer:
    """A job that changes a few rows and saves, one version after the other."""

    def __init__(self, backend: Backend, seed: int = 1, **options: Any) -> None:
        self.model, self.optimizers = make_model("adagrad", seed)
        defaults: dict[str, Any] = {
            "policy": "consecutive",
            "bits": 4,
            "job": cnr_store.Job(rng=False),
            "limits": cnr_store.Limits(workers=1),
        }
        self.checkpointer = Checkpointer(backend, self.model, self.optimizers, **{**defaults, **options})
        self._draw = np.random.default_rng(seed)

    def train(self) -> None:
        rows = {name: self._draw.integers(0, 70, 3).tolist() for name in ("users", "tags", "items")}
        self.model(rows).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def save(self, step: int, full: bool = False) -> str:
        self.train()
        return self.checkpointer.save(step, full=full).result(60).id

    def weights(self) -> Content:
        return {name: table_weight(self.model, name).detach().numpy().tobytes() for name in ("users", "tags")}

    def close(self) -> None:
        self.checkpointer.close()


def save_many(backend: Backend, steps: Sequence[int], full: Sequence[int] = (), **options: Any) -> list[str]:
    """A new job's versions of these steps; those of `full` lean on nothing."""
    trainer = Trainer(backend, **options)
    found = [trainer.save(step, step in full) for step in steps]
    trainer.close()
    return found


def content(backend: Backend, version: str) -> Content:
    """Everything that a version brings back, read in full and by this package's readers alone."""
    catalog = Catalog(backend)
    record = catalog.record(version)
    found = {"state": repr(catalog.state(record)).encode()}
    for path, entry in record.arrays.items():
        if entry.kind == "dense":
            found[path] = read_dense(catalog, record, path)[0].tobytes()
            continue
        reader = ArrayReader(catalog, record, path)
        out = np.empty((reader.shape[0], reader.columns), reader.dtype)
        reader.read(0, out)
        found[path] = out.tobytes()
    return found


def visible(backend: Backend) -> list[str]:
    return [info.id for info in cnr_store.versions(backend)]


def steps(backend: Backend) -> list[int]:
    return [info.step for info in cnr_store.versions(backend)]


def contents(backend: Backend) -> dict[str, Content]:
    return {version: content(backend, version) for version in visible(backend)}


def check_exact(backend: Backend, expected: Mapping[str, Content]) -> list[str]:
    """Every version that is there is what it was; returns their ids."""
    there = visible(backend)
    for version in there:
        assert content(backend, version) == expected[version], version
    return there


def objects(backend: Backend) -> dict[str, bytes]:
    return {key: backend.get(key) for key, _ in backend.list_keys("")}


def remains(backend: Backend, version: str) -> list[str]:
    """Keys of what lies under an id, its record left out."""
    record = record_key(version)
    return [key for key, _ in backend.list_keys(f"{VERSIONS}/{version}") if key != record]


def delete_version(backend: Backend, version: str) -> None:
    """Delete a version and its folds as retention does: the record goes first."""
    backend.delete(record_key(version))
    for prefix in (VERSIONS, FOLDS):
        for key, _ in list(backend.list_keys(version_key(version, prefix=prefix))):
            backend.delete(key)


def is_void(backend: Backend, version: str) -> bool:
    try:
        return b'"cnr_void"' in backend.get(record_key(version))
    except ObjectNotFoundError:
        return False
