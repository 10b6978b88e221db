"""Saves, failures, rollbacks, new runs, pins, folds and collections in any order, against a plain account."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import cnr_store
from cnr_backends import BackendError, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import EmptyStoreError, SaveError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import VersionId
from tests.test_store.support.faults import fault_at, forget
from tests.test_store.support.retention_helpers import Content, Trainer, content, visible
from tests.test_store.support.state_machines import run_machine

NUMBER = st.integers(0, 1000)
RULES = st.sampled_from(
    [
        *({"keep_last": 1}, {"keep_last": 1}, {"keep_last": 2}, {"keep_last": 3, "keep_every": 5}),
        *({"keep_every": 2}, {"keep_every": 10}, {}),
    ]
)


class Histories(RuleBasedStateMachine):
    """What is visible is what the account says, and every version of it is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://{uuid.uuid4().hex}"
        self.backend = open_backend(self.url)
        self.failing: Fault = None
        self.versions: dict[str, Content] = {}
        self.steps: dict[str, int] = {}
        self.bases: dict[str, set[str]] = {}
        self.needs: dict[str, set[str]] = {}
        self.folded: set[str] = set()
        self.pinned: set[str] = set()
        self.doomed: set[str] = set()
        self.step = self.runs = 0
        self.base: str | None = None  # what the newest claim's document names
        self.loaded: str | None = None  # what the next claim's will
        self.trainer = self.new_trainer()

    def new_trainer(self, policy: str = "consecutive") -> Trainer:
        self.runs += 1

        def fault(operation: str, key: str, _: int) -> Fault:
            return self.failing if operation == "put" and key.endswith("/manifest") else None

        return Trainer(
            FaultyBackend(self.backend, fault),
            self.runs,
            policy=policy,
            job=cnr_store.Job(restores_per_save=0, rng=False),
        )

    def committed(self, version: str) -> None:
        record = Catalog(self.backend).record(version)
        self.versions[version] = content(self.backend, version)
        self.steps[version] = record.step
        self.needs[version] = set(record.needs)
        self.bases[version] = {entry.base for entry in record.arrays.values() if entry.base is not None}

    @rule(full=st.booleans(), forward=st.integers(1, 4))
    def save(self, full: bool, forward: int) -> None:
        for _ in range(1 if full else 2):
            self.save_once(full, forward)

    def save_once(self, full: bool, forward: int) -> None:
        self.step += forward
        version = self.trainer.save(self.step, full)  # also where what was loaded has been removed
        self.loaded = None
        self.committed(version)

    @rule()
    def fail_to_save(self) -> None:
        self.failing = "before"
        self.trainer.train()
        with pytest.raises(SaveError):
            self.trainer.checkpointer.save(self.step).result(60)
        self.failing = None
        if self.loaded is not None:  # it has claimed all the same
            self.base = self.loaded

    @precondition(lambda self: self.versions)
    @rule(number=NUMBER, anew=st.sampled_from([None, "auto", "consecutive"]))
    def load(self, number: int, anew: str | None) -> None:
        """Roll back in the same process, or in another one of a policy."""
        if anew is not None:
            self.trainer.close()
            self.trainer = self.new_trainer(anew)
        version = sorted(self.versions)[number % len(self.versions)]
        restored = self.trainer.checkpointer.load(version)
        self.step, self.loaded = restored.step, version

    @precondition(lambda self: self.versions)
    @rule(number=NUMBER)
    def pin(self, number: int) -> None:
        version = sorted(self.versions)[number % len(self.versions)]
        if version in self.doomed:
            with pytest.raises(cnr_store.VersionNotFoundError):
                cnr_store.pin(self.backend, version)
        else:
            self.pinned.add(cnr_store.pin(self.backend, version))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pinned.remove(cnr_store.unpin(self.backend, min(self.pinned)))

    @precondition(lambda self: self.versions)
    @rule(number=NUMBER)
    def fold(self, number: int) -> None:
        version = sorted(self.versions)[number % len(self.versions)]
        cnr_store.compact(self.backend, version)
        self.folded.add(version)

    @rule(rules=RULES, grace=st.sampled_from([0.0, 3600.0]))
    def collect(self, rules: dict[str, Any], grace: float) -> None:
        if not self.claimed():
            with pytest.raises(EmptyStoreError):
                cnr_store.gc(self.backend, **rules, grace_seconds=grace)
            return
        kept = self.to_keep(**rules)
        planned = cnr_store.gc(self.backend, **rules, grace_seconds=grace, dry_run=True)
        report = cnr_store.gc(self.backend, **rules, grace_seconds=grace)
        assert set(report.kept) == set(planned.kept) == kept
        assert set(report.removed) == set(planned.removed) == self.versions.keys() - kept
        self.forget(self.versions.keys() - kept)

    @precondition(lambda self: self.claimed())
    @rule(rules=RULES, number=st.integers(0, 150), last=st.sampled_from(["before", "after"]))
    def crash_while_collecting(self, rules: dict[str, Any], number: int, last: Fault) -> None:
        kept = self.to_keep(**rules)
        down = fault_at(number, last, then="before")
        with suppress(BackendError):
            cnr_store.gc(FaultyBackend(self.backend, down, reads=True), **rules, grace_seconds=0)
        there = set(visible(self.backend))
        assert kept <= there <= self.versions.keys()
        self.forget(self.versions.keys() - there)
        self.doomed = {name for name in self.backend.list_names("tombstones") if name in there}
        assert not self.doomed & kept

    def forget(self, gone: Iterable[str]) -> None:
        for version in list(gone):
            del self.versions[version]
        self.doomed &= self.versions.keys()

    def to_keep(self, keep_last: int | None = None, keep_every: int | None = None) -> set[str]:
        sound = sorted(self.versions.keys() - self.doomed)
        kept = set(sound) if keep_last is None and keep_every is None else set()
        kept |= set(sound[-keep_last:]) if keep_last else set()
        if keep_every:
            kept |= set({-(-self.steps[each] // keep_every): each for each in sound}.values())
        kept |= self.pinned | set(sorted(self.versions)[-1:])
        head = self.head()
        kept |= {head, *self.needs[head]} if head is not None else set()
        kept &= self.versions.keys()
        while more := {base for each in kept - self.folded for base in self.bases[each]} - kept:
            kept |= more
        return kept

    def claimed(self) -> bool:
        """Whether the place holds a store yet."""
        return bool(self.backend.list_names("writers"))

    def head(self) -> str | None:
        """The newest version of the newest claim, or what its writer started from; None once that is closed."""
        names = self.backend.list_names("writers")
        claims = [name for name in names if not name.endswith(".closed")]
        if not claims or f"{max(claims)}.closed" in names:
            return None
        own = [each for each in self.versions if str(VersionId.parse(each)).startswith(max(claims))]
        return max(own) if own else self.base if self.base in self.versions else None

    def teardown(self) -> None:
        self.trainer.close()
        assert visible(self.backend) == sorted(self.versions)
        for version, expected in self.versions.items():
            assert content(self.backend, version) == expected
        forget(self.url)


@pytest.mark.slow
def test_visible_is_what_was_committed_and_not_removed() -> None:
    run_machine(Histories, examples=12, steps=40)
