"""An export replaces an earlier export where it is asked to, and nothing else."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from torch import nn

import cnr_store
from cnr_backends import StorageError, Transfer
from cnr_store import OptionError
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.reading import export
from tests.s3_server import S3Server
from tests.test_store.support.zarr_nodes import values_of


@pytest.mark.parametrize("kind", ["zarr", "parquet", "safetensors"])
@pytest.mark.parametrize(
    "target",
    ["store", "store/versions", "store/x", ".", "other", "link", "runs", "other/versions/x", "deep/weight"],
)
def test_no_export_replaces_a_store(
    tmp_path: Path, target: str, kind: Literal["zarr", "parquet", "safetensors"]
) -> None:
    model = nn.Embedding(5, 2)
    for name in ("store", "other", "runs/deep/one"):
        cnr_store.save(tmp_path / name, model)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (version,) = cnr_store.versions(tmp_path / "other")
    (tmp_path / "deep").symlink_to(tmp_path / "other/versions" / version.id / "tables")
    with pytest.raises(OptionError, match=r"would replace the store|holds a store|lies in the store"):
        cnr_store.export(tmp_path / "store", tmp_path / target, format=kind, overwrite=True)
    for name in ("store", "other", "runs/deep/one"):
        assert len(cnr_store.versions(tmp_path / name)) == 1


@pytest.mark.parametrize("kind", ["zarr", "parquet"])
@pytest.mark.parametrize("name", ["a", "a\\b", ".tmp-a", "other/versions"])
def test_only_an_export_is_replaced(tmp_path: Path, name: str, kind: Literal["zarr", "parquet"]) -> None:
    """Names that no key may have are in no listing of a backend."""
    cnr_store.save(tmp_path / "store", nn.Embedding(5, 2))
    mine = tmp_path / "target" / name / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("weeks of work")
    target = tmp_path / "target"
    for place in (target, zarr.storage.LocalStore(target)) if kind == "zarr" else (target,):
        with pytest.raises(OptionError, match="other things than an earlier export"):
            cnr_store.export(tmp_path / "store", place, format=kind, overwrite=True)
    assert mine.read_text() == "weeks of work"
    url = f"memory://{uuid.uuid4().hex}"
    with fsspec.open(f"{url}/{name}/mine", "wb") as file:
        file.write(b"0")
    if name == "a" and kind == "zarr":
        with pytest.raises(OptionError, match="other things than an earlier export"):
            cnr_store.export(tmp_path / "store", url, format=kind, overwrite=True)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", ["zarr", "parquet"])
@pytest.mark.parametrize(
    "mine", ["zarr", "array", "parquet", "beside zarr", "within zarr", "beside parquet", "derived"]
)
def test_data_of_the_formats_of_exports_is_not_replaced(
    tmp_path: Path, kind: Literal["zarr", "parquet"], mine: str, elsewhere: bool
) -> None:
    store, target = (
        tmp_path / "store",
        f"memory://{uuid.uuid4().hex}" if elsewhere else str(tmp_path / "target"),
    )
    cnr_store.save(store, nn.Embedding(5, 2))
    if mine == "zarr":
        zarr.create_group(target).create_array("a", data=np.arange(3))
    elif mine == "array":
        zarr.create_array(target, data=np.arange(3))
    elif "zarr" in mine:
        cnr_store.export(store, target, format="zarr")
        name = "a" if mine == "beside zarr" else "tables/weight/ann"
        zarr.open_group(target).create_array(name, data=np.arange(3))
    else:
        table = pa.table({"cnr": [1, 2]})
        if mine != "parquet":
            cnr_store.export(store, target, format="parquet")
            with fsspec.open(f"{target}/weight.parquet") as file:
                derived = pq.read_table(file)  # with the schema's metadata
            table = derived if mine == "derived" else table
        with fsspec.open(f"{target}/mine.parquet", "wb", auto_mkdir=True) as file:
            pq.write_table(table, file)
    filesystem, path = fsspec.core.url_to_fs(target)
    before = {name: filesystem.cat(name) for name in filesystem.find(path)}
    if (
        kind == "parquet" and elsewhere and ("zarr" in mine or mine == "array")
    ):  # each file stands for itself there
        cnr_store.export(store, target, format=kind, overwrite=True)
    else:
        with pytest.raises(OptionError, match="other things than an earlier export"):
            cnr_store.export(store, target, format=kind, overwrite=True)
    filesystem.invalidate_cache()
    assert {name: filesystem.cat(name) for name in before} == before


def test_an_export_that_was_cut_off_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    cnr_store.save(tmp_path / "store", nn.Embedding(5, 2))
    for name in ("_copy_rows", "_new_group"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(export, name, Mock(side_effect=KeyboardInterrupt))
            cnr_store.export(tmp_path / "store", url, format="zarr", overwrite=True)
        assert "cnr_version" not in zarr.open_group(url).attrs if name == "_copy_rows" else True
    cnr_store.export(tmp_path / "store", url, format="zarr", overwrite=True)
    assert dict(zarr.open_group(url, mode="r").attrs).keys() == {"names", "cnr_version"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["zarr", "parquet"])
def test_a_folder_that_came_during_an_export_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["zarr", "parquet"], overwrite: bool
) -> None:
    store, target = tmp_path / "store", tmp_path / "target"
    cnr_store.save(store, nn.Embedding(5, 2))
    read = ArrayReader.read_regions

    def comes(reader: ArrayReader, transfer: Transfer) -> Any:
        target.mkdir()
        (target / "mine").write_text("weeks of work")
        return read(reader, transfer)

    monkeypatch.setattr(ArrayReader, "read_regions", comes)
    with pytest.raises(OptionError, match="other things than an earlier export"):
        cnr_store.export(store, target, format=kind, overwrite=overwrite)
    assert (target / "mine").read_text() == "weeks of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "target"]


@pytest.mark.parametrize("failures", [1, 2, 3, 5])
def test_nothing_is_removed_where_a_look_fails(tmp_path: Path, failures: int) -> None:
    """A server that does not answer for a moment might hold anything."""
    source, left = tmp_path / "source", failures
    cnr_store.save(source, nn.Embedding(5, 2))
    held = zarr.storage.MemoryStore()
    cnr_store.save(held, nn.Embedding(5, 2))

    class Failing(zarr.storage.WrapperStore[Any]):
        async def get(self, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise ConnectionError("no answer")
            return await super().get(*arguments, **options)

    before = dict(held._store_dict)
    with pytest.raises((OptionError, StorageError)):
        cnr_store.export(source, Failing(held), format="zarr", overwrite=True)
    assert held._store_dict == before


@pytest.mark.parametrize("kind", ["zarr", "parquet"])
def test_a_file_that_came_during_an_export_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["zarr", "parquet"]
) -> None:
    store, target = tmp_path / "store", tmp_path / "target"
    cnr_store.save(store, nn.Embedding(5, 2))
    read = ArrayReader.read_regions

    def comes(reader: ArrayReader, transfer: Transfer) -> Any:
        target.write_text("weeks of work")
        return read(reader, transfer)

    monkeypatch.setattr(ArrayReader, "read_regions", comes)
    with pytest.raises(OptionError, match="other things than an earlier export"):
        cnr_store.export(store, target, format=kind, overwrite=True)
    assert target.read_text() == "weeks of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "target"]


@pytest.mark.parametrize("names", [{"a": 1}, {"a": ["tables"]}, [], "tables", None])
def test_a_group_with_odd_attributes_is_no_export(tmp_path: Path, names: Any) -> None:
    cnr_store.save(tmp_path / "store", nn.Embedding(5, 2))
    attributes = {"cnr_version": {}, "names": names}
    zarr.create_group(tmp_path / "target", attributes=attributes).create_array("a", data=np.arange(3))
    with pytest.raises(OptionError, match="other things than an earlier export"):
        cnr_store.export(tmp_path / "store", tmp_path / "target", format="zarr", overwrite=True)


def test_no_file_of_a_store_is_replaced(tmp_path: Path) -> None:
    for name in ("store", "other"):
        cnr_store.save(tmp_path / name, nn.Embedding(5, 2))
    for name in ("store", "other"):
        for path in [path for path in (tmp_path / name).rglob("*") if path.is_file()]:
            before = path.read_bytes()
            with pytest.raises(OptionError, match=r"would replace the store|lies in the store"):
                cnr_store.export(tmp_path / "store", path, format="safetensors", overwrite=True)
            assert path.read_bytes() == before


def test_places_with_colons_and_models_without_tables(tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "store", nn.ModuleDict({"users": nn.Embedding(5, 2)}))
    cnr_store.save(tmp_path / "dense", nn.Linear(2, 1))
    for _ in range(2):
        cnr_store.export(tmp_path / "store", tmp_path / "run::5" / "x.zarr", overwrite=True)
        cnr_store.export(tmp_path / "dense", tmp_path / "x.parquet", overwrite=True)
    group = zarr.open_group(zarr.storage.LocalStore(tmp_path / "run::5" / "x.zarr"), mode="r")
    assert "cnr_version" in group.attrs
    assert list((tmp_path / "x.parquet").iterdir()) == []


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "store", nn.Embedding(5, 2))
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    cnr_store.export(tmp_path / "store", tmp_path / "link", format="safetensors", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").stat().st_size > 0


def test_a_link_to_an_export_stays_one(tmp_path: Path) -> None:
    store, link = tmp_path / "store", tmp_path / "link"
    for step in (1, 2):
        cnr_store.save(store, nn.Embedding(5, 2), step=step)
        cnr_store.export(
            store, tmp_path / "target" if step == 1 else link, format="zarr", overwrite=step == 2
        )
        if step == 1:
            link.symlink_to(tmp_path / "target")
    assert link.is_symlink()
    assert zarr.open_group(tmp_path / "target", mode="r").attrs["cnr_version"]["step"] == 2  # type: ignore[index, call-overload]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "store", "target"]


def test_a_slip_in_a_url_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cnr_store.save("store", nn.Embedding(5, 2))
    for format_ in ("zarr", "parquet", "safetensors"):
        with pytest.raises(OptionError, match="two slashes"):
            cnr_store.export("store", "s3:/bucket/x", format=format_)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_no_store_object_replaces_a_part_of_a_store(tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "store", nn.Embedding(5, 2))
    cnr_store.save(tmp_path / "other", nn.Embedding(5, 2))
    for store in (
        zarr.storage.LocalStore(tmp_path / "other/versions"),
        zarr.storage.FsspecStore.from_url(f"file://{tmp_path}/other/versions"),
    ):
        with pytest.raises(OptionError, match="holds a store"):
            cnr_store.export(tmp_path / "store", store, overwrite=True)
    assert len(cnr_store.versions(tmp_path / "other")) == 1


def test_no_export_elsewhere_replaces_a_store() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    cnr_store.save(url, nn.Embedding(5, 2))
    for target in (url, f"{url}/x.zarr"):
        with pytest.raises(OptionError, match="would replace the store"):
            cnr_store.export(url, target, format="zarr", overwrite=True)
    assert len(cnr_store.versions(url)) == 1


@pytest.mark.parametrize("name", ["x?", "x*", "x[1]", "[x]1"])
def test_a_place_whose_name_is_a_pattern_is_itself(tmp_path: Path, name: str) -> None:
    url, source = f"memory://{uuid.uuid4().hex}", tmp_path / "store"
    cnr_store.save(source, nn.Embedding(5, 2))
    for other in ("x1", "xy", "x"):
        cnr_store.save(f"{url}/{other}", nn.Embedding(5, 2))
    for _ in range(2):
        cnr_store.export(source, f"{url}/{name}", format="zarr", overwrite=True)
    for other in ("x1", "xy", "x"):
        assert len(cnr_store.versions(f"{url}/{other}")) == 1
    found = zarr.open_group(f"{url}/{name}", mode="r")
    assert np.array_equal(values_of(found, "tables/weight/weight"), cnr_store.state_dict(source)["weight"])


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_what_others_put_since_a_listing_is_seen_on_s3(
    tmp_path: Path, s3_server: S3Server, kind: Literal["safetensors", "parquet"]
) -> None:
    cnr_store.save(tmp_path, nn.Embedding(5, 2))
    options, folder = s3_server.storage_options, s3_server.url(f"listed-{kind}")
    target = f"{folder}/x" if kind == "parquet" else f"{folder}/x.safetensors"
    key = f"{target}/mine.parquet" if kind == "parquet" else target
    cached = fsspec.filesystem("s3", **options)
    with cached.open(f"{folder}/first", "wb") as file:
        file.write(b"0")
    assert len(cached.ls(folder)) == 1
    other = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    other.pipe(key, b"of somebody else")
    with pytest.raises(OptionError, match="overwrite=True"):
        cnr_store.export(tmp_path, target, format=kind, target_options=options)
    assert other.cat(key) == b"of somebody else"
