"""Lists the ids and objects of a store, and deletes objects."""

from __future__ import annotations

from collections.abc import Iterable

from cnr_backends import Backend, Transfer
from cnr_store.format.layout import VersionId


def list_ids(backend: Backend, prefix: str) -> frozenset[str]:
    """The version ids listed under a prefix of the store."""
    return frozenset(filter(VersionId.parse, backend.list_names(prefix)))


def list_objects(backend: Backend, folder: str) -> list[tuple[str, int]]:
    """(key, size in bytes) of all objects below a folder, sorted."""
    return sorted(backend.list_keys(folder))


def delete_objects(backend: Backend, transfer: Transfer, keys: Iterable[str]) -> None:
    """Delete objects, in any order. Missing ones are no error."""
    for _ in transfer.map(backend.delete, keys):
        pass
