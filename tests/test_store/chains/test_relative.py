"""Tables whose deltas are relative: what versions give back, by every reader, however the saves between them went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr

import cnr_store
from cnr_backends import index_nbytes, open_backend
from cnr_codecs import PayloadError, Scheme
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.link import open_link
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.reading.server import serving
from tests.nightly import FACTOR
from tests.test_codecs.references import floating
from tests.test_codecs.references.floating import floating_values
from tests.test_store.chains.test_lattice import (
    DIM,
    PATH,
    ROWS,
    Job,
    Values,
    array_of,
    assert_reads,
    held,
    recorded,
    required,
    step_of,
)

RELATIVE: dict[str, Any] = {"id": "cnr_lattice", "rms_step": 0.2, "relative": True}
ARRAY_OF_VERSION_2 = {
    "zarr_format": 2,
    "shape": (ROWS, DIM),
    "chunks": (4096, DIM),
    "dtype": "<f4",
    "fill_value": 0,
    "order": "C",
    "filters": None,
    "compressor": {"id": "cnr_lattice"},
}
"""As plain zarr reads it with numcodecs' registry: one payload is its chunk."""


def count_relative(url: str, version: str, only: str | None = None) -> int:
    """The relative rows of all arrays that a version wrote, or of one."""
    catalog = Catalog(open_backend(url))
    record, found = catalog.record(version), 0
    for path, entry in record.arrays.items():
        is_counted = entry.kind == "delta" and only in (None, path)
        link = open_link(catalog, record, path) if is_counted else None
        if link is not None:
            every = np.ones(entry.shape[0], np.uint8)
            payloads = (
                link._prove(*read)
                for shard, chunks in link._wanted(0, every).items()
                for read in link.shards.read(shard, chunks)
            )
            segments = (each for payload in payloads for each in payload.segments)
            found += sum(each.row_set.count for each in segments if each.scheme is Scheme.RELATIVE)
    return found


def relative_rows(url: Path, version: str) -> int:
    return count_relative(str(url), version)


def no_findings(url: Path) -> None:
    assert not cnr_store.verify(str(url), deep=True).problems


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent", "auto"])
def test_many_saves_and_folds_do_not_drift(tmp_path: Path, policy: str) -> None:
    """Each version gives back the codes that were written; a fold changes no bit."""
    job, random = (
        Job(tmp_path, RELATIVE, policy=policy, retention=cnr_store.Retention(max_chain=64)),
        np.random.default_rng(3),
    )
    restores = {20 + each for each in random.choice(20, 13, replace=False).tolist()}
    with job.checkpointer() as checkpointer:
        for seed in range(40 * FACTOR):
            job.train(seed)
            version = job.save(checkpointer)
            if random.random() < 0.1:
                cnr_store.compact(str(tmp_path), version)
            if seed % 40 in restores:  # rows go on from what was stored
                checkpointer.load()
                loaded = job.weight.detach().numpy().copy()
                np.testing.assert_array_equal(loaded, job.expected[version])
                job._saved = loaded
        versions = [*job.expected]
        values = job.weight.detach().numpy().copy()
    relative = [version for version in versions if relative_rows(tmp_path, version)]
    assert bool(relative) == (policy != "full")
    for version in random.choice(versions, 13, replace=False):
        np.testing.assert_array_equal(held(tmp_path, version), job.expected[version])
    half = max(step_of(recorded(tmp_path, each)[PATH]) for each in versions) / 2
    version = versions[-1]
    assert np.abs(job.expected[version] - values).max() <= half
    assert_reads(tmp_path, version, job.expected[version])
    before = held(tmp_path, version)
    cnr_store.compact(str(tmp_path), version)
    np.testing.assert_array_equal(held(tmp_path, version), before)
    if policy != "full":
        assert "relative" in required(tmp_path, relative[-1])
        folds = [path.name for path in (tmp_path / "folds").iterdir()]
        assert not any("relative" in required(tmp_path, fold, "folds") for fold in folds)
    no_findings(tmp_path)


def test_after_a_load_deltas_are_relative(tmp_path: Path) -> None:
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        job.train(1)
        assert relative_rows(tmp_path, job.save(checkpointer)) == 100
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.train(2)
        last = job.save(checkpointer)
        assert relative_rows(tmp_path, last) == 100
    assert_reads(tmp_path, last, job.expected[last])
    no_findings(tmp_path)


def test_a_rollback_and_a_fold_between_saves(tmp_path: Path) -> None:
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        for seed in range(3):
            job.train(seed)
            job.save(checkpointer)
        _, second, _ = job.expected
        checkpointer.load(second)
        job._stored, job._saved = job.expected[second].copy(), job.weight.detach().numpy().copy()
        for seed in range(3, 6):
            job.train(seed)
            last = job.save(checkpointer)
            cnr_store.compact(str(tmp_path), last)
        assert relative_rows(tmp_path, last) == 100
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
    no_findings(tmp_path)


def test_a_fold_of_a_version_without_rows_makes_no_later_rows_absolute(tmp_path: Path) -> None:
    """The codes that are known before the fold are those that it has."""
    job = Job(tmp_path, RELATIVE, policy="consecutive", retention=cnr_store.Retention(max_chain=2))
    with job.checkpointer() as checkpointer:
        for seed in (None, 1, None, None, 2, 1):
            if seed is not None:
                job.train(seed)
            last = job.save(checkpointer)
            checkpointer._upkeep.wait()
    third, _, fifth = [*job.expected][2:5]
    assert (tmp_path / "folds" / third).exists()
    assert recorded(tmp_path, fifth)[PATH].base == third
    assert relative_rows(tmp_path, last) == 100
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
    no_findings(tmp_path)


def test_rows_over_an_older_version_than_the_last_are_absolute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The codes that are known are those of the last version."""
    job = Job(tmp_path, RELATIVE, policy="auto", retention=cnr_store.Retention(max_chain=2))
    with job.checkpointer() as checkpointer:
        for seed in range(4):
            job.train(seed)
            job.save(checkpointer)
    first, *deltas = job.expected
    assert {recorded(tmp_path, each)[PATH].base for each in deltas} == {first}
    assert [relative_rows(tmp_path, each) for each in deltas] == [100, 0, 0]
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
    assert not any("other codes" in each.getMessage() for each in caplog.records)
    no_findings(tmp_path)


def test_rows_over_those_of_another_grid_are_absolute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codec: dict[str, Any] = {"id": "cnr_floating", "relative": True}
    found: dict[str, Values] = {}
    for mantissa, expected in ((3, 0), (3, 100), (4, 0)):
        job = Job(tmp_path, codec | {"mantissa_bits": mantissa}, policy="consecutive")
        with job.checkpointer() as checkpointer:
            if found:
                checkpointer.load()
            with torch.no_grad():
                job.weight[:100] *= 1.01
            checkpointer.touch("songs", np.arange(100))
            version = checkpointer.save(len(found)).result().id
            found[version] = on_floats(job.weight.detach().numpy(), mantissa)
        assert relative_rows(tmp_path, version) == expected
        np.testing.assert_array_equal(held(tmp_path, version)[:100], found[version][:100])
    assert not any("other codes" in each.getMessage() for each in caplog.records)
    no_findings(tmp_path)


def on_floats(values: Values, mantissa: int) -> Values:
    codes, raw = floating.codes_of(values, mantissa, "float32")
    assert not raw.any()
    return np.asarray(floating_values(codes, mantissa, "float32"))


@pytest.mark.parametrize("relative", [False, True])
def test_a_table_of_zeros_whose_rows_move_later(tmp_path: Path, relative: bool) -> None:
    """Zeros have no scale: rows that move are stored as they are, and the next version has a step for them."""
    job = Job(tmp_path, RELATIVE | {"relative": relative}, policy="consecutive")
    with torch.no_grad():
        job.weight.zero_()
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        job.train(1)
        version = job.save(checkpointer)
        np.testing.assert_array_equal(held(tmp_path, version), job.weight.detach().numpy())
        job.train(1)
        last = job.save(checkpointer)
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
    assert 0 < np.abs(job.expected[last] - job.weight.detach().numpy()).max() < 1
    no_findings(tmp_path)


def test_a_failed_save_leaves_the_codes_beneath_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, RELATIVE, policy="consecutive", failures=cnr_store.Failures(retry_seconds=0))
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        job.train(1)
        job.save(checkpointer)
        job.train(2)
        with monkeypatch.context() as patched:

            def fail(*_: Any) -> Any:
                raise OSError("no record today")

            patched.setattr("cnr_store.writing.writer.finish_record", fail)
            with pytest.raises(cnr_store.SaveError):
                checkpointer.save(99).result()
        job.train(3)
        last = job.save(checkpointer)
    assert relative_rows(tmp_path, last) > 150
    assert_reads(tmp_path, last, job.expected[last])
    no_findings(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_16_bits_and_rows_without_codes(tmp_path: Path, dtype: torch.dtype) -> None:
    job = Job(tmp_path, RELATIVE, dtype, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        for seed in range(4):
            job.train(seed)
            with torch.no_grad():
                job.weight[seed] = float("nan")
                job.weight[7, 2] = 300 if seed % 2 else 0.25
            checkpointer.touch("songs", [seed, 7])
            version = job.save(checkpointer)
            assert relative_rows(tmp_path, version) >= 90
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version).astype(np.float32), expected)
    no_findings(tmp_path)


def test_codecs_that_follow(tmp_path: Path) -> None:
    job = Job(tmp_path, RELATIVE | {"then": [{"id": "zstd", "level": 1}]}, policy="consecutive")
    with job.checkpointer() as checkpointer:
        for seed in range(3):
            job.train(seed)
            version = job.save(checkpointer)
    assert relative_rows(tmp_path, version) == 100
    np.testing.assert_array_equal(held(tmp_path, version), job.expected[version])


def test_wide_codes_are_not_relative(tmp_path: Path) -> None:
    """int8 holds codes to 127."""
    job = Job(tmp_path, {"id": "cnr_lattice", "step": 2.0**-7, "relative": True}, policy="consecutive")
    with torch.no_grad():
        job.weight[: ROWS // 2] *= 10
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        with torch.no_grad():
            job.weight[::3] += 0.01
        checkpointer.touch("songs", np.arange(0, ROWS, 3))
        version = job.save(checkpointer)
    wide = (np.abs(job.expected[version][::3] - 0.01) > 127.5 * 2.0**-7).any(axis=1)
    assert 0 < relative_rows(tmp_path, version) < ROWS // 3
    assert relative_rows(tmp_path, version) <= (~wide).sum() + 20
    np.testing.assert_array_equal(held(tmp_path, version), job.expected[version])


def chain_of(url: Path, saves: int = 4) -> tuple[Job, list[str]]:
    job = Job(url, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        for seed in range(saves):
            job.train(seed % 2)
            job.save(checkpointer)
    return job, [*job.expected]


def spoil(url: Path, version: str) -> None:
    for shard in (url / "versions" / version / PATH / "c").rglob("*"):
        if shard.is_file():
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 255
            shard.write_bytes(bytes(data))


@pytest.mark.parametrize("way", ["damaged", "lost", "swapped"])
def test_a_parent_that_is_not_there_is_an_error_and_salvage_goes_on(tmp_path: Path, way: str) -> None:
    job, versions = chain_of(tmp_path)
    first, second, third, fourth = versions
    folder = tmp_path / "versions"
    if way == "damaged":
        spoil(tmp_path, second)
    else:
        for shard in (folder / second / PATH / "c").rglob("*"):
            if shard.is_file() and way == "lost":
                shard.unlink()
            elif shard.is_file():
                place = shard.relative_to(folder / second)
                shard.write_bytes((folder / third / place).read_bytes())
    for version in (second, fourth):
        with pytest.raises(CorruptionError):
            held(tmp_path, version)
    assert {each.version for each in cnr_store.verify(str(tmp_path), deep=True).problems} >= {second}
    with job.checkpointer() as checkpointer:
        restored = checkpointer.load(salvage=True)
    found = job.weight.detach().numpy()
    assert restored.salvaged
    possible = [job.expected[each] for each in versions]
    assert all((found == each).all(axis=1).any() for each in possible)
    assert np.logical_or.reduce([(found == each).all(axis=1) for each in possible]).all()
    changed = (job.expected[fourth] != job.expected[first]).any(axis=1)
    np.testing.assert_array_equal(found[~changed], job.expected[fourth][~changed])
    cnr_store.repair(str(tmp_path))
    np.testing.assert_array_equal(held(tmp_path, "latest"), found)


@pytest.mark.parametrize("overlap", [0, 1], ids=["none of its rows", "one of its rows"])
def test_a_checksum_proves_rows_over_a_link_that_is_lost(tmp_path: Path, overlap: int) -> None:
    """Nobody knows which rows the lost link had, but rows that come out right without it were not among them."""
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    rows = {1: np.arange(100, 200), 2: np.arange(200 - overlap, 300), 3: np.arange(150, 250)}
    with job.checkpointer() as checkpointer:
        versions = [job.save(checkpointer)]
        for seed, changed in rows.items():
            if seed == 3 and not overlap:
                changed = np.arange(200, 250)
            with torch.no_grad():
                job.weight[changed] += 0.2 * torch.randn(len(changed), DIM)
            checkpointer.touch("songs", changed)
            versions.append(job.save(checkpointer))
            assert relative_rows(tmp_path, versions[-1]) == len(changed)
    for shard in (tmp_path / "versions" / versions[1] / PATH / "c").rglob("*"):
        if shard.is_file():
            shard.unlink()
    with pytest.raises(CorruptionError):
        held(tmp_path, versions[3])
    with job.checkpointer() as checkpointer:
        restored = checkpointer.load(salvage=True)
    found = job.weight.detach().numpy()
    if overlap:  # of each segment above, a row rests on what is lost
        np.testing.assert_array_equal(found, job.expected[versions[0]])
    else:
        np.testing.assert_array_equal(found[200:], job.expected[versions[3]][200:])
        np.testing.assert_array_equal(found[:200], job.expected[versions[0]][:200])
    salvaged = restored.salvaged["songs"].by_version
    assert set(salvaged) == {versions[0]}
    assert np.isin(np.arange(200, 300), salvaged[versions[0]]).any() == bool(overlap)


def test_salvage_looks_beneath_a_damaged_fold(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path)
    second, fourth = versions[1], versions[3]
    cnr_store.compact(str(tmp_path), second)
    for shard in (tmp_path / "folds" / second).rglob("c/*/*"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 255
        shard.write_bytes(bytes(data))
    with pytest.raises(CorruptionError):
        held(tmp_path, fourth)
    with job.checkpointer() as checkpointer:
        checkpointer.load(salvage=True)
    np.testing.assert_array_equal(job.weight.detach().numpy(), job.expected[fourth])


def test_codes_that_other_code_overwrote_make_rows_absolute_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        checkpointer._saves.finish_latest()
        known = checkpointer._saves.planner._code_cache._known[PATH]
        assert known.codes is not None
        known.codes[:, 1:] += 1
        versions = []
        for step in (1, 2):
            job.train(step)
            versions.append(job.save(checkpointer))
    for version in versions:
        np.testing.assert_array_equal(held(tmp_path, version), job.expected[version])
    assert [relative_rows(tmp_path, version) > 0 for version in versions] == [False, True]
    (told,) = (each for each in caplog.messages if "memory may be damaged" in each)
    assert told.endswith("Its rows are written absolute in this save")


def test_another_parent_is_told_by_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one byte of the codes in memory had been another, in a row that is not read back before the save: a read
    of the version it was written for finds it.
    """
    monkeypatch.setattr("cnr_store.writing.writer.check_parents", lambda *_: None)
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        first = job.save(checkpointer)
        checkpointer._saves.finish_latest()
        known = checkpointer._saves.planner._code_cache._known[PATH]
        job.train(1)
        row = int(np.flatnonzero((job.weight.detach().numpy() != job._saved).any(axis=1))[5])
        assert known.codes is not None
        known.codes[row, 3] += 1
        second = job.save(checkpointer)
    with pytest.raises(CorruptionError, match=rf"version {second}.*do not come out as they were written"):
        held(tmp_path, second)
    report = cnr_store.verify(str(tmp_path), deep=True)
    assert [(each.version, "crc32c differs" in each.what) for each in report.problems] == [(second, True)]
    with job.checkpointer() as checkpointer:
        restored = checkpointer.load(salvage=True)
    assert restored.salvaged
    found = job.weight.detach().numpy()
    np.testing.assert_array_equal(found, job.expected[first])


def test_older_readers_refuse_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, versions = chain_of(tmp_path)
    older = layout.FEATURES - {"relative"}
    monkeypatch.setattr("cnr_store.format.record_document.FEATURES", older)
    with pytest.raises(FormatError, match="requires relative: install a newer cnr-store"):
        held(tmp_path, versions[1])
    np.testing.assert_array_equal(held(tmp_path, versions[0]).shape, (ROWS, DIM))


def plain_reads(folder: Path) -> list[Callable[[], Values]]:
    """What readers that know no versions find in one or in a fold: zarr, xarray, and zarr by numcodecs' registry."""
    (path,) = (path for path, node in opened(folder).members(None) if path.endswith(PATH))
    (shard,) = (each for each in (folder / path / "c").rglob("*") if each.is_file())
    payload = shard.read_bytes()[: -index_nbytes(1) - 4]  # and a checksum
    with_registry = {".zarray": json.dumps(ARRAY_OF_VERSION_2).encode(), "0.0": payload}

    def by_xarray() -> Values:
        group, _, name = path.rpartition("/")
        with xarray.open_datatree(folder, engine="zarr", chunks=None) as tree:
            return np.asarray(tree[group][name].values)

    def by_registry() -> Values:
        store = {key: zarr.core.buffer.cpu.Buffer.from_bytes(data) for key, data in with_registry.items()}
        return np.asarray(zarr.open_array(store, mode="r", zarr_format=2)[:])

    return [lambda: np.asarray(opened(folder)[path][:]), by_xarray, by_registry]  # type: ignore[index]


def opened(folder: Path) -> zarr.Group:
    return zarr.open_group(folder, mode="r")


def test_plain_readers_open_wholes_and_folds_but_no_delta(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path)
    cnr_store.compact(str(tmp_path), versions[3])
    for folder in (tmp_path / "versions" / versions[0], tmp_path / "folds" / versions[3]):
        for read in plain_reads(folder):
            np.testing.assert_array_equal(read(), job.expected[folder.name])
    for read in plain_reads(tmp_path / "versions" / versions[1]):
        with pytest.raises(PayloadError, match=r"cnr_store\.view"):
            read()


def test_tensorstore_reads_relative_rows_over_http(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path)
    for _ in range(2):
        with serving(str(tmp_path), versions[3]) as url:
            spec = {"driver": "zarr3", "kvstore": f"{url}/{PATH}/"}
            found = tensorstore.open(spec, read=True).result().read().result()
        np.testing.assert_array_equal(found, job.expected[versions[3]])
        cnr_store.compact(str(tmp_path), versions[3])


def test_follow_diff_and_export_compose(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path / "store")
    url = str(tmp_path / "store")
    found = job.expected[versions[0]].copy()
    for update in cnr_store.follow(url, since=versions[0]):
        for each in update.blocks():
            if each.name == "songs.weight":
                found[each.rows] = each.values
        np.testing.assert_array_equal(found, job.expected[update.version.id])
    (diff,) = (each for each in cnr_store.diff(url, versions[0], versions[3]) if each.path == PATH)
    changed = (job.expected[versions[0]] != job.expected[versions[3]]).any(axis=1)
    assert diff.rows_changed == changed.sum()
    state = cnr_store.state_dict(url, versions[2])
    np.testing.assert_array_equal(state["songs.weight"], job.expected[versions[2]])
    ids = np.flatnonzero(changed)[:5]
    rows = array_of(tmp_path / "store", versions[3]).oindex[ids]
    np.testing.assert_array_equal(np.asarray(rows), job.expected[versions[3]][ids])


@pytest.mark.slow
def test_parts_of_a_version_are_loaded_and_saved_over(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path)
    changed = np.flatnonzero((job.expected[versions[0]] != job.expected[versions[3]]).any(axis=1))
    ids, last = changed[::2], job.expected[versions[3]]
    for chosen in ({"rows": {"songs": ids}}, {"tables": "songs"}):
        with torch.no_grad():
            job.weight.fill_(9)
        with job.checkpointer() as checkpointer:
            checkpointer.load(versions[3], **chosen)
            found, loaded = job.weight.detach().numpy().copy(), np.full(ROWS, "tables" in chosen)
            loaded[ids] = True
            np.testing.assert_array_equal(found, np.where(loaded[:, None], last, 9))
            for seed in (7, 7):
                job.train(seed)
                values = job.weight.detach().numpy().copy()
                version = checkpointer.save(seed).result().id
                half = step_of(recorded(tmp_path, version)[PATH]) / 2
                assert np.abs(held(tmp_path, version) - values).max() <= half
            assert relative_rows(tmp_path, version) > 0
    no_findings(tmp_path)


def test_a_table_that_grew_is_whole_once_and_then_relative(tmp_path: Path) -> None:
    job, versions = chain_of(tmp_path)
    table = torch.nn.Embedding(ROWS + 500, DIM, sparse=True)
    model = torch.nn.ModuleDict({"songs": table})
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.3), torch.arange(ROWS - 10, ROWS + 10)
    with Checkpointer(str(tmp_path), model, optimizer, policy="consecutive", codec=RELATIVE) as checkpointer:
        assert checkpointer.load(strict="report").grown == {"songs": (ROWS, ROWS + 500)}
        values = table.weight.detach().numpy()
        np.testing.assert_array_equal(values[:ROWS], job.expected[versions[-1]])
        for step, expected in ((50, 0), (51, len(rows))):
            with torch.no_grad():
                table.weight[rows] += 0.3
            checkpointer.touch("songs", rows)
            version = checkpointer.save(step).result().id
            assert relative_rows(tmp_path, version) == expected
            half = step_of(recorded(tmp_path, version)[PATH]) / 2
            assert np.abs(held(tmp_path, version) - values).max() <= half
    no_findings(tmp_path)


def test_retention_keeps_what_relative_rows_need(tmp_path: Path) -> None:
    """A delta all of whose rows were written again is still beneath them."""
    job = Job(tmp_path, RELATIVE, policy="consecutive", keep_last=1)
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        for _ in range(4):
            job.train(1)
            last = job.save(checkpointer)
    np.testing.assert_array_equal(held(tmp_path, last), job.expected[last])
    assert relative_rows(tmp_path, last) == 100
    cnr_store.gc(str(tmp_path), keep_last=1)
    np.testing.assert_array_equal(held(tmp_path, last), job.expected[last])
    no_findings(tmp_path)


@pytest.mark.slow
def test_checkpointers_of_other_options_go_on(tmp_path: Path) -> None:
    """A codec without steps ends the chain's step, so that rows are relative again above the next whole table."""
    job, _ = chain_of(tmp_path)
    for codec, count in (
        (RELATIVE | {"relative": False}, 0),
        (RELATIVE, 100),
        ({"id": "cnr_uniform", "bits": 8}, 0),
    ):
        with Checkpointer(
            str(tmp_path), job.model, job.optimizer, codec=codec, policy="consecutive"
        ) as other:
            other.load()
            for seed in (7, 7):
                job.train(seed)
                version = other.save(seed).result().id
        assert relative_rows(tmp_path, version) == count
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        found = {}
        for full in (False, False, True, False):
            job.train(8)
            version = checkpointer.save(9, full=full).result().id
            found[version] = job.weight.detach().numpy().copy()
            assert relative_rows(tmp_path, version) == (100 if len(found) == 4 else 0)
    for version, values in found.items():
        assert np.abs(held(tmp_path, version) - values).max() < 0.2
    no_findings(tmp_path)
