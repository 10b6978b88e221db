"""Stores that were written once: each version of each is read and loaded to the same bits, and goes on.

`make_golden_stores.py` wrote them, once. A store that is missing fails here; nothing here makes one.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import cnr_store
from cnr_store.catalog.catalog import open_record
from cnr_store.format.layout import FEATURES
from tests.test_docs import block
from tests.test_store.golden.golden_cases import CASES
from tests.test_store.golden.golden_codecs import FOLLOWED
from tests.test_store.golden.golden_jobs import JOBS, batches
from tests.test_store.golden.golden_values import (
    STORES,
    Array,
    Golden,
    described,
    model_paths,
    own_arrays,
    own_tree,
    table_name,
)
from tests.test_store.support.same_arrays import assert_same_arrays, differing

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

NAMES = [
    "uniform",
    "kmeans",
    "compressed",
    "one-shot",
    "consecutive",
    "intermittent",
    "auto",
    "full",
    "widths",
    "elements",
    "dense",
    "named",
    "shards",
    "large",
    "tall",
    "optimizers",
    "state-bits",
    "stateful",
    "generations",
    "doomed",
    "collected",
    "changing",
    "imported",
    "floating",
    "meeting",
    "lattices",
    "relative",
    "moving",
]
COMPRESSED = {("compressed", f"tables/{name}/weight") for name in FOLLOWED} | {("tall", "tables/tall/weight")}
"""What the reader of docs/format.md leaves out."""


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module", params=NAMES)
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(request.param, tmp_path_factory.mktemp("golden"))


@pytest.fixture
def golden(unpacked: Golden) -> Iterator[Golden]:
    """A golden store, which the test leaves as it is."""
    before = _digests(unpacked.url)
    yield unpacked
    assert _digests(unpacked.url) == before


@pytest.fixture(scope="module", autouse=True)
def unchanged_folder() -> Iterator[None]:
    """Nothing here writes into the golden folder."""
    before = _digests(STORES)
    yield
    assert _digests(STORES) == before


@pytest.fixture(autouse=True)
def global_generators() -> Iterator[None]:
    """Loads may set the global random number generators."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


def test_the_golden_stores_are_those_of_this_list() -> None:
    assert sorted(path.name for path in STORES.iterdir()) == sorted(NAMES)
    assert list(CASES) == NAMES


def test_each_folder_is_whole_and_small() -> None:
    files = {path.relative_to(STORES).as_posix(): path.stat().st_size for path in STORES.glob("*/*")}
    assert sorted(files) == sorted(
        f"{name}/{file}" for name in NAMES for file in ("expected.json", "expected.npz", "store.zip")
    )
    assert sum(files.values()) <= 3_000_000


def test_every_feature_has_a_store() -> None:
    requires = set[str]()
    for path in [*STORES.glob("*/store.zip"), STORES.parent / "of_ranks" / "store.zip"]:
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                if (
                    name.count("/") == 2
                    and name.startswith(("versions/0", "folds/0"))
                    and name.endswith("/zarr.json")
                ):
                    of = json.loads(packed.read(name))["attributes"]
                    requires.update(*(each["requires"] for key, each in of.items() if key != "cnr_void"))
    assert requires == FEATURES


def test_the_versions_are_those_that_were_saved(golden: Golden) -> None:
    found = cnr_store.versions(golden.url)
    assert [_facts(info) for info in found] == [version["info"] for version in golden.versions]
    assert [described(info.metadata) for info in found] == [each["metadata"] for each in golden.versions]


def _facts(info: cnr_store.VersionInfo) -> dict[str, Any]:
    facts = {**asdict(info), "time": info.time.hex()}
    del facts["metadata"]
    return facts


@pytest.mark.slow
@pytest.mark.each_by_day
def test_all_arrays_of_each_version_are_read_bit_for_bit(golden: Golden) -> None:
    for version in golden.versions:
        name, expected = version["info"]["id"], golden.arrays(version)
        assert_same_arrays(_read(cnr_store.open(golden.url, version=name)), expected)
        viewed = zarr.open_group(cnr_store.view(golden.url, version["info"]["step"]), mode="r")
        assert {path for path, each in viewed.members(max_depth=None) if isinstance(each, zarr.Array)} == {
            *expected
        }
        by_name = {key: expected[path] for key, path in version["names"].items()}
        assert_same_arrays(cnr_store.state_dict(golden.url, name), by_name)


def _read(group: zarr.Group) -> dict[str, Array]:
    members = group.members(max_depth=None)
    return {path: np.asarray(each[...]) for path, each in members if isinstance(each, zarr.Array)}


def test_plain_zarr_reads_each_baseline(golden: Golden) -> None:
    for version in golden.versions:
        if version["info"]["kind"] == "baseline":
            found = _read(zarr.open_group(golden.url / "versions" / version["info"]["id"], mode="r"))
            stored = _stored(golden, version)
            assert_same_arrays(found, {stored[path]: each for path, each in golden.arrays(version).items()})


def _stored(golden: Golden, version: dict[str, Any]) -> dict[str, str]:
    """Where the arrays of a version lie, by their paths."""
    return open_record(golden.url, version["info"]["id"])[1].stored_paths


def test_the_reader_of_the_formats_page_reads_each_table(golden: Golden) -> None:
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    for version in golden.versions:
        stored = _stored(golden, version)
        for path, expected in golden.arrays(version).items():
            place = golden.url, version["info"]["id"], stored[path]
            if (golden.name, path) in COMPRESSED:
                with pytest.raises(AssertionError, match="this reader undoes no"):
                    names["read_rows"](*place)
            elif path.startswith("tables/"):
                assert differing(names["read_rows"](*place), expected) is None, place


@pytest.mark.slow
@pytest.mark.each_by_day
def test_a_fresh_model_loads_each_version_bit_for_bit(golden: Golden, tmp_path: Path) -> None:
    url = _copied(golden, tmp_path)
    for version in golden.versions:
        job = JOBS[version["job"]](2)
        assert not _holds(job, golden, version)
        with cnr_store.Checkpointer(url, job.model, job.optimizers, state=job.objects) as checkpointer:
            restored = checkpointer.load(version["info"]["id"])
        _assert_holds(job, golden, version)
        assert (_facts(restored.version), restored.step) == (version["info"], version["info"]["step"])
        assert described(restored.reader) == version["reader"]
        assert described(restored.metadata) == version["metadata"]
        left = restored.skipped, restored.missing, restored.unexpected, restored.grown, restored.cast
        assert left == ((), (), (), {}, {})
    assert _digests(url) == _digests(golden.url)


def _copied(golden: Golden, folder: Path) -> Path:
    return Path(shutil.copytree(golden.url, folder / "store"))


def _holds(job: Any, golden: Golden, version: dict[str, Any]) -> bool:
    expected = golden.loaded_arrays(version)
    return all(
        path in expected and np.array_equal(each, expected[path]) for path, each in own_arrays(job).items()
    )


def _assert_holds(job: Any, golden: Golden, version: dict[str, Any]) -> None:
    assert_same_arrays(own_arrays(job), golden.loaded_arrays(version))
    tree = json.loads(json.dumps(own_tree(job, version["rng"] is not None)))
    for part, found in tree.items():
        assert found == version[part], part


def test_each_store_is_sound(golden: Golden) -> None:
    report = cnr_store.verify(golden.url, deep=True)
    assert report.ok
    assert list(report.versions) == [version["info"]["id"] for version in golden.versions]
    assert {
        "restorable": list(report.restorable),
        "suspicious": [finding.version for finding in report.suspicious],
        "leftovers": [[each.place, each.objects, each.nbytes] for each in report.leftovers],
        "voids": list(report.voids),
        "pins": sorted(cnr_store.pins(golden.url)),
    } == golden.doc["store"]


@pytest.mark.some_by_day(12)
@pytest.mark.parametrize(
    "unpacked", [name for name in NAMES if not name.startswith("large")], indirect=True, scope="module"
)
def test_training_goes_on_from_each_store(golden: Golden, tmp_path: Path) -> None:
    url, newest = _copied(golden, tmp_path), golden.versions[-1]
    job, other = JOBS[newest["job"]](2), JOBS[newest["job"]](3)
    options: dict[str, Any] = {
        "bits": 32,
        "policy": "consecutive",
        "job": cnr_store.Job(rng=newest["rng"] is not None),
    }
    with cnr_store.Checkpointer(url, job.model, job.optimizers, state=job.objects, **options) as checkpointer:
        checkpointer.load()
        for path, key in {path: key for key, path in reversed(model_paths(job.model).items())}.items():
            if path.startswith("tables/"):
                job.model.get_parameter(key).detach()[0] = 0.5
                checkpointer.touch(table_name(key), [0])
        info = checkpointer.save(10_000, reader={"on": True}).result()
    own = own_arrays(job)
    found = _read(cnr_store.open(url))
    assert_same_arrays({path: found[path] for path in own}, own)
    with cnr_store.Checkpointer(url, other.model, other.optimizers, state=other.objects) as checkpointer:
        restored = checkpointer.load()
    assert (restored.version, restored.reader, info.previous) == (info, {"on": True}, newest["info"]["id"])
    assert_same_arrays(own_arrays(other), own)
    rng = newest["rng"] is not None
    assert own_tree(other, rng) == own_tree(job, rng)
    assert cnr_store.verify(url, deep=True).ok
    assert [_facts(each) for each in cnr_store.versions(url)[:-1]] == [
        each["info"] for each in golden.versions
    ]
    for version in golden.versions:
        assert_same_arrays(_read(cnr_store.open(url, version=version["info"]["id"])), golden.arrays(version))


def test_a_tracked_reader_goes_on_where_it_stood(tmp_path: Path) -> None:
    stored = cnr_store.load(Golden("stateful", tmp_path).url, JOBS["stateful"](2).model)
    reader: cnr_store.TrackedReader[Any] = cnr_store.TrackedReader(batches())
    reader.load_state_dict(stored.reader)
    assert [batch.tolist() for batch in reader] == stored.metadata["rest"]
