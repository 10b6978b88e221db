"""Jobs that train, save, fail, load and start again in any order, against a plain-dict account of every row."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cnr_backends import open_backend
from cnr_backends.testing.faulty import Fault
from tests.nightly import at_night
from tests.test_store.support.faults import Spoil, forget
from tests.test_store.support.oracle import POLICIES
from tests.test_store.support.small_model import OPTIMIZERS, SHAPES, Ids
from tests.test_store.support.state_machines import run_machine
from tests.test_store.support.trainer_model import ENOUGH_BYTES, Job, Setting


def settings_of(policies: Sequence[str]) -> st.SearchStrategy[Setting]:
    """Where no restores are expected, ``auto`` makes chains of tables as small as these, too."""
    return st.builds(
        Setting,
        policy=st.sampled_from(policies),
        bits=st.sampled_from([4, 2, 8, 32, "auto", "relative", "relative", {"tags": 2, "items": "auto"}]),
        state_bits=st.sampled_from([32, 32, 8, 4, "m3", {"items/*": 2, "users/sum": 8, "tags": 4}]),
        restores_per_save=st.sampled_from([0.0, 0.0, 0.1]),
        workers=st.sampled_from([1, 2]),
        snapshot_bytes=st.sampled_from([ENOUGH_BYTES, ENOUGH_BYTES, 12_000, 0]),
    )


def rows_of(table: str) -> st.SearchStrategy[list[int]]:
    """A few rows anywhere, or a run of neighbours; seldom all."""
    rows = SHAPES[table][0]
    few = st.lists(st.integers(0, rows - 1), min_size=1, max_size=8)
    runs = st.builds(
        lambda first, length: list(range(first, min(first + length, rows))),
        st.integers(0, rows - 1),
        st.integers(2, 40),
    )
    return st.one_of(few, few, few, runs, st.just(list(range(rows))))


IDS: st.SearchStrategy[Ids] = st.fixed_dictionaries({}, optional={name: rows_of(name) for name in SHAPES})
EDITS = st.sampled_from(list(SHAPES)).flatmap(lambda name: st.tuples(st.just(name), rows_of(name)))
PLACES = ["record", "record", "record", "manifest", "state/", "tables/items/weight/c/", "dense/", "writers"]
SPOILS = st.tuples(
    st.one_of(st.integers(0, 40), st.sampled_from(PLACES)),
    st.sampled_from(["after", "before", "full"]),
    st.sampled_from([None, None, "before", "after"]),
)
JOB = st.sampled_from([0, 0, 0, 1])
SELDOM = st.sampled_from([False] * 7 + [True])


class Jobs(RuleBasedStateMachine):
    """Two jobs in one process that share nothing, each with a store of its own.

    Every commit is loaded into a fresh model and compared bit for bit, every failed save is followed by a look at
    the newest version, and in the end every version is loaded once more.
    """

    policy: ClassVar = "full"

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://{uuid.uuid4().hex}"
        self.jobs: list[Job] = []

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        for number in range(2):
            optimizer = data.draw(st.sampled_from(OPTIMIZERS), label="optimizer")
            setting = data.draw(settings_of([self.policy]), label="setting")
            self.jobs.append(Job(open_backend(f"{self.url}/{number}"), optimizer, setting, reads=True))

    @rule(job=JOB, ids=IDS)
    def train(self, job: int, ids: Ids) -> None:
        self.jobs[job].train(ids)

    @rule(job=JOB, ids=IDS)
    def look_without_step(self, job: int, ids: Ids) -> None:
        self.jobs[job].look(ids)

    @rule(job=JOB, edit=EDITS)
    def edit_by_hand(self, job: int, edit: tuple[str, list[int]]) -> None:
        self.jobs[job].edit(*edit)

    @rule(job=JOB, ids=IDS, look=IDS, meanwhile=IDS, full=SELDOM)
    def train_and_save(self, job: int, ids: Ids, look: Ids, meanwhile: Ids, full: bool) -> None:
        self.jobs[job].train(ids)
        self.jobs[job].look(look)
        assert self.jobs[job].save(full, meanwhile=self._training(meanwhile))

    @rule(job=JOB, meanwhile=IDS)
    def save(self, job: int, meanwhile: Ids) -> None:
        assert self.jobs[job].save(meanwhile=self._training(meanwhile))

    @rule(job=JOB, ids=IDS, spoil=SPOILS, full=SELDOM, meanwhile=IDS)
    def train_and_save_spoiled(
        self, job: int, ids: Ids, spoil: tuple[int | str, Fault, Fault], full: bool, meanwhile: Ids
    ) -> None:
        self.jobs[job].train(ids)
        self.jobs[job].save(full, Spoil(*spoil), self._training(meanwhile))

    @rule(job=JOB, data=st.data())
    def reopen(self, job: int, data: st.DataObject) -> None:
        self.jobs[job].reopen(data.draw(settings_of([self.policy] * 3 + [*POLICIES]), label="setting"))

    @rule(job=JOB, number=st.integers(0, 1000))
    def load_any(self, job: int, number: int) -> None:
        versions = list(self.jobs[job].expected.versions)
        if versions:
            self.jobs[job].load(versions[number % len(versions)])

    def _training(self, ids: Ids) -> Callable[[], None]:
        """Both jobs train on."""

        def train() -> None:
            for job in self.jobs:
                job.train(ids)

        return train

    def teardown(self) -> None:
        for job in self.jobs:
            job.check_all()
            job.close()
        forget(self.url)


@pytest.mark.some_by_day(2)
@pytest.mark.slow
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("policy", [at_night("full"), *POLICIES[1:]])
def test_every_version_brings_back_every_row(policy: str) -> None:
    run_machine(Jobs, examples={"full": 2, "auto": 3}.get(policy, 4), steps=40, policy=policy)
