"""Objects of a store by their keys: whether they are there, which ids are listed, what they hold; and tags."""

from __future__ import annotations

import time
from typing import Any

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError
from cnr_store.format import layout, validate
from cnr_store.format.record import Record
from cnr_store.format.record_document import NO_DIGEST, check_digest, with_digest
from cnr_store.format.state import dumps, loads
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


def encode_tag(name: str, version: str) -> bytes:
    """The bytes of a tag made now, with their own digest inside."""
    return with_digest(dumps({"digest": NO_DIGEST, "name": name, "version": version, "time": time.time()}))


def read_tag(backend: Backend, name: str) -> str | None:
    """The id of the version that a tag names, None if there is no such tag."""
    if not layout.is_tag(name):
        return None
    key = layout.tag_key(name)
    try:
        data = backend.get(key)
    except ObjectNotFoundError:
        return None
    try:
        return _decode_tag(data, name)
    except (CorruptionError, ValueError, KeyError) as error:  # FormatError is a ValueError
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); remove it, and tag the version again"
        ) from error


def _decode_tag(data: bytes, name: str) -> str:
    doc = validate.proven(loads(data, "it"), dict, "it")
    check_digest(data, doc, "it")
    if doc["name"] != name:
        raise ValueError(f"it is the tag {validate.shown(doc['name'])}: objects were swapped")
    return str(validate.proven(doc["version"], validate.VersionText, "version"))


def list_tags(backend: Backend) -> list[str]:
    """The names of all tags."""
    return sorted(filter(layout.is_tag, backend.list_names(layout.TAGS)))


def read_tags(backend: Backend) -> dict[str, str]:
    """The ids that all tags name, by tag. `CorruptionError` if a tag can't be read, so it is unknown what it keeps."""
    found = {name: read_tag(backend, name) for name in list_tags(backend)}
    return {name: version for name, version in found.items() if version is not None}
