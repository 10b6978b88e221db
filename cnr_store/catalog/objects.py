"""Objects of a store by their keys: whether they are there, which ids are listed, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Self

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

    `listed`: lists all ids, newest first.
    `is_committed`: whether there is a record.
    `url`: of the store, for the message.
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


@dataclass
class SharedObjects:
    """Records, manifests and states that were read and proven."""

    objects: dict[str, bytes] = field(default_factory=dict)  # by key

    def pack(self, record: Record, folded: Collection[str] | None) -> bytes:
        """What other ranks need of a version.

        `folded`: the versions that have folds, None if these were not listed.
        """
        versions = {record.id, *record.needs}
        chosen = {key: data for key, data in self.objects.items() if key.split("/")[1] in versions}
        if record.key(layout.state_part(1)) not in chosen:  # each rank reads its own
            chosen.pop(record.key(layout.state_part(0)), None)
        sizes = {key: len(data) for key, data in chosen.items()}
        head = json.dumps(
            {"folded": None if folded is None else sorted(versions.intersection(folded)), "sizes": sizes}
        ).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *chosen.values()])

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Self, frozenset[str] | None]:
        """The objects that `pack` packed, and the versions that have folds."""
        begin = 8 + int.from_bytes(data[:8], "little")
        head, objects = json.loads(data[8:begin]), {}
        for key, size in head["sizes"].items():
            objects[key] = data[begin : begin + size]
            begin += size
        return cls(objects), None if head["folded"] is None else frozenset(head["folded"])
