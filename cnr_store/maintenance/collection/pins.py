"""Pins: versions that retention must keep, whatever its rules say."""

from __future__ import annotations

import secrets
import time
from typing import Any

from cnr_backends import Backend, open_backend
from cnr_store.catalog import claims
from cnr_store.catalog.catalog import Catalog, Url, Version, open_record
from cnr_store.catalog.objects import has_object, list_ids
from cnr_store.errors import CorruptionError, FormatError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.state import dumps


def pin(url: Url, version: Version = "latest", **storage_options: Any) -> str:
    """Keep a version, and everything that it depends on, until `unpin`. Returns its id.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it is being deleted. Nothing is pinned.
    """
    catalog, record = open_record(url, version, **storage_options)
    put_pin(catalog.backend, record.id, "pin")
    return record.id


def put_pin(backend: Backend, version: str, what: str) -> str:
    """Make a pin, and return its key.

    Parameters
    ----------
    what
        What the caller does to the version, for the message.

    Raises
    ------
    VersionNotFoundError
        The version is being deleted. Nothing is pinned.
    """
    # Each call makes a pin of its own, so that a call that comes too late does not delete another's.
    mine = layout.version_key(version, secrets.token_hex(8), prefix=layout.PINS)
    backend.put(mine, dumps({"time": time.time()}))
    # Asked of a new catalog, since the caller's remembers the record.
    if version in claims.list_tombstoned(backend) or Catalog(backend).find_record(version) is None:
        backend.delete(mine)
        raise VersionNotFoundError(
            f"version {version} of {backend.url} is being deleted by retention; {what} another version"
        )
    return mine


def unpin(url: Url, version: Version, **storage_options: Any) -> str:
    """Let retention delete a version again. Returns its id. A version that is not pinned is no error.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
    """
    catalog = Catalog(open_backend(url, **storage_options))
    backend, pinned = catalog.backend, catalog.resolve(version)
    # The pin of a version that is lost can be removed, too.
    if not isinstance(pinned, str) or pinned not in list_ids(backend, layout.PINS):
        pinned = catalog.find(pinned).id
    folder = layout.version_key(pinned, prefix=layout.PINS)
    for key, _ in sorted(backend.list_keys(folder)):
        backend.delete(key)
    backend.sweep(folder)  # one that was killed may have left it empty, and the folder counts as a pin
    return pinned


def pins(url: Url, **storage_options: Any) -> list[str]:
    """Ids of the pinned versions, oldest first; also of those that are lost or damaged.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    FormatError
        The place holds something else than a store.
    """
    catalog = Catalog(open_backend(url, **storage_options))
    if not catalog.check_format():
        return []
    return sorted(
        version for version in list_ids(catalog.backend, layout.PINS) if not _is_void(catalog, version)
    )


def _is_void(catalog: Catalog, version: str) -> bool:
    """Whether a version was deleted, so that its pin is that of a call that came too late."""
    try:
        return catalog.find_record(version) is None and has_object(
            catalog.backend, layout.record_key(version)
        )
    except (CorruptionError, FormatError):
        return False
