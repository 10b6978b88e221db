"""Objects of a store by their keys: whether they are there, which ids are listed, and what they hold."""

from __future__ import annotations

from typing import Any

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.format.validate import Digests, proven


def list_ids(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids listed under a prefix of the store."""
    return frozenset(filter(layout.VersionId.parse, backend.list_names(prefix)))


def list_marked(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids that have an object under a prefix. An empty folder, left on a disk by a kill, is none."""
    listed = list_ids(backend, prefix)
    if not listed:
        return listed
    return listed.intersection(key.split("/")[1] for key, _ in backend.list_keys(prefix))


def has_object(backend: Backend, key: str) -> bool:
    """Whether there is an object of this key."""
    try:
        backend.size(key)
    except ObjectNotFoundError:
        return False
    return True


def read_object(backend: Backend, key: str, what: str) -> bytes:
    """A whole object that a committed version needs."""
    try:
        return backend.get(key)
    except ObjectNotFoundError as error:
        raise CorruptionError(f"{what}: {key} is lost from {backend.url}") from error


def prove_parts(record: Record, state: Any) -> None:
    """Prove that a state names the parts of ranks, by their digests, if and only if its record says that it
    has some.
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
