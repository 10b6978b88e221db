"""How many bits a row's values get (standard library only)."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from cnr_store.errors import OptionError
from cnr_store.policies.checks import amount

log = logging.getLogger("cnr_store")

Bits = int | str | Mapping[str, int | str]
StateBits = int | Mapping[str, int]
WIDTHS = (2, 3, 4, 8, 32)
LOSSLESS = 32
LOSSLESS_BELOW_BYTES = 16 << 10
WITHOUT_EXPECTATION = 8

MAX_RESTORES_BY_BITS = ((2, 1), (3, 3), (4, 20))
"""The paper's table: (bits, restores that they stand). More than the last takes `WITHOUT_EXPECTATION`."""

T = TypeVar("T")


@dataclass(frozen=True)
class ExpectedRestores:
    """What a run is planned to go through, for ``bits="auto"``.

    Attributes
    ----------
    failures_per_node_hour
        From the cluster's logs: failures that make the run restore, by node and hour.
    nodes, hours
        Nodes that the run is on, and hours that it is planned to take.

    Raises
    ------
    OptionError
        A number that is negative or not finite.
    """

    failures_per_node_hour: float
    nodes: float
    hours: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = amount(f"expected restores: {field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def restores(self) -> float:
        """Restores to be expected in all."""
        # The least first: infinity times nothing would be no number.
        return math.prod(sorted((self.failures_per_node_hour, self.nodes, self.hours)))

    @classmethod
    def of(cls, value: ExpectedRestores | Mapping[str, Any] | None) -> ExpectedRestores | None:
        """Made of `value`: one of these, its fields by name, or None, which stays None.

        Raises
        ------
        OptionError
            Other fields, or numbers out of range.
        """
        if value is None or isinstance(value, cls):
            return value
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise OptionError(
                f"expected restores {value!r}: give ExpectedRestores or {', '.join(sorted(names))}"
            )
        return cls(**value)


def auto_bits(expected: ExpectedRestores | None, restores_so_far: int) -> tuple[int, str]:
    """The width that ``bits="auto"`` stands for, and why (for the commit record).

    Each restore puts quantized values into training once more, so the fewer are to be expected, the fewer bits do.
    A run that has been through more than expected, a started one counted whole, falls back to 8 bits.

    Parameters
    ----------
    expected
        Without anything to go by, 8 bits: what any number of restores can stand.
    restores_so_far
        Loads that the run has been through.
    """
    if expected is None:
        return WITHOUT_EXPECTATION, "no number of restores is expected"
    if restores_so_far - 1 >= expected.restores:
        return (
            WITHOUT_EXPECTATION,
            f"{restores_so_far} restores are more than the {expected.restores:.3g} expected",
        )
    for bits, stood in MAX_RESTORES_BY_BITS:
        if expected.restores <= stood:
            return bits, f"{expected.restores:.3g} restores are expected: at most {stood}"
    return (
        WITHOUT_EXPECTATION,
        f"{expected.restores:.3g} restores are expected: more than {MAX_RESTORES_BY_BITS[-1][1]}",
    )


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


def choose_bits(bits: Bits, table: str, table_bytes: int, auto: int = WITHOUT_EXPECTATION) -> int:
    """Width for one table. Tables under `LOSSLESS_BELOW_BYTES` stay lossless unless a pattern names them.

    `auto` is the width that ``"auto"`` stands for: see `auto_bits`.
    """
    if isinstance(bits, Mapping):
        chosen = match_pattern(bits, table)
        if chosen is not None:
            return auto if chosen == "auto" else int(chosen)
        return choose_bits("auto", table, table_bytes, auto)
    if table_bytes < LOSSLESS_BELOW_BYTES:
        return LOSSLESS
    return auto if bits == "auto" else int(bits)


def match_pattern(patterns: Mapping[str, T], table: str) -> T | None:
    """The value of the first pattern (shell-style) that fits a table's name, None if none does."""
    return next((value for pattern, value in patterns.items() if fnmatch.fnmatchcase(table, pattern)), None)


class StateWidths:
    """How many bits the values of optimizer state get that follows rows.

    Parameters
    ----------
    given
        2, 3, 4, 8, 32 (lossless), or a mapping from patterns of ``TABLE/SLOT`` to these; a pattern without ``/`` means
        all slots of the tables that it fits. There is no ``"auto"``: what is known of restores is known of weights.

    Raises
    ------
    OptionError
        Widths out of range.
    """

    def __init__(self, given: StateBits = LOSSLESS) -> None:
        named = given if isinstance(given, Mapping) else {}
        if not all(isinstance(pattern, str) for pattern in named):
            raise OptionError(f"state_bits {given!r}: patterns are strings, such as 'user*/exp_avg'")
        for width in named.values() if isinstance(given, Mapping) else (given,):
            if type(width) is not int or width not in WIDTHS:
                raise OptionError(
                    f"state_bits {width!r}: use 2, 3, 4, 8, 32 (lossless), or a mapping from patterns like "
                    "'user*/exp_avg' to these"
                )
        self._width = LOSSLESS if isinstance(given, Mapping) else given
        self._named = dict(named)
        self._unproven = {pattern for pattern in self._named if "/" in pattern}

    @property
    def quantized(self) -> set[int]:
        """The widths that rows may get, without lossless."""
        return {self._width, *self._named.values()} - {LOSSLESS}

    def check_tables(self, tables: Sequence[str]) -> None:
        """Refuse patterns that fit no table. What slots there are is not known before optimizers have made them.

        Raises
        ------
        OptionError
            Naming the pattern and the tables there are.
        """
        for pattern in self._named:
            if not any(fnmatch.fnmatchcase(table, _table_and_slot(pattern)[0]) for table in tables):
                raise OptionError(
                    f"state_bits: the pattern {pattern!r} fits no table; there are {', '.join(map(repr, tables))}"
                )

    def warn_unknown_slots(self, find: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """Log patterns that fit none of the slots that their tables have, once each.

        No error: a slot may come with a later step, and a save that is refused loses more than a width.

        Parameters
        ----------
        find
            Gives, by table, the slots that optimizers have made so far; asked only while a pattern fits none.
        """
        if not self._unproven:
            return
        slots = find()
        for pattern in sorted(self._unproven):
            of_table, of_slot = _table_and_slot(pattern)
            there = {
                slot for table, held in slots.items() if fnmatch.fnmatchcase(table, of_table) for slot in held
            }
            if not there:
                continue
            self._unproven.discard(pattern)
            if not any(fnmatch.fnmatchcase(slot, of_slot) for slot in there):
                log.warning(
                    "state_bits: the pattern %r fits no optimizer state that follows rows; of its tables there is %s",
                    pattern,
                    ", ".join(map(repr, sorted(there))),
                )

    def of(self, table: str, slot: str, nbytes: int) -> int:
        """Width for one array. Those under `LOSSLESS_BELOW_BYTES` stay lossless unless a pattern names them."""
        for pattern, width in self._named.items():
            of_table, of_slot = _table_and_slot(pattern)
            if fnmatch.fnmatchcase(table, of_table) and fnmatch.fnmatchcase(slot, of_slot):
                return width
        return LOSSLESS if nbytes < LOSSLESS_BELOW_BYTES else self._width


def _table_and_slot(pattern: str) -> tuple[str, str]:
    """The patterns of a table's name, which may hold ``/``, and of a slot's."""
    table, slash, slot = pattern.rpartition("/")
    return (table, slot) if slash else (pattern, "*")
