"""Codes of rows that a follower has seen, so that the next rows relative to them need nothing read beneath them.

For each table whose rows may be relative: its codes in one version as int8, a quarter of a float32 table, and those of
the rows that the version after it changed. Which of the two later versions are relative to shows with the next one.
Codes are found again in values, since each value is its step times its code. A row whose codes are wider, or that was
not seen, is unknown and read from its chain. So is one that does not come out as the checksum of its segment says: what
is kept here is never trusted alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cnr_codecs import ParentError, Pending
from cnr_codecs.payload.coded import Grid, grid_values
from cnr_store.chains.allocation import Array
from cnr_store.chains.link import PENDING
from cnr_store.format.record import ArrayEntry

_MAX_CODE, _UNKNOWN = 127, -128


class SeenTable:
    """The codes of one table in one version, and of what a later version changed. Reads are thread-safe.

    `version`: whose codes they are.
    """

    def __init__(self, version: str, entry: ArrayEntry, step: float) -> None:
        self.version, self.step = version, step
        self._element = entry.element
        self._codes = np.empty((0, (*entry.shape, 1)[1]), np.int8)
        self._later: tuple[str, list[tuple[Array, Array]]] | None = None
        self._grow(entry.shape[0])

    def _grow(self, rows: int) -> None:
        if rows > len(self._codes):
            before, self._codes = self._codes, np.empty((rows, self._codes.shape[1]), np.int8)
            self._codes[: len(before)] = before
            self._codes[len(before) :, 0] = _UNKNOWN

    def go_to(self, version: str, entry: ArrayEntry) -> bool:
        """Hold the codes of a version, if that is one of the two known."""
        if self._later is not None and self._later[0] == version:
            for rows, codes in self._later[1]:
                self._codes[rows] = codes
            self.version = version
        self._later = None
        self._grow(entry.shape[0])
        return self.version == version and self._element == entry.element

    def codes_of(self, values: Array) -> Array:
        """The codes in values, int8 (n, columns)."""
        with np.errstate(invalid="ignore", over="ignore"):
            exact = np.rint(values.astype(np.float64) / self.step)
            fits = np.all(np.abs(exact) <= _MAX_CODE, axis=1)
        codes: Array = np.where(fits[:, None], exact, _UNKNOWN).astype(np.int8)
        return codes

    def put(self, rows: Array, values: Array) -> None:
        """Note rows of the version itself."""
        self._codes[rows] = self.codes_of(values)

    def put_later(self, version: str, changed: list[tuple[Array, Array]]) -> None:
        """Note all rows that a later version changed, with their codes."""
        self._later = version, changed

    def compose(self, first_row: int, out: Array, pending: Pending, relative: Array) -> Array:
        """Write the values of pending rows whose parents are known here, if checksums prove them.

        `first_row`, `out`: of the rows that are read.
        `pending`: what they are relative to this version.
        `relative`: bool (n,): which rows are pending.

        Returns: bool (n,): the rows that are still to be read otherwise.
        """
        rows = np.flatnonzero(relative)
        parents = self._codes[first_row + rows]
        known = parents[:, 0] != _UNKNOWN
        rows, left, grid = rows[known], relative.copy(), Grid(self.step)
        try:
            codes, wanted = parents[known].astype(np.int16), np.where(relative, PENDING, 0).astype(np.uint8)
            pending.settle(codes, rows.astype(np.uint32), wanted, 0, grid)
        except ParentError:
            return left
        left[rows] = False
        proven = np.zeros_like(left)
        for _, found, is_right in pending.checked(left):
            proven[found] = is_right
        is_proven = proven[rows]
        out[rows[is_proven]] = grid_values(codes[is_proven], grid, self._element)
        left[rows[~is_proven]] = True
        return left


class SeenCodes:
    """The codes of all tables of a store, by path."""

    def __init__(self) -> None:
        self._tables: dict[str, SeenTable] = {}

    def beneath(self, path: str, entry: ArrayEntry, base: str) -> SeenTable | None:
        """What was seen of a table in the version that rows of `entry` are relative to; None if no row can be."""
        step, table = _step(entry.codec), self._tables.pop(path, None)
        if step is None:
            return None
        if table is None or not table.go_to(base, entry) or table.step != step:
            table = SeenTable(base, entry, step)
        self._tables[path] = table
        return table

    def blank(self, path: str, entry: ArrayEntry, version: str) -> SeenTable | None:
        """Where the rows of a version that is read whole can be noted, to `keep` them; None if none can be relative."""
        self._tables.pop(path, None)
        step = _step(entry.codec)
        return None if step is None else SeenTable(version, entry, step)

    def keep(self, path: str, table: SeenTable) -> None:
        """Go by a table whose rows were all noted."""
        self._tables[path] = table


def _step(codec: Mapping[str, Any] | None) -> float | None:
    """The step of a codec whose rows may be relative."""
    if codec is None or codec.get("id") != "cnr_lattice" or codec.get("relative") is not True:
        return None
    step = codec.get("step")
    return float(step) if isinstance(step, int | float) else None
