"""Files that are written durably and appear whole or not at all, and whether their folder is still the same."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cnr_backends.keys import TEMPORARY_PREFIX, is_name
from cnr_backends.pieces import Pieces

Result = TypeVar("Result")

_TEMPORARY_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
_PIECES_A_WRITE = 1024  # what Linux and macOS take
_ABANDONED_SECONDS = 24 * 3600
_MISSING = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.EXDEV, *_MISSING})
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


class LackingFilesystemError(OSError):
    """The filesystem can't do what a durable or an exclusive write needs."""


class LostFolderError(OSError):
    """A folder is on another filesystem, without what was in it."""


class FolderWatch:
    """Tells a mount that was lost from one that was made again.

    `folder`: it need not exist yet.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known = ""
        self._device = self._look()

    def note(self, key: str) -> None:
        """Keep in mind that there is a file with this path in the folder."""
        self._known = key

    def check(self) -> None:
        """Look whether the folder, or the place where it would be made, is on the filesystem on which it was.

        What was mounted anew may have another number, but it has the files that were there. A mount of the same
        filesystem elsewhere is not told from it.
        """
        device, known = self._look(), self._known
        if device == self._device:
            return
        if not known or not os.path.exists(os.path.join(self._folder, known)):  # noqa: PTH110, PTH118 - Path takes twice as long
            lost = f", and {known!r} is not there" if known else ""
            raise LostFolderError(errno.ESTALE, f"the folder is on another filesystem than before{lost}")
        self._device = device

    def _look(self) -> int:
        place = self._folder
        while True:
            try:
                return os.stat(place).st_dev  # noqa: PTH116 - as above
            except FileNotFoundError:
                place, below = os.path.dirname(place), place  # noqa: PTH120 - as above
                if place == below:  # a drive that is not there
                    return -1


def run_to_end(steps: Generator[None, None, Result]) -> Result:
    """Exhaust a generator, and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def write_file(path: Path, pieces: Pieces, *, replace: bool) -> Generator[None, None, bool]:
    """Write a file; after the one step wait for the disk, and give the file its name. Closed there, leave nothing.

    The generator returns False if the name is taken and must not be replaced.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + secrets.token_hex(8))
    is_there = True
    try:
        with os.fdopen(os.open(temporary, _TEMPORARY_FLAGS, 0o666), "wb", buffering=0) as file:
            _write_all(file.fileno(), pieces)
            yield
            sync(file.fileno(), "files")
        if replace:
            temporary.replace(path)
            is_there = False
        elif not _link(temporary, path):
            return False
        with contextlib.suppress(FileNotFoundError):  # the file and its folder were deleted at once
            sync_folder(path.parent)
        return True
    finally:
        if is_there:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def _write_all(file: int, pieces: Pieces) -> None:
    """Write many pieces a call: a thread that trains waits for the interpreter's lock at each."""
    left = deque(pieces)
    while left:
        written = os.writev(file, list(islice(left, _PIECES_A_WRITE)))
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name. Return False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On NFS an answer can get lost: the repeated request then finds the link that the first one made.
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno in _NO_LINKS:
            return _rename_new(temporary, path)
        raise
    return True


def _rename_new(temporary: Path, path: Path) -> bool:
    """Rename a file to a name that must be free, where there are no hard links. Return False if it is taken."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of Linux
    names = _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path)
    if rename is not None and rename(*names, _RENAME_NOREPLACE) == 0:
        return True
    code = errno.ENOSYS if rename is None else ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code in _NO_LINKS:
        raise LackingFilesystemError(
            code,
            "exclusive create needs hard links or renames that replace nothing; this filesystem has neither",
        )
    raise OSError(code, os.strerror(code))


def read(file: int, start: int, length: int) -> bytes:
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


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
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


def remove_abandoned(folder: Path) -> None:
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
    except (FileNotFoundError, NotADirectoryError):  # another process removed them, or it is a file
        return


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        sync(file, "folders")
    finally:
        os.close(file)


def sync(file: int, what: str) -> None:
    """Make what is written to an open file or folder durable."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno in _MISSING:
            raise LackingFilesystemError(
                error.errno, f"this filesystem can't sync {what}, so what is written could be lost in a crash"
            ) from error
        raise
