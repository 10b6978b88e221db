"""Types of what a document's members are, and their proof. Documents come from a store, which nobody needs to trust.

What is proven of one member is its type. What holds between members, the modules of the documents prove.
"""

from __future__ import annotations

import math
from collections.abc import Container
from functools import lru_cache
from threading import Lock
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert
from msgspec.msgpack import Decoder

from cnr_store.errors import FormatError
from cnr_store.format.layout import FORMAT, MAX_RANKS, VERSION_ID, decode_name, encode_name
from cnr_store.policies.checks import MOST

_SHOWN = 60
_GROUPS = ("model", "optim", "state")
_LOOKING = Lock()

Time = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Seconds since 1970, to the end of the year 9999: what a calendar can show."""

Percent = Annotated[float, Meta(ge=0, le=100)]
VersionText = Annotated[str, Meta(pattern=rf"\A{VERSION_ID.pattern}\Z")]
Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16,64}\Z")]
"""Hex digits, which may be part of a key."""

Digests = Annotated[
    list[Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]], Meta(min_length=1, max_length=MAX_RANKS)
]
Sizes = tuple[Annotated[int, Meta(ge=0, le=1 << 48)], ...]


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)[:_SHOWN]
    return f"an object of type {type(value).__name__}"


def member(value: object, name: str) -> Any:
    """A member of what may be a JSON object; None where it is no object, or has no such member. Never an error."""
    return value.get(name) if isinstance(value, dict) else None


def check_format(number: object, what: str) -> None:
    """Refuse what another format than this one holds, and say what reads it."""
    if number == 1:
        raise FormatError(
            f"{what} holds format 1, which a development version of cnr-store wrote; this release reads format "
            f"{FORMAT}. Commit 36dd5db5 of cnr-store reads it. To bring the weights over, export them with that "
            "commit, `cnr export URL out.safetensors`, and import them with this release, `cnr import out.safetensors "
            "NEW_URL`. Only the weights of one version come along"
        )
    if number != FORMAT:
        raise FormatError(
            f"{what} holds format {shown(number)}; this release reads format {FORMAT}: install a newer cnr-store"
        )


@lru_cache
def _look_at(kind: Any) -> None:
    """Let msgspec find the members of classes, one thread at a time: others would crash on what it has half found."""
    with _LOOKING:
        Decoder(kind)


def proven(value: object, kind: Any, name: str) -> Any:
    """A value of a document as the type `kind`. Nothing is cast: True is no number, and 1.0 no integer."""
    _look_at(kind)
    try:
        return convert(value, kind)
    except (
        ValidationError,
        AttributeError,
        TypeError,
    ) as error:  # the last two of arrays, which have no keys
        given = f" is {shown(value)}" if isinstance(value, str | int | float | None) else ""
        raise ValueError(f"{name}{given}: {error}") from error


def sizes(value: object, name: str, minimum: int, dimensions: Container[int]) -> tuple[int, ...]:
    """A shape of so many dimensions, no size below `minimum`, whose bytes can be counted in 64 bits."""
    shape: tuple[int, ...] = proven(value, Sizes, name)
    check_sizes(shape, name, minimum, dimensions)
    return shape


def check_sizes(shape: tuple[int, ...], name: str, minimum: int, dimensions: Container[int]) -> None:
    """What `sizes` proves of a shape that is one of `Sizes`."""
    if len(shape) not in dimensions or min(shape, default=minimum) < minimum:
        raise ValueError(
            f"{name} is {str(shape)[:_SHOWN]}: it has another number of sizes, or one below {minimum}"
        )
    if math.prod(filter(None, shape)) > MOST >> 8:
        raise ValueError(f"{name} holds sizes of more values than 64 bits can count in bytes")


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
