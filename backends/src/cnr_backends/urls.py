"""The parts of URLs that choose a backend and that messages show."""

from __future__ import annotations

import re

from cnr_backends.errors import OpenError

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_USER = re.compile(r"(://)[^/@]*@")


def protocol_of(url: str) -> str:
    """Return the protocol of a URL in lower case, or "" for a path.

    Raises
    ------
    OpenError
        The URL is "", is a chain of URLs, or lacks a slash.
    """
    if not url:
        raise OpenError("can't open '': give a path or a URL")
    if "::" in url:
        raise OpenError(
            f"can't open {without_secrets(url)}: chained URLs are not supported; give the last one alone"
        )
    slip = _ONE_SLASH.match(url)
    if slip:
        raise OpenError(
            f"can't open {url}: after {slip[1]}: there must be two slashes (or './' before a path)"
        )
    match = _PROTOCOL.match(url)
    return match[1].lower() if match else ""


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query, for messages."""
    return _USER.sub(r"\1***@", url).partition("?")[0]
