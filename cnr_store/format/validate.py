"""Proofs of what a document's members are. Documents come from a store, which nobody needs to trust.

Every function takes a value and what it is called, and raises ValueError if it is not what it should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from cnr_store.format.layout import VersionId, decode_name, encode_name

MOST = 1 << 62
_LAST_SECOND = 253_402_300_799  # of the year 9999
_SHOWN = 60
_TOKEN = re.compile(r"[0-9a-f]{16,64}")
_GROUPS = ("model", "optim", "state")


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)[:_SHOWN]
    return f"an object of type {type(value).__name__}"


def natural(value: Any, name: str, most: int = MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {shown(value)}, not an integer from 0 to {most}")
    return value


def seconds(value: Any, name: str) -> float:
    """A time since 1970 that a calendar knows."""
    if type(value) not in (int, float) or not 0 <= value <= _LAST_SECOND:
        raise ValueError(f"{name} is {shown(value)}, not a time")
    return float(value)


def text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{name} is {shown(value)}, not a string")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list of strings")
    return tuple(text(item, name) for item in value)


def members(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, not an object")
    return value


def one_of(value: Any, name: str, allowed: Iterable[str]) -> str:
    if value not in tuple(allowed):
        raise ValueError(f"{name} is {shown(value)}, not one of {', '.join(allowed)}")
    return text(value, name)


def sizes(value: Any, name: str, least: int, dimensions: Iterable[int]) -> tuple[int, ...]:
    """A shape whose bytes can be counted."""
    if not isinstance(value, list) or len(value) not in tuple(dimensions):
        raise ValueError(f"{name} is {shown(value)}, not a list of sizes")
    product = 1
    for size in value:
        if natural(size, name, 1 << 48) < least:
            raise ValueError(f"{name} holds {size}, less than {least}")
        product *= max(size, 1)
        if product > MOST >> 8:
            raise ValueError(f"{name} is that of more values than can be")
    return tuple(value)


def version(value: Any, name: str) -> str:
    if VersionId.parse(text(value, name)) is None:
        raise ValueError(f"{name} is {shown(value)}, not a version id")
    return text(value, name)


def token(value: Any, name: str) -> str:
    """Hex digits, which may be part of a key."""
    if _TOKEN.fullmatch(text(value, name)) is None:
        raise ValueError(f"{name} is {shown(value)}, not 16 to 64 hex digits")
    return text(value, name)


def array_path(path: str) -> str:
    """``tables/TABLE/SLOT`` or ``dense/GROUP/NAME``, each name encoded as `encode_name` does."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] not in ("tables", "dense"):
        raise ValueError(f"{shown(path)} is not the path of an array")
    room, group, last = parts
    if room == "dense" and group not in _GROUPS:
        raise ValueError(f"{shown(path)} is in none of the groups {', '.join(_GROUPS)}")
    names = (group, last) if room == "tables" else (last if group == "model" else last.rstrip("~"),)
    if any(not name or encode_name(decode_name(name)) != name for name in names):
        raise ValueError(f"{shown(path)} is not a path with encoded names")
    return path
