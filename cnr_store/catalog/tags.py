"""Tags: names for versions."""

from __future__ import annotations

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout, validate
from cnr_store.format.state import loads


def read_tag(backend: Backend, name: str) -> str | None:
    """The id of the version that a tag names, None if there is no such tag.

    Raises
    ------
    CorruptionError
        The tag can't be read.
    """
    if not layout.is_tag(name):
        return None
    key = layout.tag_key(name)
    try:
        data = backend.get(key)
    except ObjectNotFoundError:
        return None
    try:
        return validate.version(validate.members(loads(data, key), key)["version"], "version")
    except (FormatError, ValueError, KeyError) as error:
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); remove it, and tag the version again"
        ) from error


def read_tags(backend: Backend) -> dict[str, str]:
    """The ids that all tags name, by tag.

    Raises
    ------
    CorruptionError
        A tag can't be read, so it is unknown what it keeps.
    """
    names = filter(layout.is_tag, sorted(backend.list_names(layout.TAGS)))
    found = {name: read_tag(backend, name) for name in names}
    return {name: version for name, version in found.items() if version is not None}
