"""The rules for keys, the same on every backend."""

from __future__ import annotations

from cnr_backends.errors import KeyNameError

TEMPORARY_PREFIX = ".tmp-"
"""Names with this prefix belong to the backends: no key may use them, and no listing shows them."""


def is_name(segment: str) -> bool:
    """Whether `segment` may be a part of a key between slashes."""
    return "/" not in segment and _fault_of(segment) is None


def is_key(key: str) -> bool:
    """Whether `key` is one or more valid segments joined by "/"."""
    return all(map(is_name, key.split("/")))


def check_key(key: str) -> str:
    """Return `key`, if it is valid."""
    for segment in key.split("/"):
        fault = _fault_of(segment)
        if fault is not None:
            raise KeyNameError(f"{key!r} is not a valid key: {fault}; keys look like 'folder/name'", key=key)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` without a trailing "/". "" is the root. `KeyNameError` if the prefix is neither "" nor a key."""
    if prefix == "":
        return prefix
    return check_key(prefix.removesuffix("/"))


def _fault_of(segment: str) -> str | None:
    if segment in ("", ".", ".."):
        return f"it has the segment {segment!r}"
    if "\0" in segment or "\\" in segment:
        return "it has a NUL or a backslash"
    if segment.startswith(TEMPORARY_PREFIX):
        return f"names that begin with {TEMPORARY_PREFIX!r} are reserved"
    if not segment.isascii():
        try:
            segment.encode()
        except UnicodeEncodeError:
            return "it can't be written as UTF-8"
    return None
