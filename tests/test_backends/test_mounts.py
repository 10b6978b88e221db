"""A folder whose mount is lost takes no objects. A link that is led elsewhere stands for the mount."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cnr_backends import StorageError
from cnr_backends.local import LocalBackend
from tests.small_disks import small_disk

pytestmark = [
    pytest.mark.mounts,
    pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs"),
]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bare").mkdir()
    with small_disk("tmpfs", tmp_path):
        (tmp_path / "mount").symlink_to(tmp_path / "disk")
        yield tmp_path / "mount"


def switch(mount: Path, to: str) -> None:
    mount.unlink()
    mount.symlink_to(mount.parent / to)


@pytest.mark.parametrize("root", ["", "store"])
@pytest.mark.parametrize("is_read", [False, True])
def test_nothing_is_written_below_a_lost_mount(mount: Path, root: str, is_read: bool) -> None:
    backend = LocalBackend(mount / root)
    backend.put("a/b", b"1")
    if is_read:
        backend = LocalBackend(mount / root)
        assert backend.get("a/b") == b"1"
    switch(mount, "bare")
    for key in ("a/c", "d"):
        with pytest.raises(StorageError, match="still mounted here"):
            backend.put(key, b"2")
        with pytest.raises(StorageError, match="still mounted here"):
            backend.create(key, b"2")
    assert not any((mount.parent / "bare").iterdir())
    switch(mount, "disk")
    backend.put("a/c", b"2")
    assert (mount.parent / "disk" / root / "a" / "c").read_bytes() == b"2"


def test_an_object_that_was_begun_before_is_not_said_to_be_stored(mount: Path) -> None:
    backend = LocalBackend(mount)
    backend.put("a", b"1")
    begun = backend.begin_put("b", [b"2"])
    switch(mount, "bare")
    with pytest.raises(StorageError, match="still mounted here"):
        list(begun)
    assert not any((mount.parent / "bare").iterdir())


def test_what_was_mounted_anew_is_written_to(mount: Path) -> None:
    backend = LocalBackend(mount)
    backend.put("a", b"1")
    shutil.copytree(mount.parent / "disk", mount.parent / "other")
    switch(mount, "other")
    backend.put("b", b"2")
    assert (mount.parent / "other" / "b").read_bytes() == b"2"


@pytest.mark.parametrize("root", ["", "store"])
def test_a_mount_that_is_lost_before_anything_was_written_is_told(mount: Path, root: str) -> None:
    backend = LocalBackend(mount / root)
    switch(mount, "bare")
    with pytest.raises(StorageError, match="still mounted here"):
        backend.put("a", b"1")
    assert not any((mount.parent / "bare").iterdir())


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    for _ in range(2):
        backend.put("a", b"1")
        shutil.rmtree(tmp_path / "store")
    backend.put("b", b"1")
    assert backend.get("b") == b"1"
