"""Codes of rows on a lattice: those that rows have in the version that a delta depends on, and those that a save gives.

They stand in memory as int8, a quarter of a float32 table, on floating grids as int16, and outlive no process. A row
whose codes are wider, or were not encoded here, is unknown: its next delta is not relative.

A byte of this memory that is another than it was would give a delta that no reader can compose: its checksums say so.
So before a delta is written, some of the codes are compared with what is stored: see `lineage.check_parents`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs import FloatingRows, Followed, LatticeRows, Packer, RowCodec
from cnr_codecs.payload.coded import Grid

Codes = npt.NDArray[np.signedinteger[Any]]
Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[np.int64]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class RowCodes:
    """The codes of the rows of one write."""

    # (n, columns): those that they get, noted as they are encoded; None where nobody asks for them
    made: Codes | None
    # The codes of all rows held, as the delta's base has them; None if no row may be relative
    parent: Codes | None = None
    rows: RowIds | None = None  # (n,): where the rows lie in `parent`

    def known(self, begin: int, end: int) -> tuple[RowIds, Codes]:
        """Which of the rows at positions `begin` to `end` of the write have known parents, and their parents' codes."""
        assert self.parent is not None
        assert self.rows is not None
        codes = self.parent[self.rows[begin:end]]
        found = np.flatnonzero(_are_known(codes))
        return found + begin, codes[found]

    def forget_parents(self) -> None:
        """Make all rows of the array unknown, also to later deltas: none is written relative."""
        if self.parent is not None:
            self.parent[:, 0] = _unknown_code(self.parent.dtype)

    def encode(
        self,
        codec: RowCodec,
        values: Array,
        begin: int,
        offsets: Array | None,
        chunk_rows: int,
        element: str,
        seal: int,
        quantized: tuple[npt.NDArray[np.int16], Mask] | None = None,
    ) -> bytes:
        """The payload of a chunk, as `RowCodec.encode_rows` makes it, with rows relative to their parents.

        `codec`: that of the write.
        `values`, `offsets`, `chunk_rows`, `element`, `seal`: as for `encode_rows`.
        `begin`: position of the first of these rows in the write.
        `quantized`: as for `LatticeRows.encode_over`, if codes were computed elsewhere: the codec is that of a grid
        then.
        """
        own = codec if quantized and isinstance(codec, LatticeRows | FloatingRows) else relative_codec(codec)
        if own is None or grid_of(own) is None:
            return codec.encode_rows(values, offsets, chunk_rows, element=element, seal=seal)
        parent = self._parents(begin, values.shape)
        known = _are_known(parent)
        made = own.encode_over(
            values, offsets, chunk_rows, parent, known, element=element, seal=seal, quantized=quantized
        )
        data = self._noted(begin, *made)
        then = tuple(codec.then) if isinstance(codec, Followed) else ()
        return Packer(then).pack(data, chunk_rows, values.shape[1], element) if then else data

    def _parents(self, begin: int, shape: tuple[int, ...]) -> Codes:
        if self.parent is None or self.rows is None:
            return np.broadcast_to(_unknown_code(np.int8), shape)
        return self.parent[self.rows[begin : begin + shape[0]]]

    def _noted(self, begin: int, data: bytes, codes: Codes, coded: Mask) -> bytes:
        """The payload, once the codes of its rows are noted."""
        if self.made is not None:
            most = np.iinfo(self.made.dtype).max
            fits = np.flatnonzero(coded & (np.abs(codes) <= most).all(axis=1))
            self.made[begin : begin + len(codes)][fits] = codes[fits]
        return data


@dataclass(frozen=True, eq=False)
class _Write:
    """What a save writes of an array."""

    codes: RowCodes
    base: str | None
    rows: RowIds | None
    first_row: int
    shape: tuple[int, int]


@dataclass(eq=False)
class _Known:
    """What is known of an array in one version: the grid, and the codes of the rows from `first_row` on."""

    version: str | None
    grid: Grid
    first_row: int
    codes: Codes

    def fits(self, base: str | None, grid: Grid | None, first_row: int, shape: tuple[int, int]) -> bool:
        """Whether these are the codes of such rows in the version `base`."""
        found = self.version, self.grid, self.first_row, self.codes.shape
        return base is not None and found == (base, grid, first_row, shape)


class CodeCache:
    """The codes that this process knows of rows, by path of their array.

    They belong to a version by its id, and are used by deltas over that version alone: so no failed save, rollback or
    fold can put other rows beneath a delta.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._writes: dict[str, _Write] = {}

    def clear(self) -> None:
        """Forget all codes: the next deltas are not relative."""
        self._known, self._writes = {}, {}

    @property
    def written(self) -> Collection[str]:
        """Paths of the arrays whose last writes had codes."""
        return self._writes.keys()

    def for_write(
        self,
        path: str,
        codec: RowCodec,
        base: str | None,
        rows: RowIds | None,
        first_row: int,
        shape: tuple[int, int],
        *,
        parts: Sequence[tuple[int, int]] = (),
        is_kept: bool,
    ) -> RowCodes | None:
        """The codes for a write of an array; None if its codec has no relative rows, or rows are held in part only.

        `path`, `codec`, `base`: of the write.
        `rows`: (n,): the rows written, of those held; None for all.
        `first_row`, `shape`: the first row held; how many rows and columns are.
        `parts`: first column and number of columns of what is held; () where no other rank has any.
        `is_kept`: whether later deltas may depend on the version that is written.
        """
        self._writes.pop(path, None)  # of a save that was not committed
        own = relative_codec(codec)
        if own is None or parts not in ((), ((0, shape[1]),)):
            return None
        known, parent = self._known.get(path), None
        if known is not None and rows is not None and known.fits(base, grid_of(own), first_row, shape):
            parent = known.codes
        dtype, count = (
            np.int8 if isinstance(own, LatticeRows) else np.int16,
            shape[0] if rows is None else len(rows),
        )
        made = _unknown((count, shape[1]), dtype) if is_kept else None
        codes = RowCodes(made, parent, rows)
        self._writes[path] = _Write(codes, base, rows, first_row, shape)
        return codes

    def commit(self, version: str, grids: Mapping[str, Grid | None]) -> None:
        """Keep the codes of a save that was committed. A second call may only forget some.

        `version`: what it was committed as.
        `grids`: by path of an array of which rows were written: their grid, None if they have none in common.
        """
        for path, write in self._writes.items():
            made, grid = write.codes.made, grids.get(path)
            if made is None or path not in grids:
                continue
            if grid is None:
                self._known.pop(path, None)
            elif write.base is None or write.rows is None:
                self._known[path] = _Known(version, grid, write.first_row, made)
            else:
                known = self._known.get(path)
                if known is None or not known.fits(write.base, grid, write.first_row, write.shape):
                    blank = _unknown(write.shape, made.dtype)
                    known = self._known[path] = _Known(None, grid, write.first_row, blank)
                known.version = None  # an interrupt must not leave codes of two versions under one id
                known.codes[write.rows] = made
                known.version = version


def relative_codec(codec: RowCodec) -> LatticeRows | FloatingRows | None:
    """The codec itself, without those that follow, if its rows may be relative."""
    own = codec.codec if isinstance(codec, Followed) else codec
    return own if isinstance(own, LatticeRows | FloatingRows) and own.relative else None


def grid_of(codec: LatticeRows | FloatingRows) -> Grid | None:
    """The grid of a codec's rows; None as long as there is no step."""
    if isinstance(codec, FloatingRows):
        return Grid(mantissa=codec.mantissa_bits)
    return None if codec.step is None else Grid(codec.step)


def _unknown_code(dtype: npt.DTypeLike) -> np.signedinteger[Any]:
    """In the first column: the row's codes are not known. Codes that are known are none below its negative."""
    info = np.iinfo(dtype)
    found: np.signedinteger[Any] = info.dtype.type(info.min)
    return found


def _are_known(codes: Codes) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = codes[:, 0] != _unknown_code(codes.dtype)
    return known


def _unknown(shape: tuple[int, int], dtype: npt.DTypeLike) -> Codes:
    codes: Codes = np.empty(shape, dtype)
    codes[:, 0] = _unknown_code(dtype)
    return codes
