"""What a store should hold, as plain dicts: a second account of saves, loads and policies, row by row."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from cnr_codecs import FloatingRows, LatticeRows, UniformRows, decode_into, parse
from cnr_store.training.saving.never_below_codec import CeilingRows
from tests.test_store.support.small_model import SHAPES, Array

Codec = UniformRows | CeilingRows | FloatingRows | LatticeRows | None
Row = tuple[Codec, bytes]
"""A row at its last save: what it was saved by, None for lossless, and its bytes."""

Bits = int | str | dict[str, int | str]
RELATIVE = LatticeRows(step=2.0**-6, relative=True)
"""The codec of tables whose `bits` are "relative"."""
StateBits = int | str | dict[str, int | str]


@dataclass(frozen=True)
class Content:
    """What one save asks for.

    Attributes
    ----------
    kind
        ``full``, or what a delta holds changes since: ``baseline`` or ``previous``.
    arrays
        By path and row number, the row at its last save.
    written
        By path, the rows that this version itself holds.
    whole
        Paths of the arrays that are written whole.
    changed
        By path, the rows flagged since the array was last written whole.
    flagged
        By table, the rows flagged since the save before; forgotten only if this one is committed.
    other
        Everything else, exactly.
    earlier_sizes
        Sizes in bytes of the versions before it, back to the last one that leans on no other.
    """

    step: int
    kind: str
    arrays: dict[str, dict[int, Row]]
    written: dict[str, set[int]]
    whole: set[str]
    changed: dict[str, set[int]]
    flagged: dict[str, set[int]]
    other: dict[str, bytes]
    earlier_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """A save that has begun: what it asks for, by what the policy may decide. Only ``auto`` leaves that open.

    Attributes
    ----------
    contents
        By ``full``, ``baseline`` or ``previous``: what a delta holds changes since.
    """

    contents: dict[str, Content]

    @property
    def flagged(self) -> dict[str, set[int]]:
        return next(iter(self.contents.values())).flagged

    def made(self, decision: Mapping[str, Any]) -> Content:
        """What was asked for, as the version's record says that it was decided."""
        return self.contents["full" if decision["full"] else decision["since"]]


@dataclass
class Expected:
    """The versions of one store, in the order they were committed, and what the job that saves has flagged."""

    versions: dict[str, Content] = field(default_factory=dict)
    flagged: dict[str, set[int]] = field(default_factory=lambda: _nothing())
    _head: Content | None = None
    _sizes: tuple[int, ...] = ()
    _sizes_of: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def flag(self, table: str, rows: Iterable[int]) -> None:
        self.flagged[table].update(rows)

    def attempt(
        self,
        step: int,
        rows: Mapping[str, Array],
        other: dict[str, bytes],
        policy: str,
        bits: Bits,
        ask_full: bool,
        state_bits: StateBits = 32,
    ) -> Attempt:
        """What a save that begins now asks for; what it takes along is no longer flagged."""
        if ask_full or asks_for_full(policy, self._sizes):
            kinds = ["full"]
        elif policy == "auto":
            kinds = ["full", "baseline", "previous"]
        else:
            kinds = ["previous" if policy == "consecutive" else "baseline"]
        flagged, self.flagged = self.flagged, _nothing()
        codecs = {path: codec_of(path, bits, state_bits) for path in rows}
        return Attempt({kind: self._content(kind, step, rows, other, codecs, flagged) for kind in kinds})

    def _content(
        self,
        kind: str,
        step: int,
        rows: Mapping[str, Array],
        other: dict[str, bytes],
        codecs: Mapping[str, Codec],
        flagged: dict[str, set[int]],
    ) -> Content:
        head = self._head
        changed = {
            path: flagged[path.split("/")[1]] | (head.changed.get(path, set()) if head else set())
            for path in rows
        }
        due = {path: flagged[path.split("/")[1]] for path in rows} if kind == "previous" else changed
        content = Content(step, kind, {}, {}, set(), dict(changed), flagged, other)
        worth = _worth_whole(kind, due, rows, codecs)
        for path, values in rows.items():
            older = head.arrays.get(path) if head else None
            if kind == "full" or older is None or path in worth:
                content.whole.add(path)
                content.changed[path] = set()
            written = set(range(len(values))) if path in content.whole else due[path]
            saved = {row: (codecs[path], values[row].tobytes()) for row in written}
            content.arrays[path] = {**(older or {}), **saved}
            content.written[path] = written
        # A version that leans on no other is a full one, whoever asked for it.
        return replace(content, earlier_sizes=() if content.whole == rows.keys() else self._sizes)

    def committed(self, version: str, content: Content, nbytes: int) -> None:
        """A save has told of its success."""
        self.appeared(version, content, nbytes)
        self._head, self._sizes = content, self._sizes_of[version]

    def appeared(self, version: str, content: Content, nbytes: int) -> None:
        """A version is in the store, whether or not its writer knows."""
        self.versions[version] = content
        self._sizes_of[version] = (*content.earlier_sizes, nbytes)

    def failed(self, attempt: Attempt) -> None:
        """A save has told of its failure: what it took along is flagged again."""
        for table, rows in attempt.flagged.items():
            self.flag(table, rows)

    def loaded(self, version: str) -> Content:
        """A job goes on from a version."""
        self._head, self._sizes = self.versions[version], self._sizes_of[version]
        self.flagged = _nothing()
        return self._head

    @property
    def newest(self) -> str | None:
        return list(self.versions)[-1] if self.versions else None


def _worth_whole(
    kind: str, due: Mapping[str, set[int]], rows: Mapping[str, Array], codecs: Mapping[str, Codec]
) -> set[str]:
    """Arrays of which all rows are due are whole: not a few rows, if others lean on the baseline anyway.

    Rows relative to others take less as a delta.
    """
    tables = {path: path.split("/")[1] for path in rows}
    relative = {table for path, table in tables.items() if codecs[path] is RELATIVE}
    changed = {
        path
        for path, table in tables.items()
        if len(due[path]) == SHAPES[table][0]
        and not (table in relative and isinstance(codecs[path], LatticeRows | FloatingRows))
    }
    sizes = {f"tables/{name}/weight": count * dim for name, (count, dim) in SHAPES.items()}
    is_much = 8 * sum(sizes.get(path, 0) for path in changed) >= sum(sizes.values())
    return changed if kind == "previous" or is_much else set()


def _nothing() -> dict[str, set[int]]:
    return {name: set() for name in SHAPES}


FORETOLD = ("full", "one-shot", "consecutive", "intermittent")
"""Policies whose decisions this account makes on its own."""

POLICIES = (*FORETOLD, "auto")


def asks_for_full(policy: str, sizes_bytes: tuple[int, ...]) -> bool:
    """Whether a policy wants all tables whole, from the sizes of the last full version and the deltas since.

    Intermittent differentials compare, in shares of the full version, what the last intervals cost with what as
    many intervals will cost at least if each is no cheaper than the last.
    """
    if policy == "full" or not sizes_bytes:
        return True
    if policy != "intermittent" or len(sizes_bytes) == 1:
        return False
    shares = [Fraction(size, sizes_bytes[0]) for size in sizes_bytes[1:]]
    return 1 + sum(shares) <= (len(shares) + 1) * shares[-1]


def codec_of(path: str, bits: Bits, state_bits: StateBits) -> Codec:
    """What an array's rows are stored by: what its table, or its name, is given, else lossless under 16 KiB."""
    _, table, slot = path.split("/")
    rows, dim = SHAPES[table]
    is_large = rows * dim * 4 >= 16 * 1024
    if slot != "weight":
        width = _width_of_state(state_bits, table, slot, is_large)
        if isinstance(width, str):
            return FloatingRows(int(width[1]))
        return None if width == 32 else CeilingRows(width)
    unnamed = bits if is_large and not isinstance(bits, dict) else 8 if is_large else 32
    chosen = bits.get(table, unnamed) if isinstance(bits, dict) else unnamed
    if chosen == "relative":
        return RELATIVE
    width = 8 if chosen == "auto" else int(chosen)
    return None if width == 32 else UniformRows(scheme="adaptive", bits=width)


def _width_of_state(bits: StateBits, table: str, slot: str, is_large: bool) -> int | str:
    if not isinstance(bits, dict):
        return bits if is_large else 32
    names = (f"{table}/{slot}", f"{table}/*", f"*/{slot}", table)
    return next((bits[name] for name in names if name in bits), 32)


@functools.lru_cache(maxsize=1 << 18)
def restored(row: Row) -> bytes:
    """dequantize(quantize(row)), of this row alone; where it is lossless nothing may change."""
    codec, data = row
    if codec is None:
        return data
    values = np.frombuffer(data, np.float32)[None]
    payload = parse(codec.encode_rows(values, None, 1, element="float32"))
    out = np.empty_like(values)
    decode_into(payload, out, np.ones(1, np.uint8))
    return out.tobytes()
