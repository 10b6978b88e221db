"""Runs that closed, died or are ended: what is kept for them, and who may write after them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import EmptyStoreError, OptionError, SupersededError
from cnr_store.cli.app import main
from cnr_store.format.layout import record_key
from tests.test_store.support.places import quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import (
    Trainer,
    check_exact,
    contents,
    is_void,
    objects,
    remains,
    save_many,
    visible,
)


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def killed(jobs: Jobs, url: str) -> str:
    """A run that was killed in its first save. The id of that attempt."""
    jobs.run("train", url, saves=3)
    _, ended = jobs.run("train", url, stop="manifest", signal="SIGKILL")
    assert ended == "killed"
    (attempt,) = (
        name for name in open_backend(url).list_names("versions") if is_open(open_backend(url), name)
    )
    return attempt


def is_open(backend: Backend, name: str) -> bool:
    """Whether this names an attempt with objects and without a record."""
    return (
        "." in name
        and name != "zarr.json"
        and record_key(name) not in dict(backend.list_keys(f"versions/{name}"))
    )


def cnr(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


# Closed


@pytest.mark.slow
def test_nothing_is_kept_for_a_run_that_closed(url: str) -> None:
    """A finished run is folded; then what lies beneath the fold may go."""
    backend = open_backend(url)
    made = save_many(backend, range(1, 6), full=[1])
    expected = contents(backend)
    cnr_store.compact(url)
    report = cnr_store.gc(url, keep_last=1)
    assert (report.removed, list(report.kept)) == (tuple(made[:-1]), made[-1:])
    assert check_exact(backend, expected) == made[-1:]


def test_a_run_that_did_not_close_keeps_what_it_goes_on_from(url: str) -> None:
    trainer = Trainer(open_backend(url))
    made = [trainer.save(step, step == 1) for step in (1, 2, 3)]
    cnr_store.compact(url)
    assert cnr_store.gc(url, keep_last=1).removed == ()
    assert trainer.save(4) == visible(open_backend(url))[-1]
    trainer.close()
    assert visible(open_backend(url))[:3] == made


def test_unfinished_saves_of_a_closed_run_are_leftovers(url: str) -> None:
    backend = open_backend(url)
    made = save_many(backend, [1])
    attempt = made[0].replace(".00000001", ".00000002")
    backend.put(f"versions/{attempt}/manifest", b"a manifest")
    assert cnr_store.gc(url, grace_seconds=0).leftovers == (attempt,)
    assert not remains(backend, attempt)
    assert is_void(backend, attempt)


def test_a_second_load_does_not_leave_the_claim_open(url: str) -> None:
    backend = open_backend(url)
    trainer = Trainer(backend)
    trainer.save(1)
    trainer.checkpointer.load()
    trainer.close()
    cnr_store.import_file(_model_file(url), url)


def test_a_mark_that_fails_is_only_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if key.endswith(".closed") else None

    trainer = Trainer(FaultyBackend(open_backend(url), fault))
    trainer.save(1)
    with caplog.at_level(logging.WARNING, "cnr_store"):
        trainer.close()
    assert "claim 000001" in caplog.text
    assert "could not be marked closed" in caplog.text


def test_the_mark_of_another_claim_closes_nothing(url: str) -> None:
    """As where a claim was removed by hand, and its number claimed again."""
    backend = open_backend(url)
    trainer = Trainer(backend)
    made = [trainer.save(step, step == 1) for step in (1, 2)]
    for mark in (b'{"token":"00000000","time":1.0}', b"{", b"[]"):
        backend.put("writers/000001.closed", mark)
        cnr_store.compact(url)
        assert cnr_store.gc(url, keep_last=1).removed == ()
    trainer.close()
    assert cnr_store.gc(url, keep_last=1).removed == (made[0],)


# Ended


@pytest.mark.slow
def test_what_a_killed_run_left_is_freed_once_it_is_ended(url: str, killed: str) -> None:
    backend = open_backend(url)
    expected = contents(backend)
    assert cnr_store.gc(url, grace_seconds=0).leftovers == ()
    nbytes = sum(nbytes for _, nbytes in backend.list_keys(f"versions/{killed}"))
    report = cnr_store.gc(url, end_run=True)
    assert (report.leftovers, report.freed_bytes) == ((killed,), nbytes)
    assert is_void(backend, killed)
    assert check_exact(backend, expected) == list(expected)
    newest = max(name for name in backend.list_names("writers") if "." not in name)
    claim = json.loads(backend.get(f"writers/{newest}"))
    assert (claim["ends"], claim["base"]) == (int(newest) - 1, None)
    before = objects(backend)
    cnr_store.gc(url, end_run=True)  # there is nothing more to end
    assert objects(backend).keys() == before.keys()
    trainer = Trainer(backend)
    trainer.checkpointer.load()
    assert trainer.save(9).startswith(f"{int(newest) + 1:06d}-")
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("grace_seconds", [0, 3600])
def test_a_clock_that_was_ahead_keeps_no_leftovers(
    jobs: Jobs, url: str, killed: str, grace_seconds: float
) -> None:
    """The job that gave the attempt up ran on a machine whose clock was ahead by a month."""
    jobs.run("train", url, saves=1, keep_last=9, skew=30 * 24 * 3600.0)
    assert is_void(open_backend(url), killed)
    assert remains(open_backend(url), killed)
    report = cnr_store.gc(url, grace_seconds=grace_seconds)
    assert (report.leftovers, report.left) == ((killed,), {})


@pytest.mark.slow
def test_the_command_asks_before_it_ends_a_run(
    url: str, killed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(url)
    before = objects(backend)
    assert cnr("gc", url, "--end-run") == 2
    said = capsys.readouterr().err
    assert "give --yes" in said
    assert f"the last commit is {visible(backend)[-1]}, of 20" in said
    assert "process" in said
    assert cnr("gc", url, "--end-run", "--dry-run") == 2
    terminal = io.StringIO("n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert cnr("gc", url, "--end-run") == 1
    assert objects(backend) == before
    capsys.readouterr()
    assert cnr("gc", url, "--end-run", "--yes") == 0
    assert f"removed: {killed}, left by an unfinished save" in capsys.readouterr().out
    assert cnr("gc", url, "--end-run", "--yes") == 0
    assert "none to end" in capsys.readouterr().err
    assert cnr("gc", f"{url}/nothing", "--end-run", "--yes") == 1


@pytest.mark.slow
def test_a_job_that_has_loaded_outlives_the_end_of_the_run_before(jobs: Jobs, url: str, killed: str) -> None:
    process, _ = jobs.run("train", url, stop="loaded", saves=2)
    cnr_store.gc(url, keep_last=2, end_run=True)
    assert jobs.wake(process) is False
    assert visible(open_backend(url))[-2:] == jobs.outcome(process)


@pytest.mark.slow
def test_a_live_job_that_is_ended_saves_no_more(jobs: Jobs, url: str) -> None:
    process, _ = jobs.run("train", url, stop="saved", saves=2)
    cnr_store.gc(url, end_run=True)
    there = visible(open_backend(url))
    assert jobs.wake(process) is False
    assert "was superseded by 000002-" in jobs.outcome(process)[1]
    assert visible(open_backend(url)) == there


def test_an_end_of_a_run_that_was_not_seen_is_no_excuse(jobs: Jobs, url: str) -> None:
    save_many(open_backend(url), [1])
    stale, _ = jobs.run("train", url, stop="loaded", saves=1)
    jobs.run("train", url, stop="saved", saves=2)
    cnr_store.gc(url, end_run=True)
    there = visible(open_backend(url))
    assert jobs.wake(stale) is False
    assert "this job is stale" in jobs.outcome(stale)[0]
    assert visible(open_backend(url)) == there


def test_a_run_is_ended_only_if_nobody_claims_meanwhile(url: str) -> None:
    backend = open_backend(url)
    trainer = Trainer(backend)
    trainer.save(1)

    def claim(operation: str, key: str, _: int) -> Fault:
        if operation == "create" and key == "writers/000002":
            trainer.checkpointer.load()
            trainer.save(2)
        return None

    with pytest.raises(SupersededError, match="so no run was ended"):
        cnr_store.gc(FaultyBackend(backend, claim), end_run=True)
    trainer.save(3)
    trainer.close()


def test_what_ends_a_run_is_refused_where_it_makes_no_sense(url: str) -> None:
    with pytest.raises(EmptyStoreError):
        cnr_store.gc(url, end_run=True)
    save_many(open_backend(url), [1])
    with pytest.raises(OptionError, match="dry_run changes nothing"):
        cnr_store.gc(url, end_run=True, dry_run=True)


# Imports


def _model_file(url: str) -> Path:
    path = Path(f"{url}.pt")
    torch.save(torch.nn.Embedding(10, 4).state_dict(), path)
    return path


def test_an_import_waits_for_the_end_of_the_run(jobs: Jobs, url: str) -> None:
    source = _model_file(url)
    first = cnr_store.import_file(source, url)
    second = cnr_store.import_file(source, url)  # an import closes its claim
    process, _ = jobs.run("train", f"{url}/other", stop="saved", saves=2)
    before = objects(open_backend(url))
    with pytest.raises(SupersededError, match=rf"\(process {process} on .*cnr gc --end-run"):
        cnr_store.import_file(source, f"{url}/other")
    assert objects(open_backend(url)) == before
    cnr_store.gc(f"{url}/other", end_run=True)
    third = cnr_store.import_file(source, f"{url}/other")
    assert cnr_store.versions(f"{url}/other")[-1] == third
    assert [info.id for info in cnr_store.versions(url)] == [first.id, second.id]
    jobs.wake(process)
    source.unlink()
