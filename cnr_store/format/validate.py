"""Proofs of what a document's members are. Documents come from a store, which nobody needs to trust.

Every function takes a value and its name, and raises ValueError if the value is not what it should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from cnr_store.format.layout import decode_name, encode_name, is_version

MOST = 1 << 62
_LAST_SECOND = 253_402_300_799  # of the year 9999
_SHOWN = 60
_TOKEN = re.compile(r"[0-9a-f]{16,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GROUPS = ("model", "optim", "state")


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)[:_SHOWN]
    return f"an object of type {type(value).__name__}"


def member(value: object, name: str) -> Any:
    """A member of what may be a JSON object; None where it is no object, or has no such member. Never an error."""
    return value.get(name) if isinstance(value, dict) else None


def natural(value: Any, name: str, maximum: int = MOST) -> int:
    """An integer from 0 to `maximum`. True and False are none."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{name} is {shown(value)}, not an integer from 0 to {maximum}")
    return value


def seconds(value: Any, name: str) -> float:
    """A time since 1970 that a calendar can show."""
    if type(value) not in (int, float) or not 0 <= value <= _LAST_SECOND:
        raise ValueError(f"{name} is {shown(value)}, not a time")
    return float(value)


def text(value: Any, name: str) -> str:
    """A string."""
    if type(value) is not str:
        raise ValueError(f"{name} is {shown(value)}, not a string")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list of strings")
    return tuple(text(item, name) for item in value)


def members(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, not an object")
    return value


def items(value: Any, name: str) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    return value


def one_of(value: Any, name: str, allowed: Iterable[str]) -> str:
    """One of some strings."""
    if value not in tuple(allowed):
        raise ValueError(f"{name} is {shown(value)}, not one of {', '.join(allowed)}")
    return text(value, name)


def sizes(value: Any, name: str, minimum: int, dimensions: Iterable[int]) -> tuple[int, ...]:
    """A shape of so many dimensions, no size below `minimum`, whose bytes can be counted in 64 bits."""
    if not isinstance(value, list) or len(value) not in tuple(dimensions):
        raise ValueError(f"{name} is {shown(value)}, not a list of sizes")
    product = 1
    for size in value:
        if natural(size, name, 1 << 48) < minimum:
            raise ValueError(f"{name} holds {size}, less than {minimum}")
        product *= max(size, 1)
        if product > MOST >> 8:
            raise ValueError(f"{name} holds sizes of more values than 64 bits can count in bytes")
    return tuple(value)


def version(value: Any, name: str) -> str:
    """A version's id."""
    if not is_version(text(value, name)):
        raise ValueError(f"{name} is {shown(value)}, not a version id")
    return str(value)


def token(value: Any, name: str) -> str:
    """Hex digits, which may be part of a key."""
    if _TOKEN.fullmatch(text(value, name)) is None:
        raise ValueError(f"{name} is {shown(value)}, not 16 to 64 hex digits")
    return text(value, name)


def digests(value: Any, name: str, maximum: int) -> tuple[str, ...]:
    """A list of 1 to `maximum` SHA-256 digests."""
    if not isinstance(value, list) or not 1 <= len(value) <= maximum:
        count = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        raise ValueError(f"{name} is {count}, not a list of 1 to {maximum} digests")
    for digest in texts(value, name):
        if _SHA256.fullmatch(digest) is None:
            raise ValueError(f"{name} has {shown(digest)}, not 64 hex digits")
    return tuple(value)


@lru_cache(maxsize=4096)  # the versions of a store have the same paths
def array_path(path: str) -> str:
    """``tables/TABLE/SLOT`` or ``dense/GROUP/NAME``, each name encoded as `encode_name` does."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] not in ("tables", "dense"):
        raise ValueError(f"{shown(path)} is not the path of an array")
    root, group, last = parts
    if root == "dense" and group not in _GROUPS:
        raise ValueError(f"{shown(path)} is in none of the groups {', '.join(_GROUPS)}")
    # Names of state that would clash are told apart by ~ at their end, which no encoded name has.
    names = (group, last) if root == "tables" else (last if group == "model" else last.rstrip("~"),)
    if any(not name or encode_name(decode_name(name)) != name for name in names):
        raise ValueError(f"{shown(path)} is not a path with encoded names")
    return path
