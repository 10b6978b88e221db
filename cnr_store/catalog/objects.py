"""Objects of a store by their keys: whether they are there, which ids are listed, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.format.validate import Digests, proven

_MAX_LISTINGS = 50


def list_ids(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids listed under a prefix of the store."""
    return frozenset(filter(layout.VersionId.parse, backend.list_names(prefix)))


def list_marked(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids that have an object under a prefix. An empty folder, left on a disk by a kill, is none."""
    listed = list_ids(backend, prefix)
    if not listed:
        return listed
    return listed.intersection(key.split("/")[1] for key, _ in backend.list_keys(prefix))


def list_from_newest(
    listed: Callable[[], list[str]], is_committed: Callable[[str], bool], url: str
) -> list[str]:
    """The ids of a listing from the newest committed version on.

    A version is removed once a newer one is committed. So one that is removed between its listing and its read tells of
    a newer one, which may be missing in the listing. Where ids without a record are listed before the newest version,
    they are read once more, the smallest first. If still none has a record, and no greater id has come, that version
    was the newest when the first of them was read.

    Parameters
    ----------
    listed
        Lists all ids, newest first.
    is_committed
        Whether there is a record.
    url
        Of the store, for the message.

    Raises
    ------
    VersionNotFoundError
        Versions come and go faster than they can be read.
    """
    ids = listed()
    for _ in range(_MAX_LISTINGS):
        number = next((number for number, version in enumerate(ids) if is_committed(version)), len(ids))
        if number == 0 or not ids:
            return ids
        came = any(map(is_committed, reversed(ids[:number])))
        before, ids = ids, listed()
        if not came and ids[:1] == before[:1]:
            return before[number:]
    raise VersionNotFoundError(
        f"the versions of {url} are removed faster than they can be read; try again, or pin the one to be read"
    )


def has_object(backend: Backend, key: str) -> bool:
    """Whether there is an object of this key."""
    try:
        backend.size(key)
    except ObjectNotFoundError:
        return False
    return True


def read_object(backend: Backend, key: str, what: str) -> bytes:
    """A whole object that a committed version needs.

    Raises
    ------
    CorruptionError
        It is lost. A storage that does not answer raises its own error, since it may answer later.
    """
    try:
        return backend.get(key)
    except ObjectNotFoundError as error:
        raise CorruptionError(f"{what}: {key} is lost from {backend.url}") from error


def prove_parts(record: Record, state: Any) -> None:
    """Prove that a state names the parts of ranks, by their digests, if and only if its record says that it has some.

    Raises
    ------
    CorruptionError
    """
    what, has_parts = f"state of version {record.id}", layout.STATE_PARTS in record.requires
    if (isinstance(state, dict) and "ranks" in state) != has_parts:
        raise CorruptionError(
            f"{what}: it has {'no ' if has_parts else ''}parts of ranks, and the record "
            f"{'requires' if has_parts else 'does not require'} {layout.STATE_PARTS}; the object was altered"
        )
    if has_parts:
        try:
            proven(state["ranks"], Digests, "ranks")
        except ValueError as error:
            raise CorruptionError(f"{what}: {error}") from error
