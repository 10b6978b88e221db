"""How many bits a row's values get."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from cnr_store.errors import OptionError
from cnr_store.policies.checks import number

Bits = int | str | Mapping[str, int | str]
StateBits = int | str | Mapping[str, int | str]
WIDTHS = (2, 3, 4, 8, 32)
LOSSLESS = 32
MANTISSAS = {f"m{bits}": bits for bits in (*range(1, 8), 23)}
"""Bits of the mantissa, by the widths of state on a floating grid."""
AUTO, AUTO_STATE, AUTO_FIRST = "auto", "m3", "m2"
"""The width of state that goes by its slot; what that is for most slots, and for first moments."""
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""Slots of torch's optimizers that are means of gradients: nothing is divided by them."""
LOSSLESS_BELOW_BYTES = 16 << 10
WITHOUT_EXPECTATION = 8

MAX_RESTORES_BY_BITS = ((2, 1), (3, 3), (4, 20))
"""The paper's table: (bits, restores they are good for). More than the last needs `WITHOUT_EXPECTATION`."""

T = TypeVar("T")


@dataclass(frozen=True)
class ExpectedRestores:
    """How often a run is expected to restore, for ``bits="auto"``.

    Attributes
    ----------
    failures_per_node_hour
        From the cluster's logs: failures that make the run restore, by node and hour.
    nodes, hours
        Nodes that the run uses, and hours that it is planned to take.

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
            value = number(f"expected restores: {field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def restores(self) -> float:
        """Restores expected in all."""
        # The smallest factor first: a product that overflows to infinity, times 0, would be NaN.
        return math.prod(sorted((self.failures_per_node_hour, self.nodes, self.hours)))

    @classmethod
    def of(cls, value: ExpectedRestores | Mapping[str, Any] | None) -> ExpectedRestores | None:
        """The value of the option `expected_restores`: one of these, a mapping with its fields, or None.

        Raises
        ------
        OptionError
            A mapping with other fields, or numbers out of range.
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
    """The width that ``bits="auto"`` stands for, and the reason (for the commit record).

    Each restore puts quantized values into training once more, so fewer expected restores allow fewer bits.
    A run that restored more often than expected, rounded up, falls back to 8 bits.

    `expected`: None gives 8 bits, which are good for any number of restores.
    `restores_so_far`: loads of the run up to now.
    """
    if expected is None:
        return WITHOUT_EXPECTATION, "no number of restores is expected"
    if restores_so_far - 1 >= expected.restores:
        return (
            WITHOUT_EXPECTATION,
            f"{restores_so_far} restores are more than the {expected.restores:.3g} expected",
        )
    for bits, most in MAX_RESTORES_BY_BITS:
        if expected.restores <= most:
            return bits, f"{expected.restores:.3g} restores are expected: at most {most}"
    return (
        WITHOUT_EXPECTATION,
        f"{expected.restores:.3g} restores are expected: more than {MAX_RESTORES_BY_BITS[-1][1]}",
    )


def check_bits(bits: Bits) -> Bits:
    """Refuse widths out of range before anything is written. `OptionError` names the value and what is allowed."""
    _check_widths("bits", bits, "'user*'", words=("auto",))
    return bits


def _check_widths(option: str, given: object, example: str, words: tuple[str, ...] = ()) -> None:
    by_pattern = given if isinstance(given, Mapping) else {}
    if not all(isinstance(pattern, str) for pattern in by_pattern):
        raise OptionError(f"{option} {given!r}: patterns are strings, such as {example}")
    for pattern, width in by_pattern.items() if isinstance(given, Mapping) else ((None, given),):
        # By type, because True and 8.0 equal integers.
        if not (width in WIDTHS if type(width) is int else isinstance(width, str) and width in words):
            allowed = ", ".join(["2, 3, 4, 8, 32 (lossless)", *map(repr, words)])
            where = f"; the pattern is {pattern!r}" if pattern is not None else ""
            raise OptionError(
                f"{option} {width!r}: use {allowed}, or a mapping from patterns like {example} to these{where}"
            )


def choose_bits(bits: Bits, table: str, table_bytes: int, auto: int = WITHOUT_EXPECTATION) -> int:
    """Width for one table. Tables under `LOSSLESS_BELOW_BYTES` stay lossless unless a pattern names them.

    `auto` is the width that ``"auto"`` stands for: see `auto_bits`.
    """
    patterns: Mapping[str, int | str] = bits if isinstance(bits, Mapping) else {}
    width = match_pattern(patterns, table)
    if width is None:
        if table_bytes < LOSSLESS_BELOW_BYTES:
            return LOSSLESS
        width = "auto" if isinstance(bits, Mapping) else bits
    return auto if width == "auto" else int(width)


def match_pattern(patterns: Mapping[str, T], table: str) -> T | None:
    """The value of the first pattern (shell-style) that fits a table's name, None if none does."""
    return next((value for pattern, value in patterns.items() if fnmatch.fnmatchcase(table, pattern)), None)


class StateWidths:
    """How many bits the values of row-wise optimizer state get.

    `given`: 2, 3, 4, 8, 32 (lossless), ``"m1"`` to ``"m7"`` or ``"m23"`` (so many bits of the mantissa), ``"auto"``
    (``"m2"`` for first moments, else ``"m3"``), or a mapping to these from patterns of ``TABLE/SLOT``; one without
    ``/`` means all slots of the tables that it fits.
    `otherwise`: the width of what nothing is given for.
    """

    def __init__(self, given: StateBits | None = None, otherwise: int | str = LOSSLESS) -> None:
        given = otherwise if given is None else given
        _check_widths("state_bits", given, "'user*/exp_avg'", words=(*MANTISSAS, AUTO))
        self._width = otherwise if isinstance(given, Mapping) else given
        self._by_pattern = dict(given) if isinstance(given, Mapping) else {}
        self._unmatched = {pattern for pattern in self._by_pattern if "/" in pattern}

    @property
    def quantized(self) -> set[int | str]:
        """The widths that rows may get, without lossless."""
        given = {self._width, *self._by_pattern.values()}
        return given - {LOSSLESS, AUTO} | ({AUTO_STATE, AUTO_FIRST} if AUTO in given else set())

    def check_tables(self, tables: Sequence[str]) -> None:
        """Refuse patterns that fit no table. Slots are not checked: optimizers make them at their first step."""
        for pattern in self._by_pattern:
            if not any(fnmatch.fnmatchcase(table, _table_and_slot(pattern)[0]) for table in tables):
                raise OptionError(
                    f"state_bits: the pattern {pattern!r} fits no table; there are {', '.join(map(repr, tables))}"
                )

    def unknown_slots(self, find: Callable[[], Mapping[str, Collection[str]]]) -> dict[str, list[str]]:
        """Patterns that fit none of the slots that their tables have, each returned once, with these slots.

        They are to be logged rather than refused: a later step may make the slot, and a refused save loses more than
        a width.

        `find`: gives, by table, the slots that optimizers have made so far. Called only while a pattern fits none.
        """
        if not self._unmatched:
            return {}
        slots_by_table, unknown = find(), {}
        for pattern in sorted(self._unmatched):
            of_table, of_slot = _table_and_slot(pattern)
            tables = [table for table in slots_by_table if fnmatch.fnmatchcase(table, of_table)]
            slots = sorted({slot for table in tables for slot in slots_by_table[table]})
            if not slots:
                continue  # its tables have made none yet
            self._unmatched.discard(pattern)
            if not any(fnmatch.fnmatchcase(slot, of_slot) for slot in slots):
                unknown[pattern] = slots
        return unknown

    def of(self, table: str, slot: str, nbytes: int) -> int | str:
        """Width for one array. Arrays under `LOSSLESS_BELOW_BYTES` stay lossless unless a pattern names them."""
        width = LOSSLESS if nbytes < LOSSLESS_BELOW_BYTES else self._width
        for pattern, named in self._by_pattern.items():
            of_table, of_slot = _table_and_slot(pattern)
            if fnmatch.fnmatchcase(table, of_table) and fnmatch.fnmatchcase(slot, of_slot):
                width = named
                break
        if width != AUTO:
            return width
        return AUTO_FIRST if slot.partition("@")[0] in FIRST_MOMENTS else AUTO_STATE


def _table_and_slot(pattern: str) -> tuple[str, str]:
    """The patterns of a table's name, which may itself hold ``/``, and of a slot's."""
    table, slash, slot = pattern.rpartition("/")
    return (table, slot) if slash else (pattern, "*")
