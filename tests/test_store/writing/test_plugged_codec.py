"""Codecs from outside, and compressors behind codecs, save and load like our own; zarr-python alone reads them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn
from zarr.storage import LocalStore

import cnr_codecs
import cnr_store
from cnr_backends import open_backend
from cnr_codecs import Followed, RowCodec, UniformRows, row_codec
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.arrays import parse_compressors
from cnr_store.policies.policy import PolicyName
from tests.paths import ROOT
from tests.test_store.support.zarr_nodes import array_of, values_of

PAGE = ROOT / "docs" / "codecs.md"
ROWS, DIM = 3000, 16
PATH = "tables/users/weight"
Array = np.ndarray[Any, Any]


def _codec_of_the_page() -> Any:
    """The class of the page's example, as it stands there."""
    programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (program,) = (each for each in programs if "class ClippedRows" in each)
    names: dict[str, Any] = {"np": np, "cnr_codecs": cnr_codecs, "__name__": __name__}
    exec(program.partition("\n\ninfo = ")[0], names)
    return names["ClippedRows"]


Clipped = _codec_of_the_page()
CODECS: dict[str, RowCodec] = {
    "clipped": Clipped(1),
    "clipped, zstd": Followed(Clipped(1), [{"id": "zstd", "level": 3}]),
    "adaptive, zstd": cnr_codecs.row_codec(
        {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd", "level": 3}]}
    ),
    "rows, blosc and zstd": cnr_codecs.row_codec(
        {"id": "cnr_rows", "then": [{"id": "blosc"}, {"id": "zstd"}]}
    ),
    "symmetric, lz4": Followed(UniformRows("symmetric", 8), [{"id": "lz4"}]),
}


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.Embedding(ROWS, DIM, sparse=True)
        self.items = nn.Embedding(ROWS, DIM, sparse=True)
        with torch.no_grad():
            self.users.weight[7, 3] = torch.nan
            self.users.weight[8] = 0.25
            self.users.weight[9, 0] = torch.inf

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.users(ids).nan_to_num() * self.items(ids)
        return found.sum()  # type: ignore[no-any-return]  # torch types it so

    def table(self, name: str) -> Array:
        weight = getattr(self, name).weight
        assert isinstance(weight, nn.Parameter)
        return weight.detach().numpy()


def _as_stored(codec: RowCodec, values: Array) -> Array:
    """What the rows of one save decode to, without the store: a row's codes depend on nothing else."""
    plain = codec.codec if isinstance(codec, Followed) else codec
    payload = cnr_codecs.parse(plain.encode_rows(values, None, len(values), element="float32"))
    decoded = np.zeros_like(values)
    assert cnr_codecs.decode_into(payload, decoded, np.ones(len(values), np.uint8)) == len(values)
    return decoded


def _train(url: Path, policy: PolicyName, codec: Any, codecs: dict[str, RowCodec]) -> list[dict[str, Array]]:
    """Four versions; of each, by table, what it must read as."""
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected: list[dict[str, Array]] = []
    generator = torch.Generator().manual_seed(2)
    with cnr_store.Checkpointer(url, model, optimizer, policy=policy, codec=codec) as checkpointer:
        for step in range(4):
            ids = torch.arange(0)
            if step:
                ids = torch.randint(20, ROWS, (200,), generator=generator)
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()
            checkpointer.save(step).result()
            now = {name: _as_stored(codecs[name], model.table(name)) for name in codecs}
            written = np.unique(ids.numpy())
            if step and policy != "full":
                # Rows that were not touched are what they were at their last save.
                for name, values in now.items():
                    merged = expected[-1][name].copy()
                    merged[written] = values[written]
                    now[name] = merged
            expected.append(now)
    return expected


def _assert_holds(url: Path, expected: list[dict[str, Array]]) -> None:
    infos = cnr_store.versions(url)
    assert infos[0].kind == "baseline"
    for info, tables in zip(infos, expected, strict=True):
        group = cnr_store.open(url, info)
        model = Model(5)
        cnr_store.load(url, model, version=info)
        for name, values in tables.items():
            np.testing.assert_array_equal(values_of(group, f"tables/{name}/weight"), values)
            np.testing.assert_array_equal(model.table(name), values)


def _assert_zarr_alone_reads(url: Path, expected: list[dict[str, Array]]) -> int:
    """Rows that each version holds by itself, through zarr-python; the others are NaN. Returns how many are not."""
    partial = 0
    for info, tables in zip(cnr_store.versions(url), expected, strict=True):
        group = zarr.open_group(LocalStore(url), path=f"versions/{info.id}", mode="r")
        for name, values in tables.items():
            found = values_of(group, f"tables/{name}/weight")
            held = ~np.isnan(found).all(axis=1)
            assert held.all() or info.kind == "delta"
            np.testing.assert_array_equal(found[held], values[held])
            partial += int((~held).sum())
    return partial


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive"])
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_for_every_table(tmp_path: Path, name: str, policy: PolicyName) -> None:
    codec = CODECS[name]
    expected = _train(tmp_path, policy, codec, {"users": codec, "items": codec})
    _assert_holds(tmp_path, expected)
    partial = _assert_zarr_alone_reads(tmp_path, expected)
    assert (partial > 0) == (policy != "full")


def test_codecs_by_name_pattern(tmp_path: Path) -> None:
    codecs = {"users": CODECS["clipped"], "items": CODECS["adaptive, zstd"]}
    expected = _train(tmp_path, "consecutive", {"use*": codecs["users"], "*": codecs["items"]}, codecs)
    _assert_holds(tmp_path, expected)
    assert _assert_zarr_alone_reads(tmp_path, expected) > 0


def test_metadata_names_what_follows(tmp_path: Path) -> None:
    config = {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd", "level": 3}]}
    info = cnr_store.save(tmp_path, Model(1), codec=config)
    array = array_of(zarr.open_group(LocalStore(tmp_path), path=f"versions/{info.id}", mode="r"), PATH)
    codecs: Any = array.metadata.to_dict()["codecs"]  # JSON
    (sharding,) = codecs
    names = [codec["name"] for codec in sharding["configuration"]["codecs"]]
    assert names == ["cnr.rows", "zstd", "crc32c"]
    record = Catalog(open_backend(tmp_path)).record(info.id)
    assert record.arrays[PATH].codec == row_codec(config).get_config()


def test_what_follows_makes_rows_that_repeat_small(tmp_path: Path) -> None:
    model = Model(1)
    with torch.no_grad():
        model.users.weight[10:] = model.users.weight[11]
        model.items.weight[:] = model.items.weight[0]
    plain = cnr_store.save(tmp_path / "plain", model, codec={"id": "cnr_uniform", "bits": 8})
    then = [{"id": "zstd", "level": 3}]
    small = cnr_store.save(tmp_path / "small", model, codec={"id": "cnr_uniform", "bits": 8, "then": then})
    assert small.bytes < plain.bytes - 2 * ROWS * DIM * 0.9
    for name, values in cnr_store.state_dict(tmp_path / "plain").items():
        np.testing.assert_array_equal(cnr_store.state_dict(tmp_path / "small")[name], values)


def test_a_codec_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    info = cnr_store.save(tmp_path, Model(1), codec=CODECS["adaptive, zstd"])
    record = Catalog(open_backend(tmp_path)).find_record(info.id)
    assert record is not None
    doc = record.nodes["tables/users/weight"]
    parse_compressors(doc, "here")
    for name in ("numcodecs.pickle", "gzip"):
        doc["codecs"][0]["configuration"]["codecs"][1] = {"name": name}
        with pytest.raises(
            cnr_store.FormatError, match=rf"here: codec '{name}'.* it reads zstd, blosc, numcodecs\.lz4$"
        ):
            parse_compressors(doc, "here")


def test_a_codec_that_can_not_follow_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("pcodec", "gzip"):
        with pytest.raises(cnr_store.OptionError, match=f"'{name}' can't follow .* one of zstd, blosc, lz4"):
            cnr_store.Checkpointer(tmp_path, Model(1), codec={"id": "cnr_rows", "then": [{"id": name}]})
    assert not list(tmp_path.iterdir())


def test_the_codec_of_the_page_is_a_row_codec() -> None:
    codec = Clipped(3)
    assert dataclasses.replace(codec, percent=1) == CODECS["clipped"]
    assert isinstance(codec, RowCodec)
    assert cnr_codecs.row_codec(codec) is codec
    rows = np.random.default_rng(0).standard_t(2, (500, 64)).astype(np.float32)
    ours, wide = cnr_codecs.error_report(rows, codecs=[codec, UniformRows("asymmetric", 8)])
    assert ours.row_bytes == wide.row_bytes == codec.bytes_per_row(64, "float32")
