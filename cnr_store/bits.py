"""How many bits a row's values get (standard library only)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TypeVar

from cnr_store.errors import OptionError

Bits = int | str | Mapping[str, int | str]
WIDTHS = (2, 3, 4, 8, 32)
LOSSLESS = 32
LOSSLESS_BELOW_BYTES = 16 << 10
WITHOUT_EXPECTATION = 8

T = TypeVar("T")


def check_bits(bits: Bits) -> Bits:
    """Refuse widths out of range before anything is written.

    Raises
    ------
    OptionError
        Naming the value and what is allowed.
    """
    if isinstance(bits, Mapping) and not all(isinstance(pattern, str) for pattern in bits):
        raise OptionError(f"bits {bits!r}: patterns are strings, such as 'user*'")
    values = list(bits.values()) if isinstance(bits, Mapping) else [bits]
    for value in values:
        if value != "auto" and (type(value) is not int or value not in WIDTHS):
            raise OptionError(
                f"bits {value!r}: use 2, 3, 4, 8, 32 (lossless), 'auto', or a mapping from name patterns to these"
            )
    return bits


def choose_bits(bits: Bits, table: str, table_bytes: int) -> int:
    """Width for one table. Tables under `LOSSLESS_BELOW_BYTES` stay lossless unless a pattern names them.

    ``auto`` means 8 bits: without an expected number of restores, the width that any number of them can stand.
    """
    if isinstance(bits, Mapping):
        chosen = match_pattern(bits, table)
        if chosen is not None:
            return WITHOUT_EXPECTATION if chosen == "auto" else int(chosen)
        return choose_bits("auto", table, table_bytes)
    if table_bytes < LOSSLESS_BELOW_BYTES:
        return LOSSLESS
    return WITHOUT_EXPECTATION if bits == "auto" else int(bits)


def match_pattern(patterns: Mapping[str, T], table: str) -> T | None:
    """The value of the first pattern (shell-style) that fits a table's name, None if none does."""
    return next((value for pattern, value in patterns.items() if fnmatch.fnmatchcase(table, pattern)), None)
