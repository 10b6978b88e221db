"""Objects of a store by their keys: whether they are there, which ids are listed, and what they hold."""

from __future__ import annotations

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError
from cnr_store.format import layout


def list_ids(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids listed under a prefix of the store."""
    return frozenset(filter(layout.VersionId.parse, backend.list_names(prefix)))


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
