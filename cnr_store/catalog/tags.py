"""Tags: names for versions."""

from __future__ import annotations

import time

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError
from cnr_store.format import layout, validate
from cnr_store.format.record_document import NO_DIGEST, check_digest, with_digest
from cnr_store.format.state import dumps, loads


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
        return _decode(data, name)
    except (CorruptionError, ValueError, KeyError) as error:  # FormatError is a ValueError
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); remove it, and tag the version again"
        ) from error


def _decode(data: bytes, name: str) -> str:
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
