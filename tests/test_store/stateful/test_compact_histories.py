"""Jobs of any history whose versions are folded, and what the folds make needless removed: nothing changes a bit."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import zarr
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains import array_reader
from cnr_store.format import layout
from cnr_store.format.record import Record
from tests.nightly import at_night
from tests.test_store.stateful.test_model_based import EDITS, IDS, SELDOM, settings_of
from tests.test_store.support.faults import forget
from tests.test_store.support.oracle import POLICIES, Content, Expected
from tests.test_store.support.small_model import OPTIMIZERS, SHAPES, Ids
from tests.test_store.support.state_machines import run_machine
from tests.test_store.support.trainer_model import Job, Setting


@dataclass
class FoldedExpected(Expected):
    """A job that goes on from a folded version leans on that one alone."""

    folded: set[str] = field(default_factory=set)

    def loaded(self, version: str) -> Content:
        content = super().loaded(version)
        if version in self.folded:
            self._head = replace(content, changed={path: set() for path in content.changed})
        return content

    def removed(self, version: str) -> None:
        del self.versions[version]
        self.folded.discard(version)


class FoldingJob(Job):
    """A job whose versions are folded and removed from outside."""

    def __init__(self, backend: Backend, optimizer: str, setting: Setting) -> None:
        super().__init__(backend, optimizer, setting)
        self.expected: FoldedExpected = FoldedExpected()

    def fold(self, version: str) -> None:
        """Fold a version and look at it from every side, before and after."""
        before, opened = cnr_store.state_dict(self.backend, version), self._opened(version)
        report = cnr_store.compact(self.backend, version)
        entries = Catalog(self.backend).record(version).arrays.values()
        deltas = [entry for entry in entries if entry.kind == "delta"]
        assert (report.outcome == "nothing to fold") == (not deltas)
        self.expected.folded.add(version)
        after = cnr_store.state_dict(self.backend, version)
        assert {name: each.tobytes() for name, each in before.items()} == {
            name: each.tobytes() for name, each in after.items()
        }
        assert self._opened(version) == opened
        self.check(version)

    def _opened(self, version: str) -> dict[str, bytes]:
        group = cnr_store.open(self.backend, version)
        found = {}
        for name in SHAPES:
            array = group[f"tables/{name}/weight"]
            assert isinstance(array, zarr.Array)
            found[name] = np.asarray(array[3:60]).tobytes()
        return found

    def remove_all_but(self, kept: set[str]) -> None:
        """Remove what the kept versions don't need, as folds are now, nor what these need, and start again."""
        catalog = Catalog(self.backend)
        needed: set[str] = set()
        todo = [*kept]
        while todo:
            version = todo.pop()
            if version in needed:
                continue
            # A version that is needed for one array stays visible, and so needs what its other arrays lean on.
            needed.add(version)
            record = catalog.record(version)
            paths = [path for path, entry in record.arrays.items() if entry.kind != "dense"]
            todo += [each.id for path in paths for each in array_reader.chain(catalog, record, path)]
        for version in sorted(set(self.expected.versions) - needed, reverse=True):
            self.backend.delete(layout.record_key(version))
            for room in (layout.FOLDS, layout.VERSIONS):
                for key, _ in list(self.backend.list_keys(layout.version_key(version, prefix=room))):
                    self.backend.delete(key)
            self.expected.removed(version)

    def check_needs(self, catalog: Catalog, record: Record, content: Content) -> None:
        """Folds made since make some of what a record names needless."""
        used = {each.id for path in content.written for each in array_reader.chain(catalog, record, path)} - {
            record.id
        }
        assert used <= set(record.needs)
        assert not used or record.id not in self.expected.folded


class FoldedJobs(RuleBasedStateMachine):
    """A job that trains, saves, starts again and is folded, against a plain account of every row."""

    policy: ClassVar = "consecutive"

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://{uuid.uuid4().hex}"

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.setting = data.draw(settings_of([self.policy]), label="setting")
        optimizer = data.draw(st.sampled_from(OPTIMIZERS), label="optimizer")
        self.job = FoldingJob(open_backend(self.url), optimizer, self.setting)
        assert self.job.save()

    @rule(ids=IDS, meanwhile=IDS, full=SELDOM)
    def train_and_save(self, ids: Ids, meanwhile: Ids, full: bool) -> None:
        self.job.train(ids)
        train: Callable[[], None] = lambda: self.job.train(meanwhile)  # noqa: E731
        assert self.job.save(full, meanwhile=train)

    @rule(edit=EDITS, ids=IDS)
    def edit_and_save(self, edit: tuple[str, list[int]], ids: Ids) -> None:
        self.job.edit(*edit)
        self.job.look(ids)
        assert self.job.save()

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        self.job.reopen(data.draw(settings_of([self.policy] * 3 + [*POLICIES]), label="setting"))

    @rule(number=st.integers(0, 1000), back=st.booleans())
    def fold_any(self, number: int, back: bool) -> None:
        """Then go on, with a new checkpointer, from the latest version or from the folded one."""
        versions = list(self.job.expected.versions)
        version = versions[number % len(versions)]
        self.job.fold(version)
        self.job.reopen(self.setting)
        if back:
            self.job.load(version)

    @rule(numbers=st.lists(st.integers(0, 1000), max_size=2))
    def fold_and_remove(self, numbers: list[int]) -> None:
        """Fold the latest version; keep it and a few others, with what those need."""
        versions = list(self.job.expected.versions)
        self.job.fold(versions[-1])
        self.job.remove_all_but({versions[-1], *(versions[number % len(versions)] for number in numbers)})
        self.job.reopen(self.setting)
        self.job.check_all()

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.job.check_all()
            self.job.close()
        forget(self.url)


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("policy", [at_night("full"), *POLICIES[1:]])  # with full there is nothing to fold
def test_folding_changes_no_bit(policy: str) -> None:
    run_machine(FoldedJobs, examples=2 if policy == "auto" else 3, steps=16, policy=policy)
