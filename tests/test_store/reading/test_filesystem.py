"""``cnr://``: fsspec's own suite for reading, and a version as files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests, AbstractOpenTests, AbstractPipeTests
from torch import nn

import cnr_store
from cnr_backends import BackendError, OpenError, StorageError, open_backend
from cnr_store import Checkpointer, CheckpointError, OptionError, ReadOnlyError, VersionNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.reading.filesystem import CnrFileSystem
from cnr_store.reading.overlay import Overlay
from tests.test_store.chains.test_relative import RELATIVE
from tests.test_store.support.filled_store import FilledStore

# fsspec's suite


class _Objects(FilledStore):
    """Whatever objects the suite reads."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __str__(self) -> str:
        return "objects"


class _Filled(CnrFileSystem):
    """The filesystem, which the suite fills on the way: all that reads is the product's."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        assert isinstance(self.store, _Objects)
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        self.store.objects[self._key(path)] = value

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        self.pipe_file(path, b"")

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:  # type: ignore[override]
        """There are folders where there are objects."""

    makedirs = mkdir  # type: ignore[assignment]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:  # type: ignore[override]
        assert isinstance(self.store, _Objects)
        root = self._key(path)
        for key in [key for key in self.store.objects if f"{key}/".startswith(f"{root}/")]:
            del self.store.objects[key]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            return _Written(self, path)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        return super()._open(path, mode, **options)


class _Written:
    def __init__(self, filesystem: _Filled, path: str) -> None:
        self.write = lambda data: filesystem.pipe_file(path, data)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        """All is written."""


class _Fixtures(AbstractFixtures):  # type: ignore[misc]  # fsspec ships no types
    @pytest.fixture
    def fs(self) -> CnrFileSystem:
        return _Filled(_Objects({}))

    @pytest.fixture
    def fs_path(self) -> str:
        return "files"


class TestGet(_Fixtures, AbstractGetTests):  # type: ignore[misc]
    """Everything that fsspec's suite has about getting."""


class TestOpen(_Fixtures, AbstractOpenTests):  # type: ignore[misc]
    """Everything about opening."""


class TestPipe(_Fixtures, AbstractPipeTests):  # type: ignore[misc]
    """Reading what was piped."""


# A version

KEY = "tables/t/weight/c/0/0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filesystem")
    torch.manual_seed(0)
    model = nn.Module()
    model.t = nn.Embedding(700, 8)
    model.top = nn.Linear(4, 2)
    with Checkpointer(place, model, policy="consecutive", codec={"t": RELATIVE}) as checkpointer:
        for step in (10, 20, 30):
            with torch.no_grad():
                model.get_parameter("t.weight")[step] += 1
            checkpointer.touch("t", [step])
            checkpointer.save(step).result()
    return place


@pytest.fixture
def files(folder: Path) -> CnrFileSystem:
    found, path = fsspec.url_to_fs(f"cnr://::file://{folder}")
    assert isinstance(found, CnrFileSystem)
    assert path == ""
    return found


def _weight(files: CnrFileSystem) -> Any:
    return np.frombuffer(files.cat_file(KEY), "<f4").reshape(-1, 8)[:700]


def test_caches_see_that_chunks_are_cut_another_way(folder: Path) -> None:
    catalog = Catalog(open_backend(folder))
    path = KEY.partition("/c/")[0]
    files, same, other = (
        CnrFileSystem(Overlay(catalog, catalog.find(), chunk_rows={path: rows})) for rows in (64, 64, 128)
    )
    assert files.cat_file(KEY) != other.cat_file(KEY)
    assert files.ukey(KEY) == same.ukey(KEY) != other.ukey(KEY)
    assert files.ukey("zarr.json") != files.ukey(KEY)


@pytest.mark.parametrize("step", [10, 20, 30, "latest"])
def test_a_chained_url_opens_any_version(folder: Path, step: int | str) -> None:
    files, path = fsspec.url_to_fs(f"cnr://{KEY}::file://{folder}", version=step)
    assert path == f"/{KEY}"
    expected = cnr_store.state_dict(folder, step)["t.weight"]
    np.testing.assert_array_equal(_weight(files), expected)
    with fsspec.open(f"cnr://{KEY}::{folder}", version=step) as file:
        assert file.read() == files.cat_file(KEY)


def test_the_store_may_be_given_as_a_url_a_path_or_a_view(folder: Path) -> None:
    view = cnr_store.view(folder)
    for place in (str(folder), f"file://{folder}", view):
        files = fsspec.filesystem("cnr", fo=place)
        assert files.cat_file("zarr.json") == CnrFileSystem(view).cat_file("/zarr.json")
        assert files.fsid == str(view)
        assert files == CnrFileSystem(view)


def test_files_and_folders_are_those_of_the_view(files: CnrFileSystem) -> None:
    assert files.ls("", detail=False) == ["/zarr.json", "/dense", "/tables"]
    assert files.ls("cnr://tables/t/", detail=False) == ["/tables/t/zarr.json", "/tables/t/weight"]
    assert files.info("tables/t") == {"name": "/tables/t", "size": 0, "type": "directory"}
    assert files.isfile(KEY)
    assert files.isdir("/tables/")
    assert not files.exists("tables/u")
    for key in files.find(""):
        assert files.info(key)["size"] == len(files.cat_file(key))
        assert files.ls(key, detail=False) == [key]
    assert set(files.find("")) == {f"/{key}" for key in files.store.keys_below("")}
    assert files.glob("tables/*/weight/zarr.json") == ["/tables/t/weight/zarr.json"]


@pytest.mark.parametrize("part", [(None, None), (0, 32), (33, 70), (-8, None), (5, -5), (10, 5), (0, 10**9)])
def test_parts_of_a_file_are_slices(files: CnrFileSystem, part: tuple[int | None, int | None]) -> None:
    whole = files.cat_file(KEY)
    assert files.cat_file(KEY, *part) == whole[slice(*part)]
    with files.open(KEY, block_size=100) as file:
        start = part[0] or 0
        file.seek(start, 0 if start >= 0 else 2)
        assert file.read() == whole[start:]


def test_what_is_not_there_is_a_missing_file(files: CnrFileSystem) -> None:
    calls = [files.info, files.ls, files.cat_file, files.open]
    for call in calls:
        with pytest.raises(FileNotFoundError, match=r"no object 'tables/t/weight/c/7/0' in cnr://") as caught:
            call("tables/t/weight/c/7/0")
        assert isinstance(caught.value, BackendError)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("pipe_file", ("x", b"")),
        ("pipe", ("x", b"")),
        ("touch", ("x",)),
        ("open", ("x", "wb")),
        ("open", ("x", "xb")),
        ("open", ("x", "ab")),
        ("mkdir", ("x",)),
        ("makedirs", ("x", True)),
        ("rmdir", ("tables",)),
        ("rm", ("zarr.json",)),
        ("rm_file", ("zarr.json",)),
        ("rm", ("tables", True)),
        ("copy", ("zarr.json", "x")),
        ("cp_file", ("zarr.json", "x")),
        ("mv", ("zarr.json", "x")),
        ("put_file", (__file__, "x")),
    ],
)
def test_nothing_can_be_changed(files: CnrFileSystem, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ReadOnlyError, match="versions never change") as caught:
        getattr(files, method)(*arguments)
    assert isinstance(caught.value, PermissionError)
    assert isinstance(caught.value, CheckpointError)


def test_a_copy_in_another_process_stays_at_its_version(folder: Path, tmp_path: Path) -> None:
    model = nn.Module()
    model.t = nn.Embedding(700, 8)
    first = cnr_store.save(tmp_path, model)
    files, _ = fsspec.url_to_fs(f"cnr://::file://{tmp_path}")
    sent = pickle.dumps(files)
    with torch.no_grad():
        model.get_parameter("t.weight").add_(1)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.load()
        checkpointer.save(1).result()
    copy = pickle.loads(sent)  # noqa: S301 - our own bytes
    np.testing.assert_array_equal(_weight(copy), cnr_store.state_dict(tmp_path, first)["t.weight"])
    assert copy == files
    newer, _ = fsspec.url_to_fs(f"cnr://::file://{tmp_path}")
    assert newer != files
    assert newer.ukey(KEY) != files.ukey(KEY)


def test_what_can_not_be_opened_says_why(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cnr://::s3://bucket/run"):
        fsspec.url_to_fs("cnr://tables")
    with pytest.raises(cnr_store.EmptyStoreError):
        fsspec.url_to_fs(f"cnr://::file://{tmp_path / 'nothing'}")
    with pytest.raises(VersionNotFoundError, match="step 7"):
        fsspec.url_to_fs(f"cnr://::file://{folder}", version=7)
    with pytest.raises(OpenError, match="no_such_option"):
        fsspec.url_to_fs(f"cnr://::file://{folder}", file={"no_such_option": 1})


def test_a_removed_version_is_no_missing_object(tmp_path: Path) -> None:
    model = nn.Embedding(100, 8)
    with Checkpointer(tmp_path, model, policy="full") as checkpointer:
        checkpointer.save(1).result()
        checkpointer.save(2).result()
    mapping = fsspec.get_mapper(f"cnr://::file://{tmp_path}", version=1)
    key = next(name for name in mapping if "weight/c/" in name)
    cnr_store.gc(tmp_path, keep_last=1, grace_seconds=0)
    with pytest.raises(StorageError, match="was removed while it was read"):
        mapping.get(key)
