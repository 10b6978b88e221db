"""Writes files and folders that appear only when they are complete."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec
from zarr.abc.store import Store

from cnr_backends import (
    Backend,
    BackendError,
    KeyNameError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    open_backend,
)
from cnr_backends.urls import missing_package
from cnr_store.errors import CheckpointError, OptionError, option
from cnr_store.format import layout

Target = str | os.PathLike[str] | Store
_FILE = "file://"
_LEVELS = 6
IsEarlier = Callable[[Backend, Collection[str]], bool]
"""Whether objects at a place, by their keys, are an earlier export and nothing else."""


@contextmanager
def new_file(target: Target, overwrite: bool, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """A file to write. It appears at `target` when the block ends without an error; a pipe or a device is
    written to.
    """
    if isinstance(target, Store):
        raise OptionError("a Zarr store can't hold a file: give a path or a URL")
    path = _local_path(target, options)
    with _storage_errors(target):
        if path is None:
            with _remote_file(os.fspath(target), overwrite, options) as file:
                yield file
            return
        path = path.resolve()  # of a link, the file
        if not overwrite or path.is_dir():
            _refuse(path, path.exists(), overwrite)
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        temporary = _beside(path)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                _rename_to_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(
    target: Target,
    overwrite: bool,
    options: Mapping[str, Any],
    is_earlier: IsEarlier,
    ending: str | None = None,
) -> Iterator[str | Store]:
    """A folder to write. On this machine it appears at `target` when the block ends without an error.

    Elsewhere it is the target itself. Files there whose names have this `ending` are removed first.
    """
    path = _local_path(target, options)
    with _storage_errors(target):
        if path is None:
            if ending is not None and not isinstance(target, Store):
                _remove_files(os.fspath(target), ending, overwrite, options, is_earlier)
            elif overwrite:
                _check_elsewhere(target, options, is_earlier)
            yield target if isinstance(target, Store) else os.fspath(target)
            return
        path = path.resolve()
        is_other = path.exists() and not path.is_dir()
        if is_other or not overwrite:
            _refuse(path, is_other or (path.is_dir() and any(path.iterdir())), overwrite)
        _check_folder(path, target, is_earlier)
        temporary, old = _beside(path), _beside(path)
        try:
            temporary.mkdir()
            yield str(temporary)
            known = is_earlier if overwrite else lambda *_: False
            _replace(path, temporary, old, lambda: _check_folder(old, target, known))
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace(path: Path, temporary: Path, old: Path, check: Callable[[], None]) -> None:
    """Give a folder its name. What has it now is moved away first, and comes back if the `check` of it fails."""
    if path.exists():
        path.rename(old)
    try:
        check()
        temporary.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise


def check_apart(target: Target, store: str, overwrite: bool, options: Mapping[str, Any]) -> None:
    """Refuse a target that is a store, or lies in the store that is exported, or holds it.

    What can't be opened or listed is left to whoever writes there, who says what is wrong with it.

    `store`: the URL of the store that is exported, as its backend tells it.
    `overwrite`: whether everything at the target is to be replaced. Then no other store may lie there either.
    """
    backend: Backend | None = None
    try:
        backend = open_backend(target, **options)
        there = _place(backend.url)
    except (BackendError, OptionError):
        path = _local_path(target, options)
        if path is None:
            return
        there = _place(f"{_FILE}{path}")  # a file, which may lie in a store
    here = _place(store)
    if f"{there}/".startswith(f"{here}/") or f"{here}/".startswith(f"{there}/"):
        raise OptionError(f"{target} would replace the store {store}, or a part of it: choose another target")
    if backend is not None and (_find_store(backend) if overwrite else _is_store(backend, "")):
        raise OptionError(f"{target} holds a store, with all its versions: choose another target")
    if there.startswith(_FILE) or not isinstance(target, Store):
        for place in _above(there):
            with suppress(BackendError):
                if _is_store(open_backend(place, **options), ""):
                    raise OptionError(f"{target} lies in the store {place}: choose another target")


def _above(url: str) -> Iterator[str]:
    """The places that a place lies in, from the nearest one on, as many as a store has levels."""
    scheme, separator, path = url.rstrip("/").partition("://")
    for _ in range(_LEVELS):
        path = path.rpartition("/")[0]
        if path.strip("/"):
            yield f"{scheme}{separator}{path}"


def _find_store(backend: Backend) -> bool:
    """Whether a store lies at a place, or in any folder of it, or a store's versions do."""
    versions = f"/{layout.VERSIONS}/"
    folders = {""}
    with suppress(BackendError):
        keys = [key for key, _ in backend.list_keys("")]
        folders.update(key.partition("/")[0] for key in keys if "/" in key)
        folders.update(f"/{key}".partition(versions)[0] for key in keys if versions in f"/{key}")
    return any(_is_store(backend, folder) for folder in folders)


def _check_folder(folder: Path, target: Target, is_earlier: IsEarlier) -> None:
    """Refuse a folder of this machine that has other files than those of an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise _other_things(target)
    found, is_plain = list[Path](), True
    for place, folders, files in os.walk(folder, onerror=_raise):
        is_plain = is_plain and not any(Path(place, name).is_symlink() for name in (*folders, *files))
        found += (Path(place, name) for name in files)
    keys = [path.relative_to(folder).as_posix() for path in found]
    if not is_plain or (found and not is_earlier(open_backend(folder), keys)):
        raise _other_things(target)


def _raise(error: OSError) -> None:
    """What can't be listed may hold anything."""
    raise error


def _check_elsewhere(target: Target, options: Mapping[str, Any], is_earlier: IsEarlier) -> None:
    backend = open_backend(target, **options)
    if backend.url.startswith(_FILE):  # a backend leaves out what no key can name
        _check_folder(Path(backend.url.removeprefix(_FILE)), target, is_earlier)
        return
    keys = [key for key, _ in backend.list_keys("")]
    if keys and not is_earlier(backend, keys):
        raise _other_things(target)


def _other_things(target: object) -> OptionError:
    return OptionError(
        f"{target} holds other things than an earlier export of this format, and they would be removed: choose another "
        "target, or empty this folder"
    )


def _is_store(backend: Backend, folder: str) -> bool:
    try:
        return b'"cnr"' in backend.get(f"{folder}/{layout.NODE}".lstrip("/"))
    except (ObjectNotFoundError, KeyNameError):
        return False


def _place(url: str) -> str:
    if url.startswith(_FILE):
        url = _FILE + os.path.realpath(url.removeprefix(_FILE))
    return url.rstrip("/")


def _filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise OptionError(f"can't write to {url}: {missing_package(url, error)}") from error
    filesystem.invalidate_cache()  # or it might not list what others have put
    return filesystem, path


def _remove_files(
    url: str, ending: str, overwrite: bool, options: Mapping[str, Any], is_earlier: IsEarlier
) -> None:
    filesystem, path = _filesystem(url, options)
    _refuse(url, filesystem.isfile(path), overwrite)
    try:
        found = [name for name in filesystem.ls(path, detail=False) if name.endswith(ending)]
    except FileNotFoundError:
        return
    _refuse(url, bool(found) and not overwrite)
    if found and not is_earlier(open_backend(url, **options), [name.rpartition("/")[2] for name in found]):
        raise _other_things(url)
    for name in found:
        filesystem.rm_file(name)  # rm would take a name for a pattern


@contextmanager
def _remote_file(url: str, overwrite: bool, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    filesystem, path = _filesystem(url, options)
    _refuse(url, not overwrite and filesystem.exists(path))
    # A file written in a transaction appears when the transaction ends; an error discards it.
    with filesystem.transaction, filesystem.open(path, "wb") as file:
        yield file


def _local_path(target: Target, options: Mapping[str, Any]) -> Path | None:
    """The path of a target on this machine, or None if it lies elsewhere."""
    path = None
    if not isinstance(target, Store):
        if not target or not isinstance(target, str | os.PathLike):
            raise OptionError(f"can't write to {target!r}: give a path or a URL")
        text = os.fspath(target).removeprefix("file://").removeprefix("local://")
        if slip := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)", text):
            raise OptionError(
                f"can't write to {text!r}: after {slip[1]}: there must be two slashes (or './' before a path)"
            )
        try:
            path = None if "://" in text else Path(text).expanduser().absolute()
        except FileNotFoundError as error:
            raise OptionError(
                f"can't write to {text!r}: the working folder, which it is relative to, was deleted; give an "
                "absolute path"
            ) from error
    if options and (path is not None or isinstance(target, Store)):
        raise OptionError(f"{target} takes no target_options: leave out {sorted(options)}")
    return path


def _refuse(target: str | Path, exists: bool, overwrite: bool = False) -> None:
    if exists:
        how = "a file replaces only a file, and a folder only a folder"
        raise OptionError(
            f"{target} is there already: choose another target"
            + (f"; {how}" if overwrite else f", or replace it with {option('overwrite')}; {how}")
        )


def _beside(path: Path) -> Path:
    """A name for a file or folder that is not yet complete, on the same filesystem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Give a complete file its name, unless another file has got it meanwhile."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        _refuse(path, exists=True)
    except OSError:  # some filesystems have no hard links
        _refuse(path, path.exists())
        temporary.rename(path)


@contextmanager
def _storage_errors(target: Target) -> Iterator[None]:
    """Turns errors of the target's filesystem into a StorageError that names the target."""
    try:
        yield
    except (BackendError, CheckpointError):
        raise
    except Exception as error:  # filesystems raise errors of the libraries that they use
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        kind = StorageFullError if is_full else StorageError
        advice = (
            "free some space, or choose another target" if is_full else "check the place and its permissions"
        )
        raise kind(
            f"can't write {target}: {type(error).__name__}: {error}; {advice}", url=str(target)
        ) from error
