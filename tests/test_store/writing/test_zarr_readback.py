"""Every array of every version, read by zarr-python and xarray alone, equals what numpy says it must hold."""

from __future__ import annotations

import json
import math
import uuid
import zlib
from pathlib import Path
from typing import Any

import dask
import dask.base
import numpy as np
import pytest
import tensorstore
import torch
import xarray as xr
import zarr
from torch import nn
from zarr.abc.store import Store
from zarr.storage import LocalStore

import cnr_store
from cnr_backends import index_nbytes, open_backend, parse_index
from cnr_codecs import parse
from cnr_store import Checkpointer, VersionInfo
from cnr_store.format.layout import decode_name, seal
from cnr_store.policies.policy import PolicyName
from tests.test_store.support.zarr_nodes import values_of
from tests.test_store.writing.readback_bench import TABLES, Arrays, Bench, Oracle

POLICIES = ("full", "one-shot", "consecutive", "intermittent")
CHANGES = ((0.1, 0), (0.02, 1), (0.3, 2), (0.005, 1))


def _draw_changes(draw: np.random.Generator, share: float, skipped: int) -> dict[str, Any]:
    """Row ids to change by table; some tables stay as they are, and `tiny` changes as a whole once."""
    names = list(TABLES)
    left_out = names[2 : 2 + 2 * skipped] if skipped else []
    changes: dict[str, Any] = {}
    for name, (rows, _, _) in TABLES.items():
        count = 0 if name in left_out else max(1, int(rows * share))
        changes[name] = np.sort(draw.choice(rows, count, replace=False))
    if skipped == 2:
        changes["tiny"] = np.arange(TABLES["tiny"][0])
    return changes


def _train(url: Any, policy: PolicyName, bits: int, reader: Any = None) -> tuple[list[VersionInfo], Oracle]:
    """Five versions of one training run; the first is saved before SparseAdam has made its state."""
    draw = np.random.default_rng(bits)
    bench, oracle = Bench(), Oracle(policy, bits)
    infos = []
    changes: dict[str, Any] = {name: np.arange(0) for name in TABLES}
    with Checkpointer(url, bench.model, bench.optimizers, policy=policy, bits=bits) as checkpointer:
        infos.append(checkpointer.save(0, reader).result())
        oracle.note(infos[-1], bench, changes)
        for step, (share, skipped) in enumerate(CHANGES, 1):
            changes = _draw_changes(draw, share, skipped)
            bench.change(checkpointer, changes)
            infos.append(checkpointer.save(step, reader).result())
            oracle.note(infos[-1], bench, changes)
    return infos, oracle


def _assert_same(found: Any, expected: np.ndarray[Any, Any], what: str) -> None:
    values = np.asarray(found)
    assert (values.shape, values.dtype) == (expected.shape, expected.dtype), what
    assert values.tobytes() == expected.tobytes(), what


def _arrays(group: zarr.Group) -> dict[str, zarr.Array[Any]]:
    return {path: node for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}


def _assert_zarr_reads(store: Store, infos: list[VersionInfo], oracle: Oracle) -> None:
    for info in infos:
        expected = oracle.versions[info.id].stored
        arrays = _arrays(zarr.open_group(store, path=f"versions/{info.id}", mode="r"))
        assert arrays.keys() == expected.keys()
        for path, array in arrays.items():
            _assert_same(array[...], expected[path], f"{info.id} {path}")
        for path in filter(_is_dense, expected):
            direct = zarr.open_array(store, path=f"versions/{info.id}/{path}", mode="r")
            _assert_same(direct[...], expected[path], f"{info.id} {path} by itself")


def _is_dense(path: str) -> bool:
    return path.startswith("dense/")


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_zarr_reads_every_array(tmp_path: Path, policy: PolicyName, bits: int) -> None:
    infos, oracle = _train(tmp_path, policy, bits)
    kinds = [info.kind for info in infos]
    assert kinds[:2] == ["baseline", "baseline" if policy == "full" else "delta"]
    _assert_zarr_reads(LocalStore(tmp_path, read_only=True), infos, oracle)
    _assert_zarr_reads(open_backend(tmp_path).zarr_store(), infos[-1:], oracle)


@pytest.mark.slow
def test_zarr_reads_memory() -> None:
    url = f"memory://readback-{uuid.uuid4().hex}"
    infos, oracle = _train(url, "consecutive", 4)
    _assert_zarr_reads(open_backend(url).zarr_store(), infos, oracle)


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_overlay_equals_load(tmp_path: Path, policy: PolicyName) -> None:
    infos, oracle = _train(tmp_path, policy, 4)
    for info in infos:
        expected = oracle.versions[info.id]
        loaded = Bench(seed=99)
        with Checkpointer(tmp_path, loaded.model, loaded.optimizers) as checkpointer:
            assert checkpointer.load(info.id).version == info
        rows, dense = loaded.rows_now(), loaded.dense_now()
        assert rows.keys() >= expected.values.keys()
        for path, values in expected.values.items():
            _assert_same(rows[path], values, f"{info.id} {path} loaded")
        for path, values in dense.items():
            _assert_same(values, expected.stored[path], f"{info.id} {path} loaded")
        everything = {**expected.values, **dense}
        opened = cnr_store.open(tmp_path, info)
        viewed = zarr.open_group(cnr_store.view(tmp_path, info), mode="r", use_consolidated=False)
        for group in (opened, viewed):
            arrays = _arrays(group)
            assert arrays.keys() == everything.keys()
            for path, array in arrays.items():
                _assert_same(array[...], everything[path], f"{info.id} {path} overlay")
        _assert_state_dict(cnr_store.state_dict(tmp_path, info), everything)


def _assert_state_dict(found: Arrays, everything: Arrays) -> None:
    expected = {}
    for path, values in everything.items():
        kind, group, name = path.split("/")
        if kind == "tables" and name == "weight":
            expected[f"{decode_name(group)}.weight"] = values
        elif group == "model":
            expected[decode_name(name)] = values
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        _assert_same(found[name], values, name)


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("position", [0, 4])
def test_xarray_opens_versions(tmp_path: Path, position: int) -> None:
    infos, oracle = _train(tmp_path, "consecutive", 4)
    info = infos[position]
    expected = oracle.versions[info.id]
    place = str(tmp_path / "versions" / info.id)
    _assert_tree(place, None, expected.stored)
    _assert_tree(place, True, expected.stored)
    dense = {path: values for path, values in expected.stored.items() if _is_dense(path)}
    _assert_tree(cnr_store.view(tmp_path, info), False, {**expected.values, **dense})
    with xr.open_zarr(place, group="tables/tables.wide", chunks=None) as dataset:
        _assert_same(dataset["weight"], expected.stored["tables/tables.wide/weight"], "one table")


def _assert_tree(store: Any, consolidated: bool | None, expected: Arrays) -> None:
    with (
        dask.config.set(scheduler="synchronous"),
        xr.open_datatree(store, engine="zarr", consolidated=consolidated, chunks={}) as tree,
    ):
        found = {
            f"{node.path.strip('/')}/{name}": values
            for node in tree.subtree
            for name, values in node.data_vars.items()
        }
        assert found.keys() == expected.keys()
        for path, values in expected.items():
            assert not values.ndim or dask.base.is_dask_collection(found[path].data), "it was read eagerly"
            _assert_same(found[path].compute().data, values, path)


@pytest.mark.slow
def test_what_direct_paths_lose(tmp_path: Path) -> None:
    """Arrays of rows have no document of their own: they are found through their version alone."""
    infos, oracle = _train(tmp_path, "consecutive", 4)
    info, path, dense = infos[-1], "tables/tables.wide/weight", "dense/model/cube"
    expected, store = oracle.versions[info.id].stored, LocalStore(tmp_path, read_only=True)
    root = zarr.open_group(store, mode="r")
    version = root[f"versions/{info.id}"]
    assert isinstance(version, zarr.Group)
    _assert_same(values_of(version, path), expected[path], "through the version")
    with pytest.raises(KeyError):
        root[f"versions/{info.id}/{path}"]
    with pytest.raises(FileNotFoundError, match="No array found"):
        zarr.open_array(store, path=f"versions/{info.id}/{path}", mode="r")
    with pytest.raises(FileNotFoundError, match="No group found"):
        zarr.open_group(store, path=f"versions/{info.id}/tables/tables.wide", mode="r")
    walked = zarr.open_group(store, path=f"versions/{info.id}", mode="r", use_consolidated=False)
    with pytest.warns(UserWarning, match="Object at (tables|dense|manifest|state) is not recognized"):
        assert list(walked.members(max_depth=None)) == []
    folder = f"file://{tmp_path}/versions/{info.id}"
    opened = tensorstore.open({"driver": "zarr3", "kvstore": f"{folder}/{dense}/"}, read=True).result()
    _assert_same(opened.read().result(), expected[dense], "tensorstore, directly")
    with pytest.raises(ValueError, match="NOT_FOUND"):
        tensorstore.open({"driver": "zarr3", "kvstore": f"{folder}/{path}/"}, read=True).result()


class BigTable(nn.Module):
    """One table of two shards and a dense tensor of two chunks."""

    ROWS, DIM = 300_000, 32

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(self.ROWS, self.DIM)
        self.dense = nn.Buffer(torch.rand(1001, 9000))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 32])
def test_arrays_keep_their_limits(tmp_path: Path, bits: int) -> None:
    model = BigTable(0)
    with Checkpointer(tmp_path, model, policy="consecutive", bits=bits) as checkpointer:
        infos = [checkpointer.save(0).result()]
        ids = np.concatenate([np.arange(5000, 9000), np.arange(5, BigTable.ROWS, 997)])
        with torch.no_grad():
            model.table.weight[ids] += 1
        checkpointer.touch("table", ids)
        infos.append(checkpointer.save(1).result())
    counts = [_assert_objects(tmp_path, info) for info in infos]
    assert counts[0]["dense/model/dense"] == 2
    assert bits == 4 or counts[0]["tables/table/weight"] == 2
    raw = LocalStore(tmp_path, read_only=True)
    arrays = _arrays(zarr.open_group(raw, path=f"versions/{infos[-1].id}", mode="r"))
    whole = cnr_store.state_dict(tmp_path)
    expected = np.full_like(whole["table.weight"], np.nan)
    expected[ids] = whole["table.weight"][ids]
    _assert_same(arrays["tables/table/weight"][...], expected, "delta")
    _assert_same(arrays["dense/model/dense"][...], model.dense.numpy(), "dense")
    if bits == 32:
        _assert_same(whole["table.weight"], model.table.weight.detach().numpy(), "table")


def _assert_objects(folder: Path, info: VersionInfo) -> dict[str, int]:
    """Every object of a version is accounted for; counts of data objects by array."""
    base = folder / "versions" / info.id
    objects = {str(path.relative_to(base)): path for path in base.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in objects.values()) == info.bytes
    documents = json.loads(objects["zarr.json"].read_bytes())["consolidated_metadata"]["metadata"]
    manifest = json.loads(zlib.decompress(objects["manifest"].read_bytes()))
    assert manifest["version"] == info.id
    listed: set[str] = set()
    for path, columns in manifest["arrays"].items():
        document = documents[path]
        for index, nbytes, tail in zip(columns["index"], columns["bytes"], columns["tail"], strict=True):
            zeros = ["0"] * (len(document["shape"]) - 1)
            key = "/".join([path, "c", str(index), *zeros])
            data = objects[key].read_bytes()
            assert (len(data), int.from_bytes(data[-4:], "little")) == (nbytes, tail)
            if path.startswith("tables/"):
                _assert_shard(data, document, info.id, path, index)
            listed.add(key)
    dense = {f"{path}/zarr.json": document for path, document in documents.items() if "dense/model/" in path}
    assert objects.keys() == listed | dense.keys() | {"zarr.json", "manifest", "state/main.json"}
    assert {key: json.loads(objects[key].read_bytes()) for key in dense} == dense
    return {path: len(columns["index"]) for path, columns in manifest["arrays"].items()}


def _assert_shard(data: bytes, document: dict[str, Any], version: str, path: str, shard: int) -> None:
    """Its grid keeps the documented limits, and every payload is sealed to its place."""
    shard_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    chunk_shape = document["codecs"][0]["configuration"]["chunk_shape"]
    assert all(rows & (rows - 1) == 0 for rows in (shard_shape[0], chunk_shape[0]))
    assert math.prod(chunk_shape) * np.dtype(document["data_type"]).itemsize <= 64 << 20
    chunks = shard_shape[0] // chunk_shape[0]
    assert chunks <= 4096
    assert len(data) <= 64 << 20
    index = parse_index(data[-index_nbytes(chunks) :], chunks, len(data))
    for slot in np.flatnonzero(index.present):
        begin, length = int(index.offsets[slot]), int(index.lengths[slot])
        assert length <= 1 << 20
        payload = parse(data[begin : begin + length - 4])
        first_row = shard * shard_shape[0] + int(slot) * chunk_shape[0]
        assert payload.seal == seal(version, path, first_row, 0) != 0
