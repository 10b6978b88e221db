"""A training job that saves to a store, beside a plain account of what the store should hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

import cnr_store
from cnr_backends import Backend, check_chunk, index_nbytes, parse_index
from cnr_backends.testing import FaultyBackend
from cnr_codecs import parse, present_rows
from cnr_store import Checkpointer, SaveError, VersionInfo
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.arrays import parse_rows_document
from cnr_store.format.layout import record_key, version_key
from cnr_store.format.record import Record
from cnr_store.policies.policy import PolicyName
from tests.test_store.support.faults import Spoil, Weather
from tests.test_store.support.oracle import RELATIVE, Attempt, Bits, Content, Expected, StateBits, restored
from tests.test_store.support.small_model import (
    SHAPES,
    Ids,
    SmallModel,
    gradient_rows,
    make_model,
    other_state,
    row_state,
    table_weight,
)

WAIT_SECONDS = 60
ENOUGH_BYTES = 1 << 30


@dataclass(frozen=True)
class Setting:
    """How a job saves. With fewer `snapshot_bytes` than a snapshot takes, rows are encoded before `save` returns."""

    policy: PolicyName = "intermittent"
    bits: Bits = "auto"
    workers: int = 1
    snapshot_bytes: int = ENOUGH_BYTES
    state_bits: StateBits = 32
    restores_per_save: float = 0.1


class Job:
    """Trains, saves and loads a real model, and compares every outcome with the plain account.

    Parameters
    ----------
    backend
        The store. The job reaches it through `weather`, checks do so directly.
    optimizer
        One of `small_model.OPTIMIZERS`.
    """

    def __init__(self, backend: Backend, optimizer: str, setting: Setting, reads: bool = False) -> None:
        self.backend = backend
        self.weather = Weather()
        self.expected = Expected()
        self.step = 0
        self._optimizer = optimizer
        self._reads = reads
        self._faulty = FaultyBackend(backend, self.weather, reads=reads)
        self._models = 0
        self._open(setting)

    def _open(self, setting: Setting) -> None:
        self._models += 1
        self.setting = setting
        self.model, self.optimizers = make_model(self._optimizer, seed=self._models)
        self.checkpointer = self._checkpointer(self._faulty, self.model, self.optimizers)
        self._kept: list[torch.Tensor] = []
        self.expected.flagged = {name: set() for name in SHAPES}

    def _checkpointer(
        self, backend: Backend, model: SmallModel, optimizers: Sequence[Optimizer]
    ) -> Checkpointer:
        return Checkpointer(
            backend,
            model,
            optimizers,
            policy=self.setting.policy,
            budget=None,
            bits="auto" if self.setting.bits == "relative" else self.setting.bits,
            codec=RELATIVE if self.setting.bits == "relative" else None,
            state_bits=self.setting.state_bits,
            job=cnr_store.Job(restores_per_save=self.setting.restores_per_save, rng=False),
            limits=cnr_store.Limits(workers=self.setting.workers, snapshot_bytes=self.setting.snapshot_bytes),
        )

    def train(self, ids: Ids) -> None:
        """One step on these rows, and on those that were looked up before without a step."""
        self.look(ids)
        for loss in self._kept:
            loss.backward()  # type: ignore[no-untyped-call]
        self._kept.clear()
        for table, rows in gradient_rows(self.model).items():
            self.expected.flag(table, rows)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def look(self, ids: Ids) -> None:
        """Look rows up; the step comes later, and flags them."""
        self._kept.append(self.model(ids))

    def edit(self, table: str, rows: Sequence[int]) -> None:
        """Change rows by hand and tell of it."""
        with torch.no_grad():
            table_weight(self.model, table)[list(rows)] *= -0.75
        self.checkpointer.touch(table, rows)
        self.expected.flag(table, rows)

    def save(
        self, full: bool = False, spoil: Spoil | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> VersionInfo | None:
        """Save, do something else while storage is held up, and check what has become of it.

        Returns None if the save failed, as it may if `spoil` strikes.
        """
        self.step += 1
        attempt = self.expected.attempt(
            self.step,
            row_state(self.model, self.optimizers),
            other_state(self.model, self.optimizers),
            self.setting.policy,
            self.setting.bits,
            full,
            self.setting.state_bits,
        )
        # Rows that are not copied must be taken before `save` returns, so storage has to answer.
        stages_all = self.setting.snapshot_bytes == ENOUGH_BYTES
        self.weather.change(spoil, hold=stages_all)
        try:
            pending = self.checkpointer.save(self.step, full=full, metadata={"step": self.step})
            self.weather.returned()
            if stages_all:
                assert not pending.done()
                self.check_listed()
            meanwhile()
        finally:
            self.weather.release()
        try:
            info = pending.result(WAIT_SECONDS)
        except SaveError:
            self._after_failure(attempt, spoil)
            return None
        finally:
            self.weather.change(None)
        assert spoil is None or not spoil.fatal
        self.expected.committed(info.id, self._made(attempt, info.id), self._weight(info.id))
        assert cnr_store.versions(self.backend)[-1] == info
        assert (info.step, info.metadata) == (self.step, {"step": self.step})
        self.check(info.id)
        return info

    def _weight(self, version: str) -> int:
        """What policies weigh of a version, in bytes."""
        return Catalog(self.backend).record(version).shared_bytes

    def _made(self, attempt: Attempt, version: str) -> Content:
        return attempt.made(Catalog(self.backend).record(version).policy)

    def _after_failure(self, attempt: Attempt, spoil: Spoil | None) -> None:
        assert spoil is not None
        assert spoil.struck
        self.expected.failed(attempt)
        if spoil.unknown:
            # The commit landed, but neither its answer nor any later one came: no writer could know.
            newest = cnr_store.versions(self.backend)[-1]
            assert record_key(newest.id) == spoil.key
            self.expected.appeared(newest.id, self._made(attempt, newest.id), self._weight(newest.id))
        self.check_listed()
        if self.expected.newest is not None:
            self.check(self.expected.newest)

    def load(self, version: str) -> None:
        """Load a version in place and go on from it."""
        found = self.checkpointer.load(version)
        assert found.version.id == version
        self._went_on_from(version)

    def reopen(self, setting: Setting, through: type[FaultyBackend] = FaultyBackend) -> None:
        """What a new process does: another model, another checkpointer, the latest version if there is one."""
        self.checkpointer.close()
        self._faulty = through(self.backend, self.weather, reads=self._reads)
        self._open(setting)
        if self.expected.newest is None:
            return
        assert self.checkpointer.load().version.id == self.expected.newest
        self._went_on_from(self.expected.newest)

    def _went_on_from(self, version: str) -> None:
        content = self.expected.loaded(version)
        compare(self.model, self.optimizers, content)
        self.step = max(self.step, content.step)

    def check_listed(self) -> None:
        """Exactly the committed versions are listed."""
        assert [info.id for info in cnr_store.versions(self.backend)] == list(self.expected.versions)

    def check(self, version: str) -> None:
        """A version brings every row back exactly, and holds only the rows that its policy asked for."""
        content = self.expected.versions[version]
        model, optimizers = make_model(self._optimizer, seed=0)
        with self._checkpointer(self.backend, model, optimizers) as checkpointer:
            loaded = checkpointer.load(version)
        assert (loaded.version.id, loaded.step) == (version, content.step)
        compare(model, optimizers, content)
        catalog = Catalog(self.backend)
        record = catalog.record(version)
        for path, rows in content.written.items():
            found = rows_written(catalog, record, path)
            assert not found - rows, f"{path}: rows {sorted(found - rows)} are written but not asked for"
            assert not rows - found, f"{path}: rows {sorted(rows - found)} are asked for but not written"
            assert (record.arrays[path].kind == "whole") == (path in content.whole), path
        self.check_needs(catalog, record, content)

    def check_needs(self, catalog: Catalog, record: Record, content: Content) -> None:
        """A version leans on those that its record names, as its policy wants."""
        leant_on = {path: bases(catalog, record, path) for path in content.written}
        assert set(record.needs) == set().union(*leant_on.values())
        if content.kind != "previous":
            assert all(len(leant) <= 1 for leant in leant_on.values())

    def check_all(self) -> None:
        self.check_listed()
        for version in self.expected.versions:
            self.check(version)

    def close(self) -> None:
        self.checkpointer.close()

    @property
    def operations(self) -> list[tuple[str, str]]:
        """Names and keys of the storage operations so far, in order."""
        return self._faulty.log


def compare(model: SmallModel, optimizers: Sequence[Optimizer], content: Content) -> None:
    """Every row and everything else of a model that has loaded a version, against that version's content."""
    rows = row_state(model, optimizers)
    assert rows.keys() == content.arrays.keys()
    for path, values in rows.items():
        saved = content.arrays[path]
        wrong = [row for row in range(len(values)) if values[row].tobytes() != restored(saved[row])]
        assert not wrong, f"{path}: rows {wrong} are not what was saved"
    assert other_state(model, optimizers) == content.other


def bases(catalog: Catalog, record: Record, path: str) -> set[str]:
    """The versions that reading one array of a version may touch beside itself."""
    found: set[str] = set()
    entry = record.arrays[path]
    while entry.base is not None:
        found.add(entry.base)
        entry = catalog.record(entry.base).arrays[path]
    return found


def rows_written(catalog: Catalog, record: Record, path: str) -> set[int]:
    """The rows that a version itself holds of one array, as its payloads say."""
    found: set[int] = set()
    for shard, part in catalog.manifest(record).parts(path).items():
        _, grid = parse_rows_document(record.nodes[path], path)
        data = catalog.backend.get(version_key(record.id, path, f"c/{shard}/0"))
        chunks = grid.chunks_per_shard
        index = parse_index(data[-index_nbytes(chunks) :], chunks, part.nbytes)
        for slot in index.present.nonzero()[0].tolist():
            begin, length = int(index.offsets[slot]), int(index.lengths[slot])
            payload = parse(check_chunk(memoryview(data)[begin : begin + length]))
            first_row = shard * grid.shard_rows + slot * grid.chunk_rows
            rows = (present_rows(payload) + first_row).tolist()
            assert found.isdisjoint(rows), f"{path}: a row is stored twice"
            found.update(rows)
    return found
