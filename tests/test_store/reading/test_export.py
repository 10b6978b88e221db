"""A version written as one safetensors file, or as a plain Zarr group, and read by those who know nothing of ours."""

from __future__ import annotations

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Literal

import fsspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xarray
import zarr
from fsspec.registry import _registry, known_implementations
from torch import nn
from zarr.core.metadata import ArrayV3Metadata

import cnr_store
from cnr_backends import StorageError, StorageFullError
from cnr_codecs import LatticeRows, LosslessRows, UniformRows
from cnr_store import Checkpointer, CorruptionError, EmptyStoreError, OptionError
from cnr_store.chains import array_reader
from cnr_store.format import arrays
from tests.s3_server import S3Server
from tests.test_store.support.zarr_nodes import array_of, values_of

Format = Literal["safetensors", "zarr"]


class Model(nn.Module):
    """Tables of every type, one tied, and dense tensors of types that numpy lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3000, 6)
        self.items = nn.Embedding(501, 5, dtype=torch.bfloat16)
        self.tags = nn.EmbeddingBag(40, 3, dtype=torch.float16)
        self.again = nn.Embedding(3000, 6)
        self.again.weight = self.users.weight
        self.top = nn.Linear(6, 1)
        self.tied = nn.Linear(6, 1)
        self.tied.weight = self.top.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("sixteenth", torch.linspace(-3, 3, 9, dtype=torch.bfloat16))
        self.register_buffer("eighth", torch.linspace(-3, 3, 9).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("counts", torch.arange(20_000, dtype=torch.int32).reshape(5000, 4))


@pytest.fixture(params=["one piece", "many pieces"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store whose newest version is a delta of quantized rows; in many pieces, of relative ones."""
    users = (
        LatticeRows(rms_step=0.05, relative=True) if request.param == "many pieces" else UniformRows(bits=4)
    )
    if request.param == "many pieces":
        monkeypatch.setattr(array_reader, "REGION_BYTES", 2000)
        monkeypatch.setattr(arrays, "MAX_DENSE_CHUNK_BYTES", 1000)
    torch.manual_seed(0)
    model = Model()
    place = tmp_path / "store"
    with Checkpointer(
        place, model, codec={"users": users, "items": UniformRows(bits=8), "tags": LosslessRows()}
    ) as checkpointer:
        checkpointer.save(1).result()
        for table in (model.users, model.items, model.tags):
            table(torch.arange(20).reshape(2, 10))
        with torch.no_grad():
            model.users.weight[:20] *= 2
            model.items.weight[:20] *= 2
            model.top.weight *= 2
        info = checkpointer.save(2).result()
    assert info.kind == "delta"
    return place


def loaded(store: Path) -> dict[str, torch.Tensor]:
    model = Model()
    cnr_store.load(store, model)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return left.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8))


def paths_by_name(group: zarr.Group) -> dict[str, str]:
    """The paths that an exported group gives by the model's names."""
    paths = group.attrs["names"]
    assert isinstance(paths, dict)
    return paths


def test_safetensors_reads_what_load_brings(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "model.safetensors"
    info = cnr_store.export(store, target)
    assert info == cnr_store.versions(store)[-1]
    expected, found = loaded(store), safetensors.torch.load_file(target)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert same(found[name], values), name
    Model().load_state_dict(found)
    with safetensors.safe_open(target, "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata.pop("cnr_aliases")) == {
        "again.weight": "users.weight",
        "tied.weight": "top.weight",
    }
    assert metadata == {"format": "pt", "cnr_version": info.id, "cnr_step": "2"}
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_every_tensor_of_a_file_is_aligned(store: Path, tmp_path: Path) -> None:
    cnr_store.export(store, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name, values in safetensors.torch.load(data).items():
        assert header[name]["data_offsets"][0] % values.element_size() == 0


@pytest.mark.slow
def test_zarr_reads_what_open_shows(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "model.zarr"
    info = cnr_store.export(store, target, format="zarr")
    found, expected = zarr.open_group(target, mode="r"), cnr_store.open(store)
    assert found.attrs["cnr_version"] == {"id": info.id, "step": 2}
    by_name = cnr_store.state_dict(store)
    assert paths_by_name(found).keys() == by_name.keys()
    for name, path in paths_by_name(found).items():
        array = array_of(found, path)
        assert "cnr" not in json.dumps(array.metadata.to_dict(), default=str)
        assert (array.dtype, array.shape) == (by_name[name].dtype, by_name[name].shape)
        assert np.array_equal(values_of(found, path), by_name[name])
        assert np.array_equal(values_of(found, path), values_of(expected, path))
    assert found["dense/model/sixteenth"].attrs["torch_dtype"] == "bfloat16"
    metadata = array_of(found, "tables/users/weight").metadata
    assert isinstance(metadata, ArrayV3Metadata)
    assert metadata.dimension_names == ("row", "dim")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_zarr_export_keeps_the_bits_of_what_equals_the_fill_value(tmp_path: Path) -> None:
    model = nn.Embedding(40, 4)
    model.register_buffer("zeros", torch.full((5,), -0.0))
    with torch.no_grad():
        model.weight.view(torch.int32).fill_(0x7FC00123)  # NaN with a payload
    cnr_store.save(tmp_path / "store", model, bits=32)
    cnr_store.export(tmp_path / "store", tmp_path / "zarr", format="zarr")
    found = zarr.open_group(tmp_path / "zarr", mode="r")
    for name, values in cnr_store.state_dict(tmp_path / "store").items():
        assert values_of(found, paths_by_name(found)[name]).tobytes() == values.tobytes()


def test_xarray_opens_an_export(store: Path, tmp_path: Path) -> None:
    cnr_store.export(store, tmp_path / "zarr", format="zarr")
    tree = xarray.open_datatree(tmp_path / "zarr", engine="zarr", consolidated=False, chunks=None)
    assert np.array_equal(tree["tables/users/weight"], cnr_store.state_dict(store)["users.weight"])


def test_an_older_version_can_be_exported(store: Path, tmp_path: Path) -> None:
    first = cnr_store.versions(store)[0]
    assert cnr_store.export(store, tmp_path / "file", version=1) == first
    found = safetensors.torch.load_file(tmp_path / "file")
    assert np.array_equal(found["users.weight"].numpy(), cnr_store.state_dict(store, first)["users.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_what_is_there_is_kept_unless_asked(store: Path, tmp_path: Path, kind: Format) -> None:
    target = tmp_path / "target"
    cnr_store.export(store, target, version=1, format=kind)
    before = contents(target)
    with pytest.raises(OptionError, match="overwrite=True"):
        cnr_store.export(store, target, format=kind)
    assert contents(target) == before
    cnr_store.export(store, target, format=kind, overwrite=True)
    assert contents(target) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "target"]


def contents(place: Path) -> bytes | dict[Path, bytes]:
    if place.is_file():
        return place.read_bytes()
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_not_replaced_by_a_folder_nor_a_folder_by_a_file(
    store: Path, tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match="is there already"):
        cnr_store.export(store, tmp_path / "file", format="zarr", overwrite=overwrite)
    with pytest.raises(OptionError, match="is there already"):
        cnr_store.export(store, tmp_path / "folder", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "a"


@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
@pytest.mark.parametrize("place", ["memory", "local"])
def test_a_damaged_version_leaves_no_export(store: Path, tmp_path: Path, kind: Format, place: str) -> None:
    (shard,) = (store / "versions" / cnr_store.versions(store)[0].id / "tables/tags/weight/c").rglob("0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    target = f"memory://{uuid.uuid4().hex}/x" if place == "memory" else str(tmp_path / "target")
    with pytest.raises(CorruptionError):
        cnr_store.export(store, target, format=kind)
    if place == "local":
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
    elif kind == "safetensors":
        assert not fsspec.filesystem("memory").exists(target)
    else:
        assert "cnr_version" not in zarr.open_group(target, mode="r").attrs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_an_export_goes_wherever_fsspec_leads(store: Path, kind: Format) -> None:
    target = f"memory://{uuid.uuid4().hex}/x"
    cnr_store.export(store, target, format=kind)
    if kind == "zarr":
        found = values_of(zarr.open_group(target, mode="r"), "tables/users/weight")
    else:
        found = safetensors.torch.load(fsspec.filesystem("memory").cat(target))["users.weight"].numpy()
    assert np.array_equal(found, cnr_store.state_dict(store)["users.weight"])
    with pytest.raises(OptionError, match="overwrite=True"):
        cnr_store.export(store, target, format=kind)
    cnr_store.export(store, target, format=kind, overwrite=True)
    fsspec.filesystem("memory").rm(target, recursive=True)


def test_a_zarr_export_goes_into_a_store_object(store: Path) -> None:
    target = zarr.storage.MemoryStore()
    cnr_store.export(store, target)
    assert np.array_equal(
        values_of(zarr.open_group(target), "tables/users/weight"), cnr_store.state_dict(store)["users.weight"]
    )
    with pytest.raises(OptionError, match="give a path or a URL"):
        cnr_store.export(store, zarr.storage.MemoryStore(), format="safetensors")


@pytest.mark.some_by_day(2)
@pytest.mark.server
@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_an_export_goes_to_s3(store: Path, tmp_path: Path, s3_server: S3Server, kind: Format) -> None:
    target, options = s3_server.url(f"export-{uuid.uuid4().hex}/{kind}"), s3_server.storage_options
    cnr_store.export(store, target, format=kind, target_options=options)
    if kind == "zarr":
        found = values_of(zarr.open_group(target, mode="r", storage_options=options), "tables/users/weight")
    else:
        data = fsspec.filesystem("s3", **options, skip_instance_cache=True).cat(target)
        found = safetensors.torch.load(data)["users.weight"].numpy()
    assert np.array_equal(found, cnr_store.state_dict(store)["users.weight"])
    with pytest.raises(OptionError, match="overwrite=True"):
        cnr_store.export(store, target, format=kind, target_options=options)


def test_errors_are_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EmptyStoreError):
        cnr_store.export(tmp_path / "none", tmp_path / "target")
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(3, dtype=torch.complex128))
    cnr_store.save(tmp_path / "store", model)
    cnr_store.save(tmp_path / "other", nn.Linear(1, 1))
    with pytest.raises(OptionError, match=r"'wide' of type complex128.*format='zarr'"):
        cnr_store.export(tmp_path / "store", tmp_path / "target")
    with pytest.raises(OptionError, match="'safetensors' or 'zarr'"):
        cnr_store.export(tmp_path / "store", tmp_path / "target", format="csv")  # type: ignore[arg-type]  # deliberately wrong
    kinds: tuple[Format, ...] = ("safetensors", "zarr")
    for kind in kinds:
        for target in ("nowhere://a/b", "", 5):
            with pytest.raises(OptionError, match="can't write to"):
                cnr_store.export(tmp_path / "other", target, format=kind)  # type: ignore[arg-type]  # deliberately wrong
        with pytest.raises(OptionError, match="takes no target_options"):
            cnr_store.export(tmp_path / "other", tmp_path / "x", format=kind, target_options={"key": "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]
    cnr_store.export(tmp_path / "store", tmp_path / "target", format="zarr")
    assert array_of(zarr.open_group(tmp_path / "target"), "dense/model/wide").dtype == np.complex128


def test_a_target_that_cannot_be_written_is_told(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't write"):
        cnr_store.export(store, "http://127.0.0.1:9/file")
    (tmp_path / "file").write_text("a")
    with pytest.raises(StorageError, match="can't write"):
        cnr_store.export(store, tmp_path / "file" / "below")


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cnr_store.save(tmp_path / "store", nn.Embedding(3, 2), step=1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match="free some space, or choose another target"):
        cnr_store.export(tmp_path / "store", tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_an_export_whose_driver_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Format
) -> None:
    cnr_store.save(tmp_path, nn.Embedding(10, 4), step=1)
    absent = {"class": "not_installed.FS", "err": "Install it"}
    monkeypatch.delitem(_registry, "gs", raising=False)
    monkeypatch.setitem(known_implementations, "gs", absent)
    with pytest.raises(OptionError, match=r"Install it: pip install 'cnr-store\[gcs\]'"):
        cnr_store.export(tmp_path, target=f"gs://bucket/model.{kind}")


@pytest.mark.parametrize("name", ["model.pt", "MODEL.PTH", "pytorch_model.bin", "last.ckpt"])
def test_a_name_of_torchs_files_is_refused_unless_a_format_is_given(tmp_path: Path, name: str) -> None:
    cnr_store.save(tmp_path / "store", nn.Embedding(3, 2), step=1)
    with pytest.raises(
        OptionError, match=r"\.pt, \.pth, \.bin, \.ckpt are torch's.*\.safetensors, or one in \.zarr"
    ):
        cnr_store.export(tmp_path / "store", tmp_path / name)
    assert not (tmp_path / name).exists()
    cnr_store.export(tmp_path / "store", tmp_path / name, format="safetensors")
    cnr_store.export(tmp_path / "store", tmp_path / "bin")  # no ending
    assert (tmp_path / name).read_bytes() == (tmp_path / "bin").read_bytes()
