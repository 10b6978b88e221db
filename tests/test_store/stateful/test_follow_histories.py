"""Followers of jobs that train, save, fail, go back, start again, fold and lose old versions, in any order."""

from __future__ import annotations

import uuid
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import Fault
from cnr_store import Update, VersionNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains import array_reader
from cnr_store.maintenance.folding.compact import compact
from tests.test_store.stateful.test_model_based import IDS, SELDOM, SPOILS, settings_of
from tests.test_store.support.faults import Spoil, forget
from tests.test_store.support.follower import Follower, ModelFollower
from tests.test_store.support.oracle import FORETOLD
from tests.test_store.support.retention_helpers import delete_version
from tests.test_store.support.small_model import Ids
from tests.test_store.support.state_machines import run_machine
from tests.test_store.support.trainer_model import Job


class Followed(RuleBasedStateMachine):
    """One job, and followers that look at its store now and then; each ends with what the newest version says."""

    policy: ClassVar = "full"

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://{uuid.uuid4().hex}"
        self.backend = open_backend(self.url)
        self.follower, self.model = Follower(self.backend), ModelFollower(self.backend)
        self.late = Follower(self.backend)
        self.collected: list[Update] = []
        self.folded: set[str] = set()

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.job = Job(self.backend, "sgd", data.draw(settings_of([self.policy]), label="setting"))
        self.head: str | None = None

    @rule(ids=IDS, full=SELDOM)
    def train_and_save(self, ids: Ids, full: bool) -> None:
        self.job.train(ids)
        info = self.job.save(full)
        assert info is not None
        self.head = info.id

    @rule(ids=IDS, spoil=SPOILS)
    def train_and_save_spoiled(self, ids: Ids, spoil: tuple[int | str, Fault, Fault]) -> None:
        self.job.train(ids)
        info = self.job.save(False, Spoil(*spoil))
        self.head = info.id if info else self.head

    @rule(number=st.integers(0, 1000))
    def go_back(self, number: int) -> None:
        versions = [version for version in self.job.expected.versions if self._may_go_on_from(version)]
        if versions:
            self.head = versions[number % len(versions)]
            self.job.load(self.head)

    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        if self.job.expected.newest and not self._may_go_on_from(self.job.expected.newest):
            return
        self.job.reopen(data.draw(settings_of([self.policy] * 3 + [*FORETOLD]), label="setting"))
        self.head = self.job.expected.newest

    def _may_go_on_from(self, version: str) -> bool:
        """The job's account knows no folds."""
        return self.folded.isdisjoint({version, *Catalog(self.backend).record(version).needs})

    @rule(number=st.integers(0, 1000))
    def fold(self, number: int) -> None:
        versions = list(self.job.expected.versions)
        if versions:
            self.folded.add(versions[number % len(versions)])
            compact(self.backend, versions[number % len(versions)])

    @rule(keep=st.integers(1, 3))
    def retain(self, keep: int) -> None:
        catalog, versions = Catalog(self.backend), list(self.job.expected.versions)
        kept = set(versions[-keep:])
        if self.head:  # what the job goes on from, with all that its next version may lean on
            kept |= {self.head, *catalog.record(self.head).needs}
        for version in reversed(versions):  # what is kept stays whole, and leans only on older ones
            kept |= leant_on(catalog, version) if version in kept else set()
        for version in sorted(set(versions) - kept, reverse=True):
            delete_version(self.backend, version)
            del self.job.expected.versions[version]

    @rule()
    def follow(self) -> None:
        self.follower.catch_up()
        self.model.catch_up()

    @rule(blocks=st.integers(0, 12))
    def follow_and_break_off(self, blocks: int) -> None:
        self.follower.catch_up(blocks)

    @rule()
    def collect(self) -> None:
        self.collected = list(cnr_store.follow(self.backend, self.late.since))

    @rule(skip=st.integers(0, 2))
    def take_collected(self, skip: int) -> None:
        for update in self.collected[skip:]:
            try:
                self.late.take_all([update])
            except VersionNotFoundError:
                assert update.version.id not in self.job.expected.versions
        self.collected = []

    def teardown(self) -> None:
        self.follower.catch_up()
        self.model.catch_up()
        newest = self.job.expected.newest
        if newest is not None:
            self.follower.check(newest)
            assert self.model.since == newest
        self.job.close()
        forget(self.url)


def leant_on(catalog: Catalog, version: str) -> set[str]:
    """Versions that reading one touches; none beneath a fold."""
    record = catalog.record(version)
    paths = [path for path, entry in record.arrays.items() if entry.kind != "dense"]
    return {link.version for path in paths for link in array_reader.ArrayReader(catalog, record, path).links}


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("policy", FORETOLD)
def test_a_follower_holds_what_each_version_holds(policy: str) -> None:
    run_machine(Followed, examples=3 if policy == "full" else 8, steps=30, policy=policy)
