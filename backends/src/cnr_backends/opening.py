"""Opens a backend from a URL, a path or a Zarr store."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any
from zipfile import BadZipFile

from zarr.abc.store import Store
from zarr.storage import LocalStore, ZipStore

from cnr_backends.backend import Backend
from cnr_backends.clouds import AbfsBackend, GcsBackend, S3Backend
from cnr_backends.errors import OpenError
from cnr_backends.local import LocalBackend
from cnr_backends.remote import FsspecBackend, HttpBackend, MemoryBackend
from cnr_backends.urls import protocol_of
from cnr_backends.zarr_backend import ZarrBackend

_KINDS: dict[str, type[FsspecBackend]] = {
    "memory": MemoryBackend,
    "http": HttpBackend,
    "https": HttpBackend,
    "s3": S3Backend,
    "s3a": S3Backend,
    "gs": GcsBackend,
    "gcs": GcsBackend,
    "abfs": AbfsBackend,
    "abfss": AbfsBackend,
    "az": AbfsBackend,
}


def open_backend(url: str | os.PathLike[str] | Store | Backend, **storage_options: Any) -> Backend:
    """Open a backend.

    Parameters
    ----------
    url
        A path, a URL, a Zarr store or a backend. A path or ``file://`` is a local folder, which the first write
        makes. ``memory://``, ``s3://`` and the other protocols of fsspec are listed once, at once. A writable Zarr
        ``LocalStore`` is opened as its folder, because Zarr does not sync. A ``ZipStore`` that is to be written must be
        open. A backend is returned as it is.
    **storage_options
        Options of fsspec filesystems: credentials, ``endpoint_url`` and so on. A local folder accepts and ignores
        ``auto_mkdir``. They may also be one mapping, ``storage_options={...}``, as fsspec's own callers pass it.

    Raises
    ------
    OpenError
        The backend can't be opened. The message says what is wrong and what to do.
    """
    storage_options = _joined(storage_options)
    if isinstance(url, Backend | Store):
        _refuse_options(url, storage_options)
        return url if isinstance(url, Backend) else _from_store(url)
    if isinstance(url, os.PathLike):
        url = os.fspath(url)
    if not isinstance(url, str):
        raise OpenError(f"can't open {url!r}: give a path, a URL, a Zarr store or a backend")
    protocol = protocol_of(url)
    if protocol in ("", "file", "local", "memory"):
        _refuse_options(url, {name: value for name, value in storage_options.items() if name != "auto_mkdir"})
    if protocol in ("", "file", "local"):
        return LocalBackend(url[len(protocol) + 3 :] if protocol else url)
    # Drivers take any name, and ignore those that they don't know.
    _refuse_misspelled(storage_options, 0.8)
    return _KINDS.get(protocol, FsspecBackend)(url, storage_options)


def _from_store(store: Store) -> Backend:
    if type(store) is LocalStore and not store.read_only:
        return LocalBackend(store.root)
    if isinstance(store, ZipStore) and not store._is_open:
        _open_zip(store)
    return ZarrBackend(store)


def _open_zip(store: ZipStore) -> None:
    """Open a Zip store for reading. To open one for writing is the caller's: it could be one that was closed, which a
    second opening would truncate.
    """
    if not store.read_only:
        raise OpenError(
            f"can't open {store}: this ZipStore is not open, or closed; open it with "
            "`await ZipStore.open(path, mode=...)`, or give mode='r' to only read"
        )
    try:
        store._sync_open()
    except (OSError, BadZipFile) as error:
        raise OpenError(f"can't open {store}: {error}; check the path") from error


def _joined(options: dict[str, Any]) -> dict[str, Any]:
    """Join options given one by one with those given as the mapping `storage_options`."""
    mapping = options.get("storage_options")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise OpenError(f"storage_options must map names to values, got {mapping!r}")
    return {name: value for name, value in options.items() if name != "storage_options"} | dict(mapping or {})


def _refuse_options(url: object, options: dict[str, Any]) -> None:
    if options:
        _refuse_misspelled(options, 0.5)
        raise OpenError(
            f"can't open {url}: it takes no storage options, got {sorted(options)}; leave them out, or look for a "
            "misspelled argument"
        )


def _refuse_misspelled(options: Iterable[str], likeness: float) -> None:
    """Refuse options that look like keywords of the function that was called, which passes all others on to here."""
    frame, keywords = inspect.currentframe(), list[str]()
    while frame is not None:  # up to the function that the user called
        if "storage_options" in frame.f_locals:
            keywords += frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        frame = frame.f_back
    for name in sorted(options):
        nearest = difflib.get_close_matches(name.lower(), keywords, 1, likeness)
        if nearest and name not in keywords:
            raise OpenError(f"unknown option {name!r}; did you mean {nearest[0]!r}?")
