"""A backend in a folder of a local or mounted filesystem."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

from cnr_backends.backend import Backend
from cnr_backends.errors import BackendError, OpenError, StorageError
from cnr_backends.files import (
    FolderWatch,
    LackingFilesystemError,
    LostFolderError,
    entries,
    read,
    remove_abandoned,
    run_to_end,
    sync_folder,
    write_file,
)
from cnr_backends.keys import TEMPORARY_PREFIX, check_key, check_prefix
from cnr_backends.pieces import Pieces

_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_WRITE_ATTEMPTS = 10

RESERVE = "reserve"
"""The key of the file that holds room back."""
RESERVE_BYTES = 256 << 10
RESERVE_STEP_BYTES = 32 << 10


class LocalBackend(Backend):
    """Stores objects as files below a folder.

    A file is written under a temporary name in its folder, synced, and renamed (`put`) or linked (`create`) to its
    name. Then its folder is synced, and so is every new folder. The first write makes the root. Symbolic links are not
    objects: listings leave them out, and a link that leads outside the root is neither read nor written. A link that
    is made between this check and the access is not caught: keep attackers from writing to the folder.

    `create` needs hard links, or else renames that replace nothing, as Linux has them on most filesystems.

    The file ``reserve`` holds `RESERVE_BYTES` back for small objects on a disk that is full. They take it in parts of
    `RESERVE_STEP_BYTES`. It is made only where four times as much is free.

    `root`: the folder. It is made absolute at once; a leading "~" is the home folder.
    """

    atomic_create = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = _absolute(root)
        self.url = f"file://{self.root}"
        try:
            mode = self.root.stat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFDIR
        except (OSError, ValueError) as error:
            raise OpenError(
                f"can't open {self.url}: {error}; give a folder, or a path where one can be made"
            ) from error
        if not stat.S_ISDIR(mode):
            raise OpenError(
                f"can't open {self.url}: it is a file; give a folder, or a path where one can be made"
            )
        self._address = os.fspath(self.root)
        self._inside = os.path.realpath(self._address).rstrip(os.sep) + os.sep
        self._watch = FolderWatch(self._address)
        self._synced: set[Path] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[LocalBackend], tuple[str]]:
        return type(self), (str(self.root),)

    def _put(self, key: str, pieces: Pieces) -> None:
        self._write(key, pieces, replace=True)

    def _begin_put(self, key: str, pieces: Pieces) -> Generator[None, None, None]:
        yield from self._writing(key, pieces, replace=True)

    def _create(self, key: str, data: bytes) -> bool:
        if self._path(key).exists():
            return False  # this spares the write; the link below decides
        return self._write(key, [memoryview(data)], replace=False)

    def _get(self, key: str) -> bytes:
        with self._opened(key) as (file, size):
            return read(file, 0, size)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        with self._opened(key) as (file, size):
            return read(file, start, min(length, max(size - start, 0)))

    def _get_suffix(self, key: str, length: int) -> bytes:
        with self._opened(key) as (file, size):
            return read(file, max(size - length, 0), min(length, size))

    def _size(self, key: str) -> int:
        with self._opened(key) as (_, size):
            return size

    def _list_names(self, prefix: str) -> list[str]:
        return [entry.name for entry in entries(self._path(prefix))]

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for entry in entries(self._path(folder)):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(key)
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    yield key, entry.stat(follow_symlinks=False).st_size

    def _delete(self, key: str) -> None:
        path = self._path(key).parent / key.rpartition("/")[2]
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError):
            if path.is_dir():  # a folder is not an object; some systems raise EPERM for one
                return
            raise
        with contextlib.suppress(FileNotFoundError):  # a concurrent delete removed the folder
            sync_folder(path.parent)
            self._remove_empty(path.parent)

    def hold_reserve(self) -> None:
        with contextlib.suppress(OSError, BackendError):
            if self._reserve_nbytes() < RESERVE_BYTES <= shutil.disk_usage(self.root).free // 4:
                # Random bytes: a filesystem may compress, or store equal blocks once.
                self._write(RESERVE, [memoryview(os.urandom(RESERVE_BYTES))], replace=True)

    def shrink_reserve(self) -> bool:
        nbytes = self._reserve_nbytes()
        try:
            if nbytes > RESERVE_STEP_BYTES:
                os.truncate(self.root / RESERVE, nbytes - RESERVE_STEP_BYTES)
            elif nbytes:
                (self.root / RESERVE).unlink()
            sync_folder(self.root)
        except FileNotFoundError:  # another process removed it, or the folder
            return nbytes > 0
        except OSError:
            return False
        return nbytes > 0

    def _reserve_nbytes(self) -> int:
        try:
            return (self.root / RESERVE).lstat().st_size
        except FileNotFoundError:
            return 0

    def prepare(self, key: str) -> None:
        with contextlib.suppress(OSError, BackendError):
            self._sync_parents(self._make_folder(self._path(check_key(key)).parent))

    def confirm(self, key: str) -> None:
        # The file was synced before it got its name, and so were the folders above.
        with self._guard("confirm", check_key(key)):
            sync_folder(self._path(key).parent)

    def sweep(self, prefix: str) -> None:
        folder = self._path(check_prefix(prefix))
        with self._guard("sweep", prefix):
            for parent, _, names in os.walk(folder, topdown=False):
                for name in names:
                    if name.startswith(TEMPORARY_PREFIX):
                        Path(parent, name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty
                    Path(parent).rmdir()
            self._remove_empty(folder)

    def _advice(self, error: Exception) -> str:
        if isinstance(error, LackingFilesystemError):
            return "use a folder on another filesystem, such as ext4, xfs or NFS"
        if isinstance(error, LostFolderError):
            return "see that it is still mounted here, and open it anew if it was removed on purpose"
        return super()._advice(error)

    def _path(self, key: str) -> Path:
        """Return the path of `key`, or raise StorageError if symbolic links lead outside the root."""
        path = os.path.realpath(os.path.join(self._address, key))  # noqa: PTH118 - Path takes twice as long
        if not key or path.startswith(self._inside):
            return Path(path)
        root = os.path.realpath(self._address)  # the root may have been made or moved since
        self._inside = root.rstrip(os.sep) + os.sep
        if not path.startswith(self._inside):
            raise StorageError(
                f"a symbolic link takes {key!r} outside of {self.url}, to {path}; remove the link, or open the folder "
                "that it leads to",
                key=key,
                url=self.url,
            )
        return Path(path)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Yield a file descriptor and the file's size in bytes."""
        file = os.open(self._path(key), _READ_FLAGS)
        try:
            status = os.fstat(file)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            self._watch.note(key)
            yield file, status.st_size
        finally:
            os.close(file)

    def _write(self, key: str, pieces: Pieces, *, replace: bool) -> bool:
        """Store a synced file. Return False if one is there and must not be replaced."""
        return run_to_end(self._writing(key, pieces, replace=replace))

    def _writing(self, key: str, pieces: Pieces, *, replace: bool) -> Generator[None, None, bool]:
        """`_write`, which waits for the disk after its first step only."""
        for attempt in range(_WRITE_ATTEMPTS):
            path = self._path(key)
            self._watch.check()
            try:
                made = self._make_folder(path.parent)
                with contextlib.closing(write_file(path, pieces, replace=replace)) as steps:
                    next(steps)
                    yield
                    self._sync_parents(made)
                    is_new = run_to_end(steps)
                self._watch.check()
                self._watch.note(key)
                return is_new
            except FileNotFoundError:
                # A concurrent delete removed the empty folder.
                with self._lock:
                    self._synced.clear()
                if attempt == _WRITE_ATTEMPTS - 1:
                    raise
            except OSError:
                self._remove_empty(path.parent)  # a folder takes room, too
                raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: Path) -> list[Path]:
        """Make `folder` and its parents. Return those that may not be durable yet, the folder first."""
        root = Path(self._inside)
        unsynced: list[Path] = []
        while folder not in self._synced:
            # Another process may have made a folder a moment ago, and not have synced it yet; not those above the root.
            if not folder.is_relative_to(root) and folder.is_dir():
                break
            unsynced.append(folder)
            folder = folder.parent
        for each in reversed(unsynced):
            with contextlib.suppress(FileExistsError):
                each.mkdir()
        return unsynced

    def _sync_parents(self, folders: list[Path]) -> None:
        """Make folders durable once all are made: a filesystem's journal has them together at the first sync."""
        for each in folders:
            sync_folder(each.parent)
            with self._lock:
                self._synced.add(each)

    def _remove_empty(self, folder: Path) -> None:
        """Remove `folder` and its parents below the root as far as they are empty."""
        root = Path(os.path.realpath(self.root))
        while folder != root:
            remove_abandoned(folder)
            try:
                folder.rmdir()
            except FileNotFoundError:  # its parents may be there
                pass
            except OSError:  # not empty or in use: no harm
                return
            with self._lock:
                self._synced.discard(folder)
            folder = folder.parent


def _absolute(root: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.abspath(os.path.expanduser(os.fspath(root))))  # noqa: PTH100, PTH111 - keeps links
    except FileNotFoundError as error:
        raise OpenError(
            f"can't open {os.fspath(root)!r}: the working folder, which it is relative to, was deleted; give an "
            "absolute path, or change to a folder that exists"
        ) from error
