"""Patterns of names, as callers give them; without torch."""

from __future__ import annotations

from typing import Any

from cnr_store.errors import OptionError


def check_patterns(option: str, given: Any) -> tuple[str, ...]:
    """One name or pattern, or several.

    Raises
    ------
    OptionError
        Something in it is no string; the error names the option.
    """
    try:
        patterns = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        patterns = (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"{option}={given!r}: give names, or patterns like 'user*'")
    return tuple(map(str, patterns))  # numpy's strings have another repr, which messages would show
