"""Places that can't be opened, or hold something else: one clear error of our own, and nothing is touched."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zarr

import cnr_store
from cnr_backends import OpenError, StorageError
from cnr_store import Checkpointer, EmptyStoreError, FormatError, SaveError, VersionNotFoundError
from tests.test_store.support.lasting_store import make_model, weight

if TYPE_CHECKING:
    from tests.s3_server import S3Server


def _unopenable(kind: str, folder: Path) -> tuple[Any, str]:
    file = folder / "file"
    file.write_text("something else")
    urls: dict[str, tuple[Any, str]] = {
        "protocol": ("nope://bucket/x", "nope://bucket/x.*check the URL"),
        "file": (file, "it is a file; give a folder"),
        "below a file": (file / "x", "Not a directory.*give a folder"),
        "no url": ("", "give a path or a URL"),
        "one slash": ("s3:/bucket/x", "there must be two slashes"),
        "chain": ("simplecache::s3://bucket/x", "give the last one alone"),
        "type": (3, "give a path, a URL"),
    }
    return urls[kind]


@pytest.mark.parametrize("kind", ["protocol", "file", "below a file", "no url", "one slash", "chain", "type"])
def test_url_that_can_not_be_opened(tmp_path: Path, kind: str) -> None:
    url, message = _unopenable(kind, tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: Checkpointer(url, make_model()),
        lambda: cnr_store.versions(url),
        lambda: cnr_store.open(url),
        lambda: cnr_store.state_dict(url),
    ]
    for call in calls:
        with pytest.raises(OpenError, match=message):
            call()
    assert (tmp_path / "file").read_text() == "something else"


@pytest.mark.server
def test_missing_bucket(s3_server: S3Server) -> None:
    with pytest.raises(OpenError, match="no bucket 'cnr-nowhere'; make it, or correct the URL"):
        Checkpointer("s3://cnr-nowhere/x", make_model(), storage_options=s3_server.storage_options)


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may do everything, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A folder that may be read but not written, in one that everybody may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "store").mkdir(mode=0o555)
    yield folder / "store"
    (folder / "store").chmod(0o755)
    shutil.rmtree(folder)


def test_no_permission_to_write(forbidden: Path) -> None:
    model = make_model()
    with Checkpointer(forbidden, model, bits=32) as checkpointer:
        with _as_nobody():
            pending = checkpointer.save(1)
            with pytest.raises(SaveError, match=f"(?s){forbidden}.*Permission denied.*check the storage"):
                pending.result()
        forbidden.chmod(0o755)
        assert checkpointer.save(2).result().step == 2


def test_no_permission_to_read(forbidden: Path) -> None:
    forbidden.chmod(0o000)
    with _as_nobody(), pytest.raises(StorageError, match=r"Permission denied.*check the storage"):
        cnr_store.versions(forbidden)
    forbidden.chmod(0o755)
    assert cnr_store.versions(forbidden) == []


def test_empty_store(tmp_path: Path) -> None:
    model = make_model()
    before = weight(model).clone()
    for call in (cnr_store.open, cnr_store.view, cnr_store.state_dict):
        with pytest.raises(EmptyStoreError, match="holds no committed version: check the URL, or save one"):
            call(tmp_path / "none")
    with Checkpointer(tmp_path / "none", model) as checkpointer:
        with pytest.raises(EmptyStoreError, match=f"{tmp_path}/none holds no committed version"):
            checkpointer.load()
        assert torch.equal(weight(model), before)
        assert checkpointer.save(1).result().kind == "baseline"
    assert cnr_store.versions(tmp_path) == []


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", ["group", "array"])
def test_zarr_hierarchy_of_someone_else(tmp_path: Path, zarr_format: Any, kind: str) -> None:
    if kind == "group":
        zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
    else:
        zarr.create_array(tmp_path, shape=(3,), dtype="f4", zarr_format=zarr_format)
    before = sorted(tmp_path.rglob("*"))
    calls: list[Callable[[], Any]] = [
        lambda: Checkpointer(tmp_path, make_model()),
        lambda: cnr_store.versions(tmp_path),
        lambda: cnr_store.state_dict(tmp_path),
    ]
    for call in calls:
        with pytest.raises(FormatError, match=f"{tmp_path} holds a Zarr hierarchy.*choose another URL"):
            call()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "holds format 3; this release reads format 2: install a newer cnr-store"),
        ({"format": "1"}, "holds format '1'.*install a newer"),
        (None, "not sound JSON.*restore that object, or choose another URL"),
    ],
)
def test_newer_or_broken_format(stored: Path, change: dict[str, Any] | None, message: str) -> None:
    root = stored / "zarr.json"
    data = root.read_bytes()
    document = json.loads(data)
    if change:
        document["attributes"]["cnr"] = change
    root.write_text(json.dumps(document) if change else "{")
    for call in (lambda: Checkpointer(stored, make_model()), lambda: cnr_store.versions(stored)):
        with pytest.raises(FormatError, match=message):
            call()
    root.write_bytes(data)


CHANGES: list[Callable[[Path, str], object]] = [
    lambda url, version: cnr_store.repair(url, version),
    lambda url, version: cnr_store.compact(url, version),
    lambda url, version: cnr_store.pin(url, version),
    lambda url, version: cnr_store.unpin(url, version),
    lambda url, version: cnr_store.tag(url, "new", version),
    lambda url, _: cnr_store.untag(url, "best"),
    lambda url, _: cnr_store.gc(url, keep_last=1),
    lambda url, _: cnr_store.gc(url, end_run=True),
]
CHECKS: list[Callable[[Path, str], object]] = [
    lambda url, _: cnr_store.verify(url),
    lambda url, _: cnr_store.verify(url, deep=True),
    lambda url, version: cnr_store.verify(url, version),
    lambda url, _: cnr_store.verify(url, "latest"),
]


@pytest.mark.parametrize("number", [1, 3])
def test_what_changes_or_checks_a_store_of_another_format_refuses_it(
    stored: Path, tmp_path: Path, number: int
) -> None:
    version = cnr_store.versions(stored)[-1].id
    url = Path(shutil.copytree(stored, tmp_path / "other"))
    cnr_store.tag(url, "best", version)
    cnr_store.pin(url, version)
    document = json.loads((url / "zarr.json").read_bytes())
    document["attributes"]["cnr"]["format"] = number
    (url / "zarr.json").write_text(json.dumps(document))
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    for call in (*CHANGES, *CHECKS):
        with pytest.raises(FormatError, match=f"holds format {number}"):
            call(url, version)
        assert {path: path.read_bytes() for path in url.rglob("*") if path.is_file()} == before


def test_storage_options_are_blamed_only_where_some_were_given() -> None:
    with pytest.raises(OpenError, match=r"Protocol not known: s4; check the URL$"):
        cnr_store.versions("s4://bucket/run")
    with pytest.raises(OpenError, match=r"check the URL and the storage options \['anon'\]$"):
        cnr_store.versions("s4://bucket/run", anon=True)


def test_a_step_in_quotes_is_told(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, torch.nn.Embedding(3, 2), step=10)
    with pytest.raises(VersionNotFoundError, match=r"or 'latest'; a step is a number, without quotes: 10"):
        cnr_store.open(tmp_path, version="10")
    with pytest.raises(VersionNotFoundError, match="versions` lists them, a step, a tag, or 'latest'"):
        cnr_store.open(tmp_path, version="ten")
