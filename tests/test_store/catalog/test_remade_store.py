"""A store that was removed, and made anew by another process, is another store; one place may have many spellings."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import Checkpointer, CheckpointError, SupersededError
from tests.test_store.support import small_model
from tests.test_store.support.lasting_store import change, make_model
from tests.test_store.support.places import quick_folder
from tests.test_store.support.processes import Jobs
from tests.test_store.support.retention_helpers import objects

REMADE = "the store was removed, and another one made in its place"


@pytest.fixture
def url() -> Iterator[str]:
    with quick_folder() as folder:
        yield f"{folder}/store"


@pytest.mark.slow
def test_a_job_that_loaded_before_does_not_take_the_new_store(jobs: Jobs, url: str) -> None:
    for _ in range(3):
        jobs.run("train", url, saves=1)
    model = make_model()
    cnr_store.save(url, model, step=9)
    with Checkpointer(url, model, keep_last=1) as checkpointer:
        checkpointer.load()
        shutil.rmtree(url)
        jobs.run("train", url, saves=3)
        before = objects(open_backend(url))
        with pytest.raises(SupersededError, match=REMADE):
            checkpointer.save(10).result()
        assert objects(open_backend(url)) == before


@pytest.mark.slow
def test_a_job_that_has_saved_does_not_take_the_new_store(jobs: Jobs, url: str) -> None:
    for _ in range(3):
        jobs.run("train", url, saves=1)
    model = make_model()
    checkpointer = Checkpointer(
        url, model, keep_last=1, failures=cnr_store.Failures(on_failure="log", retry_seconds=0)
    )
    checkpointer.save(10).result()
    checkpointer._upkeep.wait()  # or it writes into the folder that is removed
    shutil.rmtree(url)
    jobs.run("train", url, saves=3)
    before = objects(open_backend(url))
    for step in (11, 12):
        change(checkpointer, model, [step])
        with pytest.raises(SupersededError, match=REMADE):
            checkpointer.save(step).result()
        assert objects(open_backend(url)) == before
    checkpointer.close()


@pytest.mark.parametrize("remade", [True, False])
def test_a_job_that_ends_does_not_close_a_claim_of_the_new_store(jobs: Jobs, url: str, remade: bool) -> None:
    """The claim has the same number there; where nothing was made, nothing is."""
    checkpointer = Checkpointer(url, make_model())
    checkpointer.save(1).result()
    checkpointer._upkeep.wait()  # or it writes into the folder that is removed
    shutil.rmtree(url)
    if remade:
        jobs.run("train", url, saves=1)
    before = objects(open_backend(url))
    checkpointer.close()
    assert objects(open_backend(url)) == before


@pytest.mark.parametrize("outcome", ["lost", "unknown"])
def test_a_job_whose_last_save_failed_does_not_take_the_new_store(jobs: Jobs, url: str, outcome: str) -> None:
    """It claims anew after that, and the claims of the new store have the numbers of its own."""
    silent: list[bool] = []

    def fault(operation: str, key: str, _: int) -> Fault:
        is_record = key.startswith("versions/0") and key.endswith("/zarr.json") and key.count("/") == 2
        return "before" if silent and is_record else None

    model = make_model()
    backend = FaultyBackend(open_backend(url), fault)
    checkpointer = Checkpointer(
        backend,
        model,
        policy="full",
        keep_last=1,
        failures=cnr_store.Failures(on_failure="log", retry_seconds=0),
    )
    checkpointer.save(10).result()
    checkpointer._upkeep.wait()  # or it writes into the folder that is removed
    if outcome == "lost":
        shutil.rmtree(url)
    silent[:] = [True] if outcome == "unknown" else []
    with pytest.raises(CheckpointError):
        checkpointer.save(11).result()
    silent.clear()
    shutil.rmtree(url, ignore_errors=True)
    jobs.run("train", url, saves=3)
    before = objects(open_backend(url))
    for step in (12, 13):
        with pytest.raises(SupersededError, match=REMADE):
            checkpointer.save(step).result()
        assert objects(open_backend(url)) == before
    checkpointer.close()


@pytest.mark.slow
@pytest.mark.parametrize("copied_at", [1, 3])
def test_a_job_that_loaded_before_the_store_was_put_back_is_stale(
    jobs: Jobs, url: str, copied_at: int
) -> None:
    """The copy has fewer claims than the job has seen, and another job has claimed the next number once more."""
    for number in range(1, 5):
        jobs.run("train", url, saves=2)
        if number == copied_at:
            shutil.copytree(url, f"{url}-copy")
    with Checkpointer(
        url, make_model(), keep_last=1, failures=cnr_store.Failures(on_failure="log")
    ) as checkpointer:
        checkpointer.load(tables=[])
        shutil.rmtree(url)
        shutil.copytree(f"{url}-copy", url)
        jobs.run("train", url, saves=3)
        before = objects(open_backend(url))
        for step in (50, 51):
            with pytest.raises(SupersededError, match="the store was put back from a copy"):
                checkpointer.save(step).result()
            assert objects(open_backend(url)) == before


def test_single_saves_do_not_take_the_new_store(jobs: Jobs, url: str) -> None:
    cnr_store.save(url, make_model(), step=1)
    cnr_store.save(url, make_model(), step=2)
    shutil.rmtree(url)
    jobs.run("train", url, saves=3)
    before = objects(open_backend(url))
    with pytest.raises(SupersededError, match=REMADE):
        cnr_store.save(url, make_model(), step=3)
    assert objects(open_backend(url)) == before


def test_a_place_that_is_empty_may_be_used_again(url: str) -> None:
    model = make_model()
    with Checkpointer(url, model, bits=32) as checkpointer:
        checkpointer.save(1).result()
        shutil.rmtree(url)
        with pytest.raises(CheckpointError):
            checkpointer.save(2).result()
        assert checkpointer.save(3).result().kind == "baseline"
    shutil.rmtree(url)
    assert cnr_store.save(url, model, step=4).step == 4


def test_a_link_to_a_store_is_that_store(jobs: Jobs, url: str) -> None:
    jobs.run("train", url, saves=1)
    link = Path(url).with_name("link")
    link.symlink_to(url)
    model, _ = small_model.make_model("sgd", 1)
    cnr_store.load(url, model)
    jobs.run("train", url, saves=1)
    with pytest.raises(SupersededError, match="this job is stale"):
        cnr_store.save(str(link), model, step=9)


@pytest.mark.parametrize("names", [("s3a", "s3"), ("GS", "gcs"), ("az", "abfs"), ("abfss", "abfs")])
def test_protocols_with_several_names_are_one_place(jobs: Jobs, url: str, names: tuple[str, str]) -> None:
    jobs.run("train", url, saves=1)
    places = [FaultyBackend(open_backend(url), lambda *_: None) for _ in names]
    for place, name in zip(places, names, strict=True):
        place.url = f"{name}://bucket/{Path(url).parent.name}"
    model, _ = small_model.make_model("sgd", 1)
    cnr_store.load(places[0], model)
    jobs.run("train", url, saves=1)
    with pytest.raises(SupersededError, match="this job is stale"):
        cnr_store.save(places[1], model, step=9)


def test_a_host_of_any_name_may_claim(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may be no UTF-8."""
    monkeypatch.setattr(platform, "node", lambda: "trainer-\udcff")
    with Checkpointer(url, make_model(), policy="full") as checkpointer:
        checkpointer.save(1).result()
        checkpointer.save(2).result()
        assert len(cnr_store.gc(url, keep_last=1).removed) == 1


def test_a_load_that_has_read_everything_does_not_fail_at_the_end(url: str) -> None:
    saved = make_model(3)
    cnr_store.save(url, saved, step=1)
    down: list[bool] = []

    def fault(operation: str, key: str, _: int) -> Fault:
        return "before" if down and (operation, key) == ("list_names", "tombstones") else None

    model = make_model()
    with Checkpointer(FaultyBackend(open_backend(url), fault, reads=True), model) as checkpointer:
        down.append(True)
        assert checkpointer.load().step == 1
        down.clear()
        info = checkpointer.save(2).result()
    assert (info.kind, info.previous) == ("baseline", cnr_store.versions(url)[0].id)
