"""Files and folders that appear when they are complete, and not at all otherwise."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
from zarr.abc.store import Store

from cnr_backends import BackendError, StorageError
from cnr_store.errors import CheckpointError, OptionError

Target = str | os.PathLike[str] | Store


def local_path(target: Target) -> Path | None:
    """The path that a target means on this machine, or None if it lies elsewhere.

    Raises
    ------
    OptionError
        It means nothing.
    """
    if isinstance(target, Store):
        return None
    if not target or not isinstance(target, str | os.PathLike):
        raise OptionError(f"can't write to {target!r}: give a path or a URL")
    text = os.fspath(target)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    return None if "://" in text else Path(text).expanduser().absolute()


@contextmanager
def new_file(target: Target, overwrite: bool, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """A file to write; it is at `target` once the block has ended without an error.

    Raises
    ------
    OptionError
        Something is there and is not to be overwritten, or `target` is no place for a file.
    StorageError
        It can't be written.
    """
    if isinstance(target, Store):
        raise OptionError("a Zarr store can't hold a file: give a path or a URL")
    path = _place(target, options)
    with _told(target):
        if path is None:
            with _remote_file(os.fspath(target), overwrite, options) as file:
                yield file
            return
        if not overwrite or path.is_dir():
            _refuse(path, path.exists())
        temporary = _beside(path)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                _link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Target, overwrite: bool, options: Mapping[str, Any]) -> Iterator[str | Store]:
    """Where to write what is to be the folder `target`: beside it, until the block has ended without an error.

    Of what is not on this machine the place itself.

    Raises
    ------
    OptionError, StorageError
        As from `new_file`.
    """
    path = _place(target, options)
    with _told(target):
        if path is None:
            yield target if isinstance(target, Store) else os.fspath(target)
            return
        if not overwrite or path.is_file():
            _refuse(path, path.is_file() or (path.is_dir() and any(path.iterdir())))
        temporary, old = _beside(path), _beside(path)
        try:
            yield str(temporary)
            if path.exists():
                path.rename(old)
            try:
                temporary.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _remote_file(url: str, overwrite: bool, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise OptionError(f"can't write to {url}: {error}") from error
    _refuse(url, not overwrite and filesystem.exists(path))
    # What is written in a transaction is there when the transaction ends; an error discards it.
    with filesystem.transaction, filesystem.open(path, "wb") as file:
        yield file


def _place(target: Target, options: Mapping[str, Any]) -> Path | None:
    path = local_path(target)
    if options and (path is not None or isinstance(target, Store)):
        raise OptionError(
            f"{target} takes no target_options, but there are {sorted(options)}; leave them out"
        )
    return path


def _refuse(target: str | Path, there: bool) -> None:
    if there:
        raise OptionError(
            f"{target} is there already: choose another target, or overwrite=True for one of its kind"
        )


def _beside(path: Path) -> Path:
    """A name for what is not yet complete, on the same filesystem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _link(temporary: Path, path: Path) -> None:
    """Give a complete file its name, unless another file got it meanwhile."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        _refuse(path, there=True)
    except OSError:  # some filesystems have no links
        _refuse(path, path.exists())
        temporary.rename(path)


@contextmanager
def _told(target: Target) -> Iterator[None]:
    """Names the target where its filesystem fails."""
    try:
        yield
    except (BackendError, CheckpointError):
        raise
    except Exception as error:  # filesystems raise whatever the libraries beneath them do
        raise StorageError(
            f"can't write {target}: {type(error).__name__}: {error}; check the place and its permissions",
            url=str(target),
        ) from error
