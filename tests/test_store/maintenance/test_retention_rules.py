"""Which versions the rules of retention keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import Backend
from cnr_store import Checkpointer, OptionError
from tests.test_store.support.places import memory_url
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    objects,
    save_many,
    steps,
    visible,
)
from tests.test_store.support.small_model import make_model


@pytest.mark.slow
@pytest.mark.each_by_day
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 3}, [5, 6, 7]),
        ({"keep_last": 100}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_every": 3}, [3, 6, 7]),
        ({"keep_every": 100}, [7]),
        ({"keep_last": 2, "keep_every": 2}, [2, 4, 6, 7]),
    ],
)
def test_rules_say_which_versions_stay(backend: Backend, rules: dict[str, Any], kept: list[int]) -> None:
    save_many(backend, range(1, 8), policy="full")
    before = contents(backend)
    planned = cnr_store.gc(backend, **rules, dry_run=True)
    assert steps(backend) == [1, 2, 3, 4, 5, 6, 7]
    report = cnr_store.gc(backend, **rules)
    assert steps(backend) == kept
    assert list(report.kept) == check_exact(backend, before)
    assert sorted([*report.kept, *report.removed]) == sorted(before)
    assert (planned.kept, planned.removed, planned.dry_run) == (report.kept, report.removed, True)
    assert (report.stopped, report.leftovers, report.dry_run) == (None, (), False)


def test_keep_every_takes_the_newest_at_or_before_each_multiple(backend: Backend) -> None:
    save_many(backend, [90, 190, 200, 250, 410, 650], policy="full")
    cnr_store.gc(backend, keep_every=200)
    assert steps(backend) == [200, 250, 410, 650]  # the last before 200, 400, 600 and 800


@pytest.mark.slow
def test_keep_every_is_the_same_however_often_it_runs(backend: Backend) -> None:
    trainer = Trainer(backend, policy="full")
    for step in range(7, 300, 7):
        trainer.save(step)
        cnr_store.gc(backend, keep_every=50)
    trainer.close()
    assert steps(backend) == [49, 98, 147, 196, 245, 294]


def test_after_a_rollback_keep_every_takes_the_newer_branch(backend: Backend) -> None:
    first = save_many(backend, [10, 20, 30], policy="full")
    trainer = Trainer(backend, policy="full")
    trainer.checkpointer.load(first[0])
    second = [trainer.save(20), trainer.save(30)]
    trainer.close()
    cnr_store.gc(backend, keep_every=10)
    assert visible(backend) == [first[0], *second]


AUCS = (0.7, 0.9, float("nan"), 0.8, None, 0.9, 0.75)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_best": ("auc", "max", 1)}, [6, 7]),
        ({"keep_best": ("auc", "max", 2)}, [2, 6, 7]),
        ({"keep_best": ["auc", "max", 3]}, [2, 4, 6, 7]),
        ({"keep_best": ("auc", "min", 1)}, [1, 7]),
        ({"keep_best": ("auc", "max", 100)}, [1, 2, 4, 6, 7]),
        ({"keep_best": ("auc", "max", 1), "keep_last": 3}, [5, 6, 7]),
    ],
)
def test_the_best_stay(backend: Backend, rules: dict[str, Any], kept: list[int]) -> None:
    with Checkpointer(backend, *make_model("sgd", 1), policy="full") as checkpointer:
        for step, auc in enumerate(AUCS, 1):
            checkpointer.save(step, metadata=None if auc is None else {"auc": auc, "name": "x"}).result()
    before = contents(backend)
    report = cnr_store.gc(backend, **rules)
    assert steps(backend) == kept
    check_exact(backend, before)
    if rules == {"keep_best": ("auc", "max", 2)}:
        assert list(report.kept.values()) == ["auc is 0.9", "auc is 0.9", "the newest"]


@pytest.mark.parametrize(
    "number", [np.float32, np.float64, np.int64, np.array, torch.tensor, lambda value: [value]]
)
def test_figures_of_any_library_count(backend: Backend, number: Callable[[int], object]) -> None:
    for step, auc in enumerate((90, 80, 70, 10)):
        trained = make_model("sgd", 1)
        with Checkpointer(
            backend, *trained, policy="full", retention=cnr_store.Retention(keep_best=("auc", "max", 2))
        ) as checkpointer:
            checkpointer.resume()
            checkpointer.save(step, metadata={"auc": number(auc), "too large": 10**400}).result()
    is_number = not isinstance(number(1), list)
    assert steps(backend) == ([0, 1, 3] if is_number else [3])


def test_versions_without_the_figure_are_told_of_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(
        backend, *make_model("sgd", 1), retention=cnr_store.Retention(keep_best=("auc", "max", 2))
    ) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.5}).result()
        assert not caplog.records
        checkpointer.save(2, metadata={"acu": 0.5}).result()
        checkpointer.save(3, metadata={"auc": float("nan")}).result()
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: its metadata has no finite number 'auc', so keep_best=('auc', 'max', 2) does not keep this version: "
        "give save(metadata={'auc': ...}) one number. This is told once"
    ]


def test_a_job_keeps_the_best_and_what_they_need(backend: Backend) -> None:
    trainer = Trainer(
        backend, policy="consecutive", keep_last=1, retention=cnr_store.Retention(keep_best=("auc", "max", 1))
    )
    checkpointer = trainer.checkpointer
    for step, auc in enumerate((0.1, 0.2, 0.9, 0.3, 0.4), 1):
        checkpointer.touch("users", [step])
        checkpointer.save(step, full=step == 4, metadata={"auc": auc}).result()
    trainer.close()
    assert steps(backend) == [1, 2, 3, 4, 5]  # 3 is a delta over 2 and 1, and 5 over 4
    check_exact(backend, contents(backend))


@pytest.mark.parametrize(
    "rules",
    [
        *({"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}, {"keep_last": 1.5}),
        *({"keep_best": best} for best in ("auc", ("auc", "max"), ("auc", "best", 3), ("auc", "max", 0))),
        *({"keep_best": best} for best in (("", "max", 1), (3, "max", 1), ("auc", "max", True))),
    ],
)
def test_rules_out_of_range_are_refused(backend: Backend, rules: dict[str, Any]) -> None:
    name = next(iter(rules))
    with pytest.raises(OptionError, match=name):
        cnr_store.gc(backend, **rules)
    with pytest.raises(OptionError, match=name):
        of_group = {} if name == "keep_last" else {"retention": cnr_store.Retention(**rules)}
        Checkpointer(backend, *make_model("sgd", 1), **(of_group or rules))
    with pytest.raises(OptionError, match="grace_seconds"):
        cnr_store.gc(backend, grace_seconds=-1)


def test_a_figure_that_no_version_has_removes_nothing() -> None:
    with memory_url() as url, Checkpointer(url, *make_model("sgd", 1), policy="full") as checkpointer:
        made = [checkpointer.save(step, metadata={"auc": 0.5}).result().id for step in (1, 2, 3)]
        for dry_run in (True, False):
            with pytest.raises(OptionError, match=r"no version has the figure 'acu'.*there are auc"):
                cnr_store.gc(url, keep_best=("acu", "max", 1), dry_run=dry_run)
        assert [info.id for info in cnr_store.versions(url)] == made


def test_nothing_happens_where_no_store_is(backend: Backend) -> None:
    with pytest.raises(cnr_store.EmptyStoreError, match="check the URL"):
        cnr_store.gc(backend, keep_last=1)
    assert objects(backend) == {}
    assert cnr_store.pins(backend) == []


def test_a_step_saved_twice_with_one_figure_takes_one_place_among_the_best() -> None:
    with memory_url() as url, Checkpointer(url, *make_model("sgd", 1), policy="full") as checkpointer:
        made = [
            checkpointer.save(step, metadata={"auc": auc}).result().id
            for step, auc in ((1, 0.7), (2, 0.8), (3, 0.9), (3, 0.9), (3, 0.6), (4, 0.1))
        ]
        report = cnr_store.gc(url, keep_best=("auc", "max", 3))
        assert sorted(report.kept) == [made[at] for at in (0, 1, 3, 5)]
