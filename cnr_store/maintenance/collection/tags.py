"""Tags: names for versions, which retention keeps as it keeps pinned ones."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from cnr_backends import Backend, BackendError, ObjectNotFoundError, StorageError, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version, open_record, tell_of_no_store
from cnr_store.catalog.tags import encode_tag, read_tags
from cnr_store.errors import OptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.maintenance.collection.pins import check_stays, put_pin


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
    catalog, record = open_record(url, version, **storage_options)
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
    """Remove the pin of a version that is tagged by now.

    Raises
    ------
    cnr_backends.StorageError
    """
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
    """
    _check_name(name)
    open_backend(url, **storage_options).delete(layout.tag_key(name))


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
