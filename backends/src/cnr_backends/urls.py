"""The parts of URLs that choose a backend and that messages show."""

from __future__ import annotations

import re

from fsspec.registry import available_protocols

from cnr_backends.errors import OpenError

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_CACHES = ("blockcache", "cached", "filecache", "simplecache")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "abfs", "abfss": "abfs", "az": "abfs"}
_USER = re.compile(r"(://)[^/@]*@")


def protocol_of(url: str) -> str:
    """Return the protocol of a URL in lower case, or "" for a path."""
    if not url:
        raise OpenError("can't open '': give a path or a URL")
    if _is_chain(url):
        raise OpenError(
            f"can't open {without_secrets(url)}: chained URLs are not supported; give the last one alone, "
            "or './' before a path"
        )
    slip = _ONE_SLASH.match(url)
    if slip:
        raise OpenError(
            f"can't open {url}: after {slip[1]}: there must be two slashes (or './' before a path)"
        )
    match = _PROTOCOL.match(url)
    protocol = match[1].lower() if match else ""
    if protocol in _CACHES:
        raise OpenError(
            f"can't open {without_secrets(url)}: a cache gives what objects were, and a store's are replaced; give "
            "the URL of what it caches"
        )
    return protocol


def missing_package(url: str, error: Exception) -> str:
    """An error, with the extra to install if it is that the filesystem of a URL can't be imported."""
    is_missing = isinstance(error, ImportError) and error.__cause__ is not None
    extra = _EXTRAS.get(protocol_of(url)) if is_missing else None
    return f"{error}: pip install 'cnr-store[{extra}]'" if extra else str(error)


def _is_chain(url: str) -> bool:
    """Whether a URL is a chain, rather than a path with "::" in it, also after ``file://``."""
    path = re.sub(r"^(file|local)://", "/", url, flags=re.IGNORECASE)
    first, separator, _ = path.partition("::")
    return bool(separator) and ("://" in path or first.lower() in available_protocols())


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query, for messages."""
    return _USER.sub(r"\1***@", url).partition("?")[0]
