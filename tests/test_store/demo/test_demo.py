"""The demo: its parts against models, and the whole of it on a folder, in memory and on S3."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cnr_backends import StorageError, open_backend
from cnr_store import Checkpointer, versions
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.version_info import VersionInfo
from demo import (
    BATCH,
    DemoError,
    FailingBackend,
    Interruption,
    Run,
    Story,
    Training,
    check_all,
    demo_place,
    measure,
    run_demo,
    train_in_process,
)
from movielens import (
    CROSS_ROWS,
    FILES,
    DemoDataError,
    TimeOrderedReader,
    auc,
    cache_folder,
    find_data,
    load_features,
    log_loss,
)
from tests.nightly import at_night
from tests.test_store.cli.command import cnr

V1, V2 = "000001-0123abcd.00000001", "000001-0123abcd.00000002"
RATINGS = 1_000


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up data set in the format of the real one; later users rate later, as in the real one."""
    folder = tmp_path_factory.mktemp("ratings")
    rng = np.random.default_rng(7)
    users, items, genres = 40, 60, ["Action", "Comedy", "Drama", "War"]
    user = np.sort(rng.integers(users, size=RATINGS))
    item = rng.integers(items, size=RATINGS)
    rating = np.clip(np.round(3 + (item % 3 - 1) + rng.normal(size=RATINGS)), 1, 5).astype(int)
    seconds = 900_000_000 + user * 86_400 + rng.integers(86_400, size=RATINGS)
    lines = [f"{u + 1}\t{i + 1}\t{r}\t{s}" for u, i, r, s in zip(user, item, rating, seconds, strict=True)]
    _write(folder / "ml-100k.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", lines)
    bags = [" ".join(genres[: 1 + k % len(genres)]) for k in range(items)]
    lines = [f"{k + 1}\tFilm {k}\t{1990 + k % 9}\t{bags[k]}" for k in range(items)]
    _write(folder / "ml-100k.item", "item_id:token\ttitle\tyear\tclass", lines)
    lines = [f"{k + 1}\t{18 + k}\t{'MF'[k % 2]}\tjob{k % 5}\t0000{k % 10}" for k in range(users)]
    _write(folder / "ml-100k.user", "user_id:token\tage\tgender\toccupation\tzip", lines)
    return folder


def _write(path: Path, header: str, lines: list[str]) -> None:
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


# metrics


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = zip(*pairs, strict=True)
    positive = [score for label, score in pairs if label]
    negative = [score for label, score in pairs if not label]
    wins = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    expected = sum(wins) / len(wins) if wins else float("nan")
    assert auc(labels, scores) == pytest.approx(expected, nan_ok=True)


def test_log_loss_is_the_mean_surprise_and_stays_finite() -> None:
    assert log_loss([1, 0], [0.5, 0.25]) == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2)
    assert np.isfinite(log_loss([1, 0], [0.0, 1.0]))


# reader


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 40))
def test_a_reader_goes_on_where_its_state_was_taken(samples: int, batch: int, taken: int) -> None:
    reader = TimeOrderedReader(samples, batch)
    before = [sample for ids in islice(reader, taken) for sample in ids]
    state = json.loads(json.dumps(reader.state_dict()))
    other = TimeOrderedReader(samples, batch)
    other.load_state_dict(state)
    after, continued = list(islice(other, 12)), list(islice(reader, 12))
    assert [ids.tolist() for ids in after] == [ids.tolist() for ids in continued]
    seen = before + [sample for ids in after for sample in ids]
    assert seen == [k % samples for k in range(len(seen))]


# data


def test_features_are_in_time_order_and_know_nothing_of_the_future(small_data: Path) -> None:
    features = load_features(small_data)
    assert len(features) == RATINGS
    assert features.train == RATINGS * 9 // 10
    user = features.columns["user"]
    assert (np.diff(user) >= 0).all()  # they were made in this order in time
    first = np.unique(user, return_index=True)[1]
    assert (features.columns["user_count"][first] == 0).all()
    for name, ids in features.columns.items():
        assert ids.dtype == np.int64
        assert ids.min() >= 0
        assert ids.max() < features.rows[name]
    assert {name: features.rows[name] for name in CROSS_ROWS} == CROSS_ROWS
    assert ((features.columns["genre"] == 0) == (features.columns["user_genre"] == 0)).all()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ml-100k.inter", "header\n1\t2\t3\n", "must have 4 tab-separated fields"),
        ("ml-100k.inter", "header\n9999\t1\t3\t880000000\n", "unknown user or item"),
        ("ml-100k.inter", "header\n1\t1\tgood\t880000000\n", "no number"),
        ("ml-100k.user", "header\n", "must have 5 tab-separated fields"),
    ],
)
def test_a_damaged_file_is_named(
    small_data: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    for one in FILES:
        (tmp_path / one).write_bytes((small_data / one).read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(DemoDataError, match=message) as caught:
        load_features(tmp_path)
    assert name in str(caught.value)


def test_data_are_looked_for_where_they_were_said_to_be(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CNR_DATA", str(tmp_path))
    assert find_data(small_data) == small_data
    with pytest.raises(DemoDataError, match=r"lacks ml-100k\.inter, ml-100k\.item, ml-100k\.user"):
        find_data()
    monkeypatch.setenv("CNR_DATA", str(small_data))
    assert find_data() == small_data


@pytest.mark.slow
def test_data_that_cannot_be_fetched_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CNR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    with pytest.raises(DemoDataError, match="give it by --data or CNR_DATA"):
        find_data(None, said.append)
    assert "GroupLens" in said[0]
    assert list(cache_folder().iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DemoDataError, match="set XDG_CACHE_HOME"):
        find_data()


@pytest.mark.data
def test_the_real_data_are_fetched_once_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CNR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = find_data()
    assert len(load_features(folder)) == 100_000
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    (folder / "ml-100k.item").write_text("damaged")
    assert len(load_features(find_data())) == 100_000
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert find_data() == folder


# what the parent knows


@pytest.mark.parametrize("event", [(), ("step",), ("nothing", 1), ("step", 14, [4]), ("failed", "no")])
def test_what_a_run_must_not_report_is_an_error(event: tuple[Any, ...]) -> None:
    run = _run(10, [[1], [2]])
    with pytest.raises(
        DemoError, match="training process failed: no" if "failed" in event else "after step 12"
    ):
        run.add(*event)


def _run(first: int, batches: list[list[int]], version: str | None = None) -> Run:
    run = Run()
    run.add("started", first, version, 0.0)
    for number, samples in enumerate(batches, first + 1):
        run.add("step", number, samples)
    return run


def test_the_checks_find_what_is_trained_twice_or_skipped() -> None:
    training, samples = Training(data="", steps=4, every=2), 3 * BATCH
    right = [ids.tolist() for ids in islice(TimeOrderedReader(samples, BATCH), 4)]
    versions = [_info(V1, 2), _info("000002-0123abcd.00000001", 4)]
    hit = Interruption(V2, 4, objects=3, nbytes=99, committed=False, newest=V1)

    def verdicts(
        second: Run, interruption: Interruption = hit, committed: list[VersionInfo] = versions
    ) -> list[bool]:
        with open_backend("memory://") as backend:
            story = Story(training, backend, 0, [_run(0, right[:3]), second], [interruption])
        return [holds for _, holds, _ in check_all(story, committed, Run(), samples)]

    assert verdicts(_run(2, right[2:], V1)) == [True] * 4
    assert verdicts(_run(2, [right[2], right[2]], V1))[2] is False
    assert verdicts(_run(3, right[3:], V1))[2] is True
    assert verdicts(_run(2, right[3:], V1))[2] is False
    assert verdicts(_run(2, right[2:], V2))[1] is False
    assert verdicts(_run(2, right[2:], V1), committed=versions[:1])[3] is False
    assert verdicts(_run(2, right[2:], V1), committed=[_info(V2, 4)])[0] is False
    late = Interruption(V1, 2, objects=3, nbytes=99, committed=True, newest=V1)
    assert verdicts(_run(2, right[2:], V1), late)[0] is False


def _info(version: str, step: int) -> VersionInfo:
    return VersionInfo(version, step, "delta", None, 0.0, 10, 1)


def test_versions_that_are_half_there_are_seen(tmp_path: Path) -> None:
    with open_backend(tmp_path / "store") as backend:
        story = Story(Training(data="", steps=3, every=2), backend, 0, [Run()])
        assert story.unfinished() is None
        backend.put(f"versions/{V1}/tables/t/weight/c/0/0", b"rows")
        assert story.unfinished() == V1
        backend.put(f"versions/{V1}/zarr.json", b"{}")
        (tmp_path / "store" / "versions" / V2 / "tables").mkdir(parents=True)  # a folder is no object
        assert story.unfinished() is None
        backend.put(f"versions/{V2}/manifest", b"12345")
        assert story.unfinished() == V2
        story.interrupt(V2)
        assert story.unfinished() is None  # its writer is gone
        story.interrupt(V1)
    assert story.interruptions == [
        Interruption(V2, 3, 1, 5, committed=False, newest=V1),
        Interruption(V1, 2, 2, 6, committed=True, newest=V1),
    ]


def test_an_outage_begins_inside_a_save_and_stays(tmp_path: Path) -> None:
    with open_backend(tmp_path) as backend:
        failing = FailingBackend(Story(Training("", 4, 2), backend, after=1))
        failing.put(f"versions/{V1}/a", b"1")
        failing.put(f"versions/{V1}/b", b"1")
        failing.create(f"versions/{V1}/zarr.json", b"1")
        failing.put(f"versions/{V2}/a", b"1")
        hit_before = failing.version
        with pytest.raises(StorageError, match="from here on"):
            failing.put(f"versions/{V2}/b", b"1")
        assert (hit_before, failing.version) == (None, V2)
        with pytest.raises(StorageError):
            failing.create("writers/x", b"")
        with pytest.raises(StorageError):
            failing.delete("writers/x")
        assert dict(failing.list_keys(f"versions/{V2}")) == {f"versions/{V2}/a": 1}
        assert failing.get(f"versions/{V2}/a") == b"1"


def test_a_place_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with demo_place("mine", {}, False, said.append) as (url, backend):
        backend.put("a", b"")
    assert url == "mine/run-2"
    assert said == ["mine is in use and stays as it is"]
    with demo_place("mine", {}, False, said.append) as (url, _):
        assert url == "mine/run-3"
    with demo_place(None, {}, keep=True, say=said.append) as (url, _):
        assert url == "demo-run"
    with demo_place(None, {}, False, said.append) as (url, backend):
        backend.put("a", b"")
        assert Path(url, "a").exists()
    assert not Path(url).exists()


# the whole demo


def run(capsys: pytest.CaptureFixture[str] | None = None, **options: Any) -> str:
    """Run the demo with few steps; all its checks must hold."""
    out = io.StringIO()
    holds = run_demo(Console(file=out), steps=60, every=10, **options)
    assert holds, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def shown(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The store of a demo in a folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "store"
    return folder, run(url=str(folder), data=small_data)


def codecs(place: str | Path) -> set[tuple[str, ...]]:
    """Of the rows and the state of a table, in all versions."""
    with open_backend(place) as backend:
        entries = [
            [record.arrays[f"tables/embed.user_year/{name}"].codec for name in ("weight", "sum")]
            for record in Catalog(backend).oldest_first()
        ]
    return {tuple(codec["id"] if codec else "" for codec in each) for each in entries}


@pytest.mark.slow
def test_the_demo_on_a_folder(shown: tuple[Path, str]) -> None:
    folder, text = shown
    assert "interrupted" in text
    assert "1,864 samples in 60 steps, 1,864 expected" in text
    assert "FAIL" not in text
    assert "<xarray.DataTree>" in text
    for figure in ("6-17x", "2.5-8x", "without loss"):
        assert figure in text
    assert text.endswith(
        f"  cnr ls {folder}\n"
        f"  cnr report {folder} -o report.html\n"
        f"  cnr cat {folder} embed.user_year --rows 5:10\n"
    )


@pytest.mark.slow
def test_rows_and_state_have_the_newest_codecs(shown: tuple[Path, str]) -> None:
    assert codecs(shown[0]) == {("cnr_lattice", "cnr_floating")}


@pytest.mark.nightly
def test_rows_of_a_given_width_have_the_plain_codecs(small_data: Path) -> None:
    run(url="memory://test-demo-codecs", data=small_data, bits=4)
    assert codecs("memory://test-demo-codecs") == {("cnr_uniform", "cnr_rows")}


def test_volumes_count_every_object() -> None:
    url = "memory://test-demo-volume"
    model = torch.nn.Embedding(4_096, 8, sparse=True)
    with Checkpointer(url, model, policy="consecutive") as checkpointer:
        checkpointer.save(1).result()
        checkpointer.save(2).result()
    with open_backend(url) as backend:
        backend.put(f"versions/{V2}/tables/weight/weight/c/0/0", b"left")
        written, kept = measure(backend)
        every = sum(size for _, size in backend.list_keys(""))
    assert written == every
    assert sum(version.bytes for version in versions(url)) == kept < written - len(b"left")


@pytest.mark.slow
def test_the_demo_in_memory_without_loss(capsys: pytest.CaptureFixture[str], small_data: Path) -> None:
    url, options = (
        "memory://test-demo",
        ("--steps", "60", "--every", "20", "--bits", "32", "--policy", "full"),
    )
    status, out, _ = cnr(capsys, "demo", url, "--data", str(small_data), *options)
    assert status == 0
    assert "to the last bit" in out
    assert "for:\n  cnr ls demo-run\n" in out  # nobody else sees a store in memory
    assert [(version.step, version.kind) for version in versions(url)] == [
        (step, "baseline") for step in (20, 40, 60)
    ]


def test_too_few_saves_are_refused_before_training(small_data: Path) -> None:
    with pytest.raises(DemoError, match="make 1 save"):
        run_demo(Console(file=io.StringIO()), steps=5, every=10, data=small_data)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["OpenError", at_night("DemoDataError")])
def test_a_training_process_that_fails_says_why(small_data: Path, tmp_path: Path, error: str) -> None:
    (tmp_path / "file").write_text("")
    data, url = (small_data, str(tmp_path / "file")) if error == "OpenError" else (tmp_path, None)
    training = Training(data=str(data), steps=2, every=1, url=url)
    with pytest.raises(DemoError, match=error):
        train_in_process(training, Run(), lambda: None)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.server
def test_the_demo_on_s3(small_data: Path, s3_server: Any) -> None:
    text = run(url=s3_server.url("demo"), storage_options=s3_server.storage_options, data=small_data)
    assert "interrupted" in text
    assert s3_server.storage_options["secret"] not in text


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.data
def test_the_demo_on_the_real_data(tmp_path: Path) -> None:
    assert "90,000 ratings" in run(url=str(tmp_path), policy="consecutive", bits=4)
