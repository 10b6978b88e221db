"""Patterns of names, as callers give them; without torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cnr_store.errors import OptionError
from cnr_store.format.layout import table_name


def check_patterns(option: str, given: Any) -> tuple[str, ...]:
    """One name or pattern, or several. `OptionError` if something in it is no string; the error names the option."""
    try:
        patterns = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        patterns = (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"{option}={given!r}: give names, or patterns like 'user*'")
    return tuple(map(str, patterns))  # numpy's strings have another repr, which messages would show


@dataclass(frozen=True)
class Exclusion:
    """What versions are without, as a caller or the model says."""

    patterns: tuple[str, ...] = ()  # of the names of tables, and of entries of the state dict
    absent: Collection[str] = ()  # names of parameters that the model leaves out of its state dict
    tables: Collection[str] = ()  # names of parameters that are tables

    def fits(self, *names: str) -> bool:
        """Whether a pattern fits one of these names."""
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.patterns)

    def has(self, name: str) -> bool:
        """Whether a pattern fits an entry of the state dict, or the table whose parameter it is."""
        return self.fits(name) or (name in self.tables and self.fits(table_name(name)))

    def check(self, names: Collection[str], owners: Mapping[str, int]) -> None:
        """Raise an `OptionError` if a pattern fits none of all names, or one of the names of one tensor alone.

        `owners` has what tells tensors apart by the names of entries.
        """
        for pattern in self.patterns:
            if not fnmatch.filter(names, pattern):
                raise OptionError(f"exclude: {pattern!r} fits no table or tensor; there are {sorted(names)}")
        left = {owner: name for name, owner in owners.items() if self.has(name)}
        for name, owner in owners.items():
            if owner in left and not self.has(name):
                raise OptionError(
                    f"exclude leaves out {left[owner]!r}, which is the same tensor as {name!r}: give both, or none"
                )


NOTHING = Exclusion()
"""Excludes nothing."""
