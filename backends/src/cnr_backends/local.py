"""A backend in a folder of a local or mounted filesystem."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cnr_backends.backend import Backend
from cnr_backends.errors import OpenError, StorageError
from cnr_backends.keys import TEMPORARY_PREFIX, is_name
from cnr_backends.pieces import Pieces

_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_TEMPORARY_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
_ABANDONED_SECONDS = 24 * 3600
_WRITE_ATTEMPTS = 10


class LocalBackend(Backend):
    """Stores objects as files below a folder.

    A file is written under a temporary name in its folder, synced, and renamed (`put`) or linked (`create`) to its
    name. Then its folder is synced, and so is every new folder. The first write makes the root. Symbolic links are not
    objects: listings leave them out, and a link that leads outside the root is neither read nor written. A link that
    is made between this check and the access is not caught: keep attackers from writing to the folder.

    `create` needs hard links, which a few network and FAT filesystems lack.

    Parameters
    ----------
    root
        The folder. It is made absolute at once; a leading "~" is the home folder.

    Raises
    ------
    OpenError
        The root is not a folder, or can't be looked up.
    """

    atomic_create = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(os.fspath(root))))  # noqa: PTH100, PTH111 - keeps links
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
        self._synced: set[Path] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[LocalBackend], tuple[str]]:
        return type(self), (str(self.root),)

    def _put(self, key: str, pieces: Pieces) -> None:
        self._write(key, pieces, replace=True)

    def _create(self, key: str, data: bytes) -> bool:
        if self._path(key).exists():
            return False  # this spares the write; the link below decides
        return self._write(key, [memoryview(data)], replace=False)

    def _get(self, key: str) -> bytes:
        with self._opened(key) as (file, size):
            return _read(file, 0, size)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        with self._opened(key) as (file, size):
            return _read(file, start, min(length, max(size - start, 0)))

    def _get_suffix(self, key: str, length: int) -> bytes:
        with self._opened(key) as (file, size):
            return _read(file, max(size - length, 0), min(length, size))

    def _size(self, key: str) -> int:
        with self._opened(key) as (_, size):
            return size

    def _list_names(self, prefix: str) -> list[str]:
        return [entry.name for entry in _entries(self._path(prefix))]

    def _list_keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for entry in _entries(self._path(folder)):
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
            _sync_folder(path.parent)
            self._remove_empty(path.parent)

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
            yield file, status.st_size
        finally:
            os.close(file)

    def _write(self, key: str, pieces: Pieces, *, replace: bool) -> bool:
        """Store a synced file. Return False if one is there and must not be replaced."""
        for attempt in range(_WRITE_ATTEMPTS):
            path = self._path(key)
            try:
                self._make_folder(path.parent)
                return _write_file(path, pieces, replace=replace)
            except FileNotFoundError:
                # A concurrent delete removed the empty folder.
                with self._lock:
                    self._synced.clear()
                if attempt == _WRITE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: Path) -> None:
        """Make `folder` and its parents, and make them durable."""
        if folder in self._synced:
            return
        made = False
        if not folder.is_dir():
            self._make_folder(folder.parent)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            made = True
        # Another process may have made the folder a moment ago, and not have synced it yet.
        if made or folder.is_relative_to(os.path.realpath(self.root)):
            _sync_folder(folder.parent)
            with self._lock:
                self._synced.add(folder)

    def _remove_empty(self, folder: Path) -> None:
        """Remove `folder` and its parents below the root as far as they are empty."""
        root = Path(os.path.realpath(self.root))
        while folder != root:
            _remove_abandoned(folder)
            try:
                folder.rmdir()
            except OSError:  # not empty, in use or gone: no harm
                return
            with self._lock:
                self._synced.discard(folder)
            folder = folder.parent


def _write_file(path: Path, pieces: Pieces, *, replace: bool) -> bool:
    temporary = path.with_name(TEMPORARY_PREFIX + secrets.token_hex(8))
    try:
        with os.fdopen(os.open(temporary, _TEMPORARY_FLAGS, 0o666), "wb", buffering=0) as file:
            for piece in pieces:
                _write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        elif not _link(temporary, path):
            return False
        with contextlib.suppress(FileNotFoundError):  # the file and its folder were deleted at once
            _sync_folder(path.parent)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _write_all(file: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(file, piece) :]


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name. Return False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On NFS an answer can get lost: the repeated request then finds the link that the first one made.
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise OSError(
                error.errno,
                "exclusive create needs hard links, which this filesystem lacks; use another one",
            ) from error
        raise
    return True


def _read(file: int, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, or fewer where the file ends."""
    parts = []
    while length:
        part = os.pread(file, length, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder without temporary ones; nothing if there is no such folder."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if is_name(entry.name) and (
                entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            ):
                yield entry


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of crashed writers, if the folder has nothing else."""
    try:
        with os.scandir(folder) as entries:
            abandoned = []
            for entry in entries:
                old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS
                if not (old and entry.name.startswith(TEMPORARY_PREFIX)):
                    return
                abandoned.append(entry.path)
        for path in abandoned:
            os.unlink(path)  # noqa: PTH108 - scandir gives a str
    except FileNotFoundError:  # another process removed them
        return


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
