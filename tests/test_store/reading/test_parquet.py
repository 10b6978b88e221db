"""The tables of a version as Parquet files, read by Arrow alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import OptionError
from cnr_store.chains import array_reader
from cnr_store.reading import export
from tests.s3_server import S3Server
from tests.test_store.support.places import memory_url

pq = pytest.importorskip("pyarrow.parquet")


class Model(nn.Module):
    """Tables of every type, one tied, one with an odd name, and a dense tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3000, 6)
        self.items = nn.ModuleDict({"a/b é": nn.Embedding(501, 5, dtype=torch.bfloat16)})
        self.tags = nn.EmbeddingBag(40, 3, dtype=torch.float16)
        self.again = nn.Embedding(3000, 6)
        self.again.weight = self.users.weight
        self.top = nn.Linear(6, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose newest version is a delta."""
    torch.manual_seed(0)
    model, place = Model(), tmp_path_factory.mktemp("stores") / "store"
    with torch.no_grad():
        model.tags.weight[3] = torch.nan
    with cnr_store.Checkpointer(place, model, bits={"users": 4}) as checkpointer:
        checkpointer.save(1).result()
        with torch.no_grad():
            model.users.weight[[3, 2999]] += 1
        checkpointer.touch("users", [3, 2999])
        assert checkpointer.save(2).result().kind == "delta"
    return place


def table_of(file: Any) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """The note and the rows of a file."""
    found = pq.read_table(file)
    assert found.column_names == ["row", "weight"]
    assert found["row"].to_pylist() == list(range(found.num_rows))
    kind = found.schema.field("weight").type
    lists = found["weight"].combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)
    return json.loads(found.schema.metadata[b"cnr"]), values


def test_arrow_reads_what_state_dict_returns(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_reader, "region_rows", lambda links, row_bytes: 700)
    info = cnr_store.export(store, tmp_path / "tables.parquet")
    expected = cnr_store.state_dict(store)
    files = sorted((tmp_path / "tables.parquet").iterdir())
    found = dict(zip(("items.a/b é", "tags", "users"), map(table_of, files), strict=True))
    for name, (note, values) in found.items():
        parameter = f"{name}.weight"
        assert note["name"] == parameter
        assert (note["version"], note["step"]) == (info.id, 2)
        assert values.dtype == expected[parameter].dtype
        assert values.tobytes() == expected[parameter].tobytes()
    assert found["users"][0]["aliases"] == ["again.weight"]
    # Each piece is a group of its own, which is all that a writer holds.
    assert pq.ParquetFile(files[-1]).num_row_groups == 5
    assert [path.name for path in tmp_path.iterdir()] == ["tables.parquet"]


def test_what_is_there_is_kept_unless_asked(store: Path, tmp_path: Path) -> None:
    target = tmp_path / "tables"
    cnr_store.export(store, target, 1, "parquet")
    with pytest.raises(OptionError, match="overwrite=True"):
        cnr_store.export(store, target, format="parquet")
    assert table_of(target / "users.parquet")[0]["step"] == 1
    cnr_store.export(store, target, format="parquet", overwrite=True)
    assert table_of(target / "users.parquet")[0]["step"] == 2


def test_a_place_elsewhere(store: Path, tmp_path: Path) -> None:
    with memory_url() as url:
        cnr_store.export(store, f"{url}/tables.parquet")
        with pytest.raises(OptionError, match="overwrite=True"):
            cnr_store.export(store, f"{url}/tables.parquet")
        cnr_store.export(store, f"{url}/tables.parquet", overwrite=True)


@pytest.mark.server
def test_tables_on_s3(store: Path, s3_server: S3Server) -> None:
    target, options = s3_server.url("parquet/tables"), s3_server.storage_options
    cnr_store.export(store, target, format="parquet", target_options=options)
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(**options)
    with filesystem.open(f"{target.removeprefix('s3://')}/users.parquet") as file:
        assert np.array_equal(table_of(file)[1], cnr_store.state_dict(store)["users.weight"])


def test_without_pyarrow_the_extra_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'cnr-store\[arrow\]'"):
        cnr_store.export(store, tmp_path / "tables.parquet")
    assert not list(tmp_path.iterdir())


def test_tables_of_an_earlier_export_elsewhere_are_gone(store: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    cnr_store.save(alone, nn.ModuleDict({"users": nn.Embedding(5, 2)}))
    with memory_url() as url:
        filesystem, path = fsspec.core.url_to_fs(url)
        cnr_store.export(store, url, format="parquet")
        filesystem.pipe(f"{path}/notes.txt", b"of somebody else")
        cnr_store.export(alone, url, format="parquet", overwrite=True)
        assert sorted(name.rpartition("/")[2] for name in filesystem.ls(path, detail=False)) == [
            "notes.txt",
            "users.parquet",
        ]


def test_a_folder_whose_name_is_a_pattern_is_itself(store: Path) -> None:
    with memory_url() as url:
        for name in ("a1", "a[1]", "a*"):
            cnr_store.export(store, f"{url}/{name}", format="parquet")
        for name in ("a[1]", "a*"):
            cnr_store.export(store, f"{url}/{name}", format="parquet", overwrite=True)
        filesystem, path = fsspec.core.url_to_fs(url)
        for name in ("a1", "a[1]", "a*"):
            assert len(filesystem.ls(f"{path}/{name}", detail=False)) == 3


def test_names_that_meet_where_case_is_folded_are_files_apart(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Embedding(5, 2) for name in ("users", "Users", "con")})
    cnr_store.save(tmp_path / "store", model, bits=32)
    cnr_store.export(tmp_path / "store", tmp_path / "out", format="parquet")
    files = sorted((tmp_path / "out").iterdir())
    assert len({file.name.lower() for file in files}) == len(model)
    assert not any(file.name.lower().startswith("con.") for file in files)
    for note, values in map(table_of, files):
        assert np.array_equal(values, model.get_parameter(note["name"]).detach().numpy())
