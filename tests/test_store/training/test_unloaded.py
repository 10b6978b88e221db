"""A job that forgot to resume is told, or refused, before it begins anew beside earlier versions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from cnr_store import Checkpointer, OptionError
from tests.test_store.ranks.support.small_job import SmallJob, assert_same, find_small_models, load_alone
from tests.test_store.support.lasting_store import assert_newest, change, lasting_store, make_model
from tests.test_store.support.places import memory_url, quick_folder

REFUSED = r"^save of step 10: .* holds version 000001-.*, and no version was loaded\. Nothing was written\. Call resume"


def objects(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "options",
    [{}, {"failures": cnr_store.Failures(on_failure="log"), "limits": cnr_store.Limits(overlap="skip")}],
    ids=str,
)
def test_a_save_is_refused_until_a_version_was_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_model(3)
    with lasting_store(tmp_path):
        before = objects(tmp_path)
        with Checkpointer(
            tmp_path, model, bits=32, job=cnr_store.Job(unloaded="raise"), **options
        ) as checkpointer:
            for _ in range(2):
                with pytest.raises(OptionError, match=REFUSED):
                    checkpointer.save(10)
            assert objects(tmp_path) == before
            assert checkpointer.resume() == 5
            change(checkpointer, model, [1])
            assert checkpointer.save(10).result().rows == 1
            checkpointer.save(11).result()
        assert_newest(tmp_path, model)


@pytest.mark.slow
def test_of_a_load_of_weights_alone_a_save_goes_on(tmp_path: Path) -> None:
    with lasting_store(tmp_path):
        with Checkpointer(tmp_path, make_model(3), job=cnr_store.Job(unloaded="raise")) as checkpointer:
            checkpointer.load(tables="t")
            assert checkpointer.save(10).result().step == 10


def test_a_store_without_versions_is_one_to_begin_in(tmp_path: Path) -> None:
    """Also where an earlier run has claimed it, and saved nothing."""
    with Checkpointer(tmp_path, make_model(), job=cnr_store.Job(unloaded="raise")) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer._saves.writer.hold(checkpointer._saves.planner.lineage)
    assert objects(tmp_path / "writers")
    with Checkpointer(tmp_path, make_model(), job=cnr_store.Job(unloaded="raise")) as checkpointer:
        assert checkpointer.save(1).result().step == 1


def test_who_saves_once_may_name_what_it_follows(tmp_path: Path) -> None:
    with lasting_store(tmp_path):
        newest = cnr_store.versions(tmp_path)[-1]
        with pytest.raises(OptionError, match=REFUSED):
            cnr_store.save(tmp_path, make_model(), step=10, job=cnr_store.Job(unloaded="raise"))
        assert (
            cnr_store.save(
                tmp_path, make_model(), step=10, job=cnr_store.Job(unloaded="raise"), after=newest
            ).step
            == 10
        )


def test_a_run_that_begins_anew_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with memory_url() as url:
        model = make_model()
        info = cnr_store.save(url, model)
        assert caplog.records == []
        with Checkpointer(url, model) as checkpointer:
            for step in range(3):
                checkpointer.save(step).result()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        f"{url} holds version {info.id}, and no version was loaded: this run begins anew"
        in record.getMessage()
    )


def test_what_to_do_is_one_of_two_words(tmp_path: Path) -> None:
    option: Any = "ask"
    with pytest.raises(OptionError, match="unloaded='ask': give 'warn' or 'raise'"):
        Checkpointer(tmp_path, make_model(), job=cnr_store.Job(unloaded=option))


@pytest.mark.slow
def test_all_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find_small_models(monkeypatch)
    with quick_folder() as url:
        with SmallJob(url) as job:
            job.save(1)
        with SmallJob(url, job=cnr_store.Job(unloaded="raise", rng=False)) as job:
            job.train(2)
            found = job.attempt(lambda rank: job.checkpointers[rank].save(10))
            assert all(isinstance(each, OptionError) for each in found), found
            assert len({str(each) for each in found}) == 1
            job.load()
            job.save(11)
            assert_same(load_alone(url), job.found())
