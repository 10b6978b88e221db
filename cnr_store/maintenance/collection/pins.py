"""Pins, and tags, which also name versions: retention must keep these, whatever its rules say."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

from cnr_backends import Backend, BackendError, ObjectNotFoundError, StorageError, open_backend
from cnr_store.catalog import claims
from cnr_store.catalog.catalog import Catalog, Url, Version, open_to_change, tell_of_no_store
from cnr_store.catalog.objects import encode_tag, has_object, list_ids, list_marked, read_tags
from cnr_store.errors import CorruptionError, FormatError, OptionError, VersionNotFoundError, option
from cnr_store.format import layout, validate
from cnr_store.format.record_document import NO_DIGEST, check_digest, with_digest
from cnr_store.format.state import dumps, loads

MAX_REASON = 200
"""Characters."""
_UNREADABLE = "(its reason can't be read)"


def pin(url: Url, version: Version = "latest", *, reason: str | None = None, **storage_options: Any) -> str:
    """Keep a version, and everything that it depends on, until `unpin`. Returns its id.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    reason
        Why, for people: one line of at most 200 characters. `pin_reasons` and ``cnr ls`` show it.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
        The reason is no such line.
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it is being deleted. Nothing is pinned.
    """
    _check_reason(reason)
    catalog, record = open_to_change(url, version, **storage_options)
    put_pin(catalog.backend, record.id, "pin", reason)
    return record.id


def _check_reason(reason: object) -> None:
    is_text = isinstance(reason, str) and reason.isprintable() and 0 < len(reason) <= MAX_REASON
    if reason is not None and not is_text:
        raise OptionError(
            f"{option('reason', reason)}: give one line of 1 to {MAX_REASON} printable characters, or None"
        )


def put_pin(backend: Backend, version: str, what: str, reason: str | None = None) -> str:
    """Make a pin, and return its key.

    `what`: what the caller does to the version, for the message.
    `reason`: why, for people.
    """
    # Each call makes a pin of its own, so that a call that comes too late does not delete another's.
    mine = layout.version_key(version, secrets.token_hex(8), prefix=layout.PINS)
    backend.put(mine, _encode(version, reason))
    try:
        check_stays(backend, version, what)
    except VersionNotFoundError:
        backend.delete(mine)
        raise
    return mine


def check_stays(backend: Backend, version: str, what: str) -> None:
    """Look whether a version stays, once what keeps it was put: retention looks again before it deletes."""
    # Asked of a new catalog, since the caller's remembers the record.
    if version in claims.list_tombstoned(backend) or Catalog(backend).find_record(version) is None:
        raise VersionNotFoundError(
            f"version {version} of {backend.url} is being deleted by retention; {what} another version"
        )


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
    catalog.check_format()
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

    Where there is no store at all, the log says so.

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
        tell_of_no_store(catalog.backend.url)
        return []
    return sorted(
        version for version in list_marked(catalog.backend, layout.PINS) if not _is_void(catalog, version)
    )


def pin_reasons(url: Url, **storage_options: Any) -> dict[str, list[str]]:
    """Why versions are pinned: by id, oldest first, the reason of each `pin` call that gave one.

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
    backend = open_backend(url, **storage_options)
    found = {version: read_reasons(backend, version) for version in pins(backend)}
    return {version: reasons for version, reasons in found.items() if reasons}


def read_reasons(backend: Backend, version: str) -> list[str]:
    """Why a version is pinned. A pin holds whatever its bytes are, so one whose reason is damaged says that."""
    folder, found = layout.version_key(version, prefix=layout.PINS), []
    for key, _ in sorted(backend.list_keys(folder)):
        try:
            reason = _decode(backend.get(key), version)
        except ObjectNotFoundError:
            continue  # it was removed meanwhile
        except (CorruptionError, ValueError, KeyError):  # FormatError is a ValueError
            reason = _UNREADABLE
        if reason is not None:
            found.append(reason)
    return sorted(found)


def _encode(version: str, reason: str | None) -> bytes:
    doc = {"digest": NO_DIGEST, "reason": reason, "version": version, "time": time.time()}
    return with_digest(dumps(doc))


def _decode(data: bytes, version: str) -> str | None:
    """The reason that a pin gives; None if it gives none."""
    doc = validate.proven(loads(data, "it"), dict, "it")
    check_digest(data, doc, "it")
    if doc["version"] != version:
        raise ValueError("it is another version's: objects were swapped")
    reason: str | None = validate.proven(doc["reason"], str | None, "reason")
    return reason


def _is_void(catalog: Catalog, version: str) -> bool:
    """Whether a version was deleted, so that its pin is that of a call that came too late."""
    try:
        return catalog.find_record(version) is None and has_object(
            catalog.backend, layout.record_key(version)
        )
    except (CorruptionError, FormatError):
        return False


def tag(url: Url, name: str, version: Version = "latest", **storage_options: Any) -> str:
    """Name a version, and keep it and everything that it depends on, until `untag`. Returns its id.

    A tag that is there already names this version from then on.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    name
        1 to 100 of ``a-z 0-9 _ . -``: no step, no id, not ``latest``.
    version
        An id, a `VersionInfo`, a step, another tag, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
        The name can't be one of a tag.
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it is being deleted. The tag is as it was.
    cnr_backends.StorageError
        The storage failed. Where it refuses deletes, the version is tagged, and the message says that a pin stays.
    """
    _check_name(name)
    catalog, record = open_to_change(url, version, **storage_options)
    backend = catalog.backend
    # The pin shows that the version stays, so what the tag named before is kept until then. Retention lists pins before
    # tags, so it sees one of the two.
    pin, key = put_pin(backend, record.id, "tag"), layout.tag_key(name)
    try:
        former, own = _get(backend, key), encode_tag(name, record.id)
        backend.put(key, own)
        try:
            check_stays(backend, record.id, "tag")  # somebody else's `unpin` may have removed the pin before
        except VersionNotFoundError:
            if _get(backend, key) == own:
                _put_back(backend, key, former)
            raise
    except BaseException:
        with suppress(BackendError):  # what failed first says more
            backend.delete(pin)
        raise
    _remove_pin(backend, pin, name, record.id)
    return record.id


def _remove_pin(backend: Backend, pin: str, name: str, version: str) -> None:
    """Remove the pin of a version that is tagged by now."""
    try:
        backend.delete(pin)
    except StorageError as error:
        failure = StorageError(
            f"{version} is tagged {name!r}, but a pin that was to keep it meanwhile stays ({error}); the version is "
            "kept until `cnr unpin` with the permission to delete, even if the tag is removed",
            operation="delete",
            key=pin,
            url=backend.url,
        )
        failure.transient = error.transient
        raise failure from error


def _put_back(backend: Backend, key: str, former: bytes | None) -> None:
    if former is None:
        backend.delete(key)
    else:
        backend.put(key, former)


def _get(backend: Backend, key: str) -> bytes | None:
    try:
        return backend.get(key)
    except ObjectNotFoundError:
        return None


def untag(url: Url, name: str, **storage_options: Any) -> None:
    """Remove a tag. One that is not there is no error.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    name
        The tag.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
        The name can't be one of a tag.
    FormatError
        The place holds something else than a store.
    """
    _check_name(name)
    catalog = Catalog(open_backend(url, **storage_options))
    catalog.check_format()
    catalog.backend.delete(layout.tag_key(name))


def tags(url: Url, **storage_options: Any) -> dict[str, str]:
    """The ids of the tagged versions, by tag. Where there is no store at all, the log says so.

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
    CorruptionError
        A tag can't be read.
    """
    catalog = Catalog(open_backend(url, **storage_options))
    if not catalog.check_format():
        tell_of_no_store(catalog.backend.url)
        return {}
    return read_tags(catalog.backend)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not layout.is_tag(name):
        raise OptionError(
            f"{name!r} can't name a version: give 1 to 100 of a-z, 0-9, _, . and -, and neither a step, an id nor "
            "'latest'"
        )
