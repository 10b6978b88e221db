"""What a crash, a race or a hostile link must not do to a local folder."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cnr_backends import (
    ObjectExistsError,
    ObjectNotFoundError,
    OpenError,
    StorageError,
    StorageFullError,
    open_backend,
)
from cnr_backends.local import RESERVE, RESERVE_BYTES, RESERVE_STEP_BYTES
from tests.small_disks import KINDS, fill
from tests.small_disks import small_disk as disk_of

_RACE = """
import sys
from cnr_backends import ObjectExistsError, open_backend
backend = open_backend(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    try:
        backend.create(f"folder-{number}/name", sys.argv[2].encode() * 1000)
        print(number)
    except ObjectExistsError:
        pass
"""

_OVERWRITE = """
import itertools, sys
from cnr_backends import open_backend
backend = open_backend(sys.argv[1])
for letter in itertools.cycle(b"ab"):
    backend.put("folder/name", bytes([letter]) * 1_000_000)
    print(".", end="", flush=True)
"""


def _start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_folders_are_made_and_synced_once_before_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("cnr_backends.local.sync_folder", synced.append)
    backend = open_backend(tmp_path)
    backend.prepare("a/b/name")
    assert _files(tmp_path) == ["a", "a/b"]
    assert synced == [tmp_path / "a", tmp_path, tmp_path.parent]
    backend.put("a/b/name", b"data")
    assert len(synced) == 3


def test_what_is_begun_is_written_and_has_no_name_yet(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    begun = [backend.begin_put(f"folder/{name}", b"data") for name in "ab"]
    assert [path.stat().st_size for path in (tmp_path / "folder").iterdir()] == [4, 4]
    assert backend.list_names("folder") == []
    begun[0].close()
    assert list(begun[1]) == []
    assert _files(tmp_path) == ["folder", "folder/b"]


@pytest.mark.slow
def test_create_has_one_winner_among_processes(tmp_path: Path) -> None:
    keys = 30
    racers = [_start(_RACE, tmp_path, name, keys) for name in "abcd"]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    wins = [racer.communicate(b"\n")[0].split() for racer in racers]
    winners = {int(number): name for name, numbers in zip("abcd", wins, strict=True) for number in numbers}
    assert sum(map(len, wins)) == keys
    backend = open_backend(tmp_path)
    assert {number: backend.get(f"folder-{number}/name") for number in range(keys)} == {
        number: winners[number].encode() * 1000 for number in range(keys)
    }
    assert _files(tmp_path) == sorted(
        [f"folder-{n}" for n in range(keys)] + [f"folder-{n}/name" for n in range(keys)]
    )


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_object(tmp_path: Path) -> None:
    for _ in range(3):
        with _start(_OVERWRITE, tmp_path) as writer:
            assert writer.stdout is not None
            assert len(writer.stdout.read(5)) == 5
            os.kill(writer.pid, signal.SIGKILL)
        backend = open_backend(tmp_path)
        data = backend.get("folder/name")
        assert len(data) == 1_000_000
        assert len(set(data)) == 1
        assert backend.list_names("folder") == ["name"]
        assert list(backend.list_keys("")) == [("folder/name", 1_000_000)]


def test_everything_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = os.fsync

    def watched_sync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        assert path.is_dir() or not (path.parent / "name").exists()
        synced.append(path.with_name("temporary") if path.name.startswith(".tmp-") else path)
        sync(file)

    monkeypatch.setattr(os, "fsync", watched_sync)
    root = tmp_path / "new" / "root"
    backend = open_backend(root)
    backend.put("a/b/name", b"value")
    parents = [tmp_path, tmp_path / "new", root, root / "a"]
    assert [*sorted(synced[:-2]), *synced[-2:]] == [*parents, root / "a/b/temporary", root / "a/b"]

    synced.clear()
    backend.create("a/c/name", b"value")
    assert synced == [root / "a", root / "a/c/temporary", root / "a/c"]

    synced.clear()
    backend.delete("a/c/name")
    assert synced[0] == root / "a/c"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    with disk_of("tmpfs", tmp_path, mebibytes=1) as folder:
        yield folder


@pytest.mark.parametrize("most_bytes", [3, 1 << 30])
def test_an_object_of_many_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """A call of the kernel takes some thousand pieces at most, and may write fewer bytes than it was given."""
    real, calls = os.writev, 0

    def writev(file: int, buffers: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        return real(file, [memoryview(b"".join(buffers))[:most_bytes]])

    monkeypatch.setattr(os, "writev", writev)
    pieces = [bytes([number % 251]) * (number % 5) for number in range(3000)]
    backend = open_backend(tmp_path)
    backend.put("folder/name", pieces)
    assert backend.get("folder/name") == b"".join(pieces)
    assert (calls <= 3) == (most_bytes > 3)


@pytest.mark.mounts
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_says_so_and_leaves_nothing_behind(small_disk: Path) -> None:
    backend = open_backend(small_disk / "root")
    backend.put("folder/name", b"old")
    writes: list[Callable[[], None]] = [
        lambda: backend.put("folder/name", bytes(2**21)),
        lambda: backend.put("folder/other", [bytes(2**19)] * 4),
        lambda: backend.create("folder/new", bytes(2**21)),
    ]
    for write in writes:
        with pytest.raises(StorageFullError, match="free some space") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
    assert _files(small_disk / "root") == ["folder", "folder/name"]
    assert backend.get("folder/name") == b"old"
    backend.put("folder/name", bytes(2**19))
    assert backend.size("folder/name") == 2**19


# The reserve


def test_the_reserve_is_given_up_in_parts_and_made_again(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    assert not backend.shrink_reserve()
    backend.hold_reserve()
    assert backend.size(RESERVE) == RESERVE_BYTES
    inode = (tmp_path / RESERVE).stat().st_ino
    backend.hold_reserve()
    assert (tmp_path / RESERVE).stat().st_ino == inode
    parts = 0
    while backend.shrink_reserve():
        parts += 1
        assert (
            sum(nbytes for _, nbytes in backend.list_keys("")) == RESERVE_BYTES - parts * RESERVE_STEP_BYTES
        )
    assert parts == RESERVE_BYTES // RESERVE_STEP_BYTES
    assert _files(tmp_path) == []
    backend.hold_reserve()
    assert backend.size(RESERVE) == RESERVE_BYTES


@pytest.mark.mounts
@pytest.mark.parametrize("kind", KINDS)
def test_small_objects_find_room_in_the_reserve(tmp_path: Path, kind: str) -> None:
    with disk_of(kind, tmp_path) as disk:
        backend = open_backend(disk / "root")
        backend.put("name", b"value")
        backend.hold_reserve()
        fill(disk)
        with pytest.raises(StorageFullError):
            backend.create("a/b/0", b"value")
        assert _files(disk / "root") == ["name", RESERVE]
        for number in range(20):
            backend.with_reserve(lambda number=number: backend.create(f"a/{number}/name", b"value"))  # type: ignore[misc]
        assert 0 < backend.size(RESERVE) < RESERVE_BYTES
        backend.hold_reserve()  # there is no room to make it again
        assert backend.size(RESERVE) < RESERVE_BYTES
        with pytest.raises(StorageFullError, match="free some space"):
            backend.with_reserve(lambda: backend.put("large", bytes(10 << 20)))


def test_a_sweep_removes_what_is_no_object(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    backend.put("a/b/name", b"value")
    backend.put("c/name", b"value")
    for folder in ("a/b", "a/empty/deeper", "c"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ".tmp-crashed").write_bytes(b"half")
    backend.sweep("a")
    assert _files(tmp_path) == ["a", "a/b", "a/b/name", "c", "c/.tmp-crashed", "c/name"]
    backend.delete("a/b/name")
    backend.sweep("missing/deeper")
    (tmp_path / "a/empty").mkdir(parents=True)
    backend.sweep("a")
    assert _files(tmp_path) == ["c", "c/.tmp-crashed", "c/name"]


# Filesystems that lack something


def _failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.skipif(sys.platform != "linux", reason="needs renames that replace nothing")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_create_is_exclusive_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", _failing(code))
    backend = open_backend(tmp_path)
    backend.create("folder/name", b"first")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as if another process made it a moment later
    with pytest.raises(ObjectExistsError):
        backend.create("folder/name", b"second")
    assert backend.get("folder/name") == b"first"
    gate = threading.Barrier(8)

    def race(number: int) -> bool:
        gate.wait()
        try:
            backend.create("raced", b"%d" % number)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        wins = list(pool.map(race, range(8)))
    assert wins.count(True) == 1
    assert backend.get("raced") == b"%d" % wins.index(True)
    assert _files(tmp_path) == ["folder", "folder/name", "raced"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_filesystem_without_exclusive_create_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", _failing(code))
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())  # as where there is no such rename
    backend = open_backend(tmp_path)
    with pytest.raises(
        StorageError, match=r"hard links or renames that replace nothing.*another filesystem"
    ) as caught:
        backend.create("folder/name", b"value")
    assert "permissions" not in str(caught.value)
    assert _files(tmp_path) == []
    backend.put("folder/name", b"value")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("kind", ["files", "folders"])
def test_a_filesystem_that_can_not_sync_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    sync = os.fsync

    def lacking(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) == (kind == "folders"):
            raise OSError(code, os.strerror(code))
        sync(file)

    monkeypatch.setattr(os, "fsync", lacking)
    with pytest.raises(StorageError, match=f"can't sync {kind}.*another filesystem") as caught:
        open_backend(tmp_path).put("folder/name", b"value")
    assert "permissions" not in str(caught.value)
    assert caught.value.errno == code


def test_opening_makes_nothing(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "root")
    assert backend.list_names("") == []
    assert list(backend.list_keys("")) == []
    with pytest.raises(ObjectNotFoundError):
        backend.get("name")
    backend.delete("name")
    assert not (tmp_path / "root").exists()


def test_the_root_stays_when_it_is_empty(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "root")
    backend.put("a/b/c", b"")
    backend.delete("a/b/c")
    assert _files(tmp_path) == ["root"]


def test_a_relative_path_is_fixed_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = open_backend("root")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    backend.put("name", b"value")
    assert (tmp_path / "root" / "name").read_bytes() == b"value"
    assert backend.url == f"file://{tmp_path}/root"


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_a_file_is_not_a_root(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OpenError, match="it is a file"):
        open_backend(f"{prefix}{tmp_path}/file")
    with pytest.raises(OpenError, match="Not a directory"):
        open_backend(f"{prefix}{tmp_path}/file/below")


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    backend = open_backend(tmp_path / "root")
    backend.put("inside/name", b"value")
    (tmp_path / "root" / "folder").symlink_to(outside)
    (tmp_path / "root" / "file").symlink_to(outside / "secret")
    (tmp_path / "root" / "inside" / "link").symlink_to(tmp_path / "root" / "inside" / "name")
    calls: list[Callable[[], object]] = [
        lambda: backend.get("file"),
        lambda: backend.get("folder/secret"),
        lambda: backend.get_range("folder/secret", 0, 1),
        lambda: backend.size("folder/secret"),
        lambda: backend.put("folder/new", b""),
        lambda: backend.put("file", b""),
        lambda: backend.create("folder/new", b""),
        lambda: backend.delete("folder/secret"),
        lambda: backend.list_names("folder"),
        lambda: list(backend.list_keys("folder")),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="outside"):
            call()
    assert _files(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert backend.get("inside/link") == b"value"
    assert backend.list_names("") == ["inside"]
    assert list(backend.list_keys("")) == [("inside/name", 5)]


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    backend = open_backend(tmp_path / "root")
    backend.create("folder/name", b"value")
    assert backend.get("folder/name") == b"value"
    backend.delete("folder/name")
    assert _files(tmp_path / "real") == []


def test_a_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    backend = open_backend(tmp_path)
    with pytest.raises(StorageError, match="not a regular file"):
        backend.get("pipe")
    assert backend.list_names("") == []


def test_temporary_files_are_invisible_and_old_ones_are_collected(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    for folder in ("old", "young"):
        backend.put(f"{folder}/name", b"")
        (tmp_path / folder / ".tmp-crashed").write_bytes(b"half")
    os.utime(tmp_path / "old/.tmp-crashed", (0, 0))
    assert backend.list_names("old") == ["name"]
    assert sorted(backend.list_keys("")) == [("old/name", 0), ("young/name", 0)]
    for folder in ("old", "young"):
        backend.delete(f"{folder}/name")
    assert _files(tmp_path) == ["young", "young/.tmp-crashed"]


def test_writers_survive_deleters_of_their_folder(tmp_path: Path) -> None:
    backends = [open_backend(tmp_path) for _ in range(4)]
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        gate.wait()
        for _ in range(50):
            backends[number].put(f"a/b/{number}", b"value")
            assert backends[number].get(f"a/b/{number}") == b"value"
            backends[number].delete(f"a/b/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert _files(tmp_path) == []


def test_an_object_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    backend.put("name", b"value")
    backend.put("folder/name", b"value")
    for write in (backend.put, backend.create):
        with pytest.raises(StorageError):
            write("name/below", b"")
    with pytest.raises(StorageError):
        backend.put("folder", b"")
    assert _files(tmp_path) == ["folder", "folder/name", "name"]


def test_it_can_be_pickled(tmp_path: Path) -> None:
    backend = open_backend(tmp_path)
    backend.put("name", b"value")
    assert pickle.loads(pickle.dumps(backend)).get("name") == b"value"  # noqa: S301 - our own bytes
