"""What a store should hold, as plain dicts: a second account of saves, loads and policies, row by row."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from cnr_codecs import UniformRows, decode_into, parse
from tests.test_store.small_model import SHAPES, Array

Row = tuple[int, bytes]
"""A row at its last save: the width it was saved with, and its bytes."""

Bits = int | str | dict[str, int | str]


@dataclass(frozen=True)
class Content:
    """What one save asks for.

    Attributes
    ----------
    arrays
        By path and row number, the row at its last save.
    written
        By path, the rows that this version itself holds.
    whole
        Paths of the arrays that are written whole.
    changed
        By table, the rows flagged since its weight was last written whole.
    flagged
        By table, the rows flagged since the save before; forgotten only if this one is committed.
    other
        Everything else, exactly.
    earlier_sizes
        Sizes in bytes of the versions before it, back to the last one that leans on no other.
    """

    step: int
    policy: str
    arrays: dict[str, dict[int, Row]]
    written: dict[str, set[int]]
    whole: set[str]
    changed: dict[str, set[int]]
    flagged: dict[str, set[int]]
    other: dict[str, bytes]
    earlier_sizes: tuple[int, ...] = ()


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
    ) -> Content:
        """The content of a save that begins now; what it takes along is no longer flagged."""
        full = ask_full or asks_for_full(policy, self._sizes)
        flagged, self.flagged = self.flagged, _nothing()
        changed = {
            name: flagged[name] | (self._head.changed[name] if self._head else set()) for name in SHAPES
        }
        due = flagged if policy == "consecutive" else changed
        content = Content(step, policy, {}, {}, set(), changed, flagged, other)
        for path, values in rows.items():
            _, table, slot = path.split("/")
            older = self._head.arrays.get(path) if self._head else None
            everything = set(range(len(values)))
            if full or older is None or due[table] == everything:
                content.whole.add(path)
            written = everything if path in content.whole else due[table]
            width = width_of(bits, table) if slot == "weight" else 32
            saved = {row: (width, values[row].tobytes()) for row in written}
            content.arrays[path] = {**(older or {}), **saved}
            content.written[path] = written
        for table in SHAPES:
            if f"tables/{table}/weight" in content.whole:
                changed[table] = set()
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

    def failed(self, content: Content) -> None:
        """A save has told of its failure: what it took along is flagged again."""
        for table, rows in content.flagged.items():
            self.flag(table, rows)

    def loaded(self, version: str) -> Content:
        """A job goes on from a version."""
        self._head, self._sizes = self.versions[version], self._sizes_of[version]
        self.flagged = _nothing()
        return self._head

    @property
    def newest(self) -> str | None:
        return list(self.versions)[-1] if self.versions else None


def _nothing() -> dict[str, set[int]]:
    return {name: set() for name in SHAPES}


FORETOLD = ("full", "one-shot", "consecutive", "intermittent")
"""Policies whose decisions this account makes on its own."""


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


def width_of(bits: Bits, table: str) -> int:
    """Bits that a table's weight is stored with: those of its name, else 32 under 16 KiB."""
    rows, dim = SHAPES[table]
    if isinstance(bits, dict):
        chosen = bits.get(table, 8 if rows * dim * 4 >= 16 * 1024 else 32)
    else:
        chosen = bits if rows * dim * 4 >= 16 * 1024 else 32
    return 8 if chosen == "auto" else int(chosen)


@functools.lru_cache(maxsize=1 << 18)
def restored(row: Row) -> bytes:
    """dequantize(quantize(row)), of this row alone; with 32 bits nothing may change."""
    width, data = row
    if width == 32:
        return data
    values = np.frombuffer(data, np.float32)[None]
    codec = UniformRows(scheme="adaptive", bits=width)
    payload = parse(codec.encode_rows(values, None, 1, element="float32"))
    out = np.empty_like(values)
    decode_into(payload, out, np.ones(1, np.uint8))
    return out.tobytes()
