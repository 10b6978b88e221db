"""What this process knows of stored rows, their codes or digests, and the payloads that are made of rows to write.

Codes stand in memory as int8, a quarter of a float32 table, on floating grids as int16. Where there is no room for
them, digests of 8 bytes a row tell which rows changed, and none of these is relative.
Those of 23 bits of mantissa take as much as their rows, int32: they are kept where rows may be relative, which callers
ask for. Else of these digests alone are kept.
They outlive no process. A row whose codes are wider has a digest beside them, and its next delta is not relative.
Nothing is known of a row that was not encoded here: it is written by the next save.

A byte of this memory that is another than it was would give a delta that no reader can compose: its checksums say so.
So before a delta is written, some of the codes are compared with what is stored: see `lineage.check_parents`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from cnr_codecs import FloatingRows, Followed, LatticeRows, RowCodec, UniformRows
from cnr_codecs.comparing import (
    SAME,
    UNKNOWN,
    Codes,
    Digests,
    code_dtype,
    compare_rows,
    read_codes,
    row_digests,
    stored_digests,
    unknown_code,
)
from cnr_codecs.lattice.segments import RowCounts
from cnr_codecs.payload.coded import Grid
from cnr_codecs.protocol import Offsets, encode_chunks
from cnr_codecs.uniform.uniform import QuantizedRows
from cnr_store.chains.link import Strays
from cnr_store.format.record import STILL

Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[np.int64]
Array = np.ndarray[Any, Any]

log = logging.getLogger("cnr_store")

LEAST_DIGESTED_BYTES = 16
"""Of a row: narrower ones without codes are not compared, as a digest takes 8."""
# Of digests. Another one in each process, so that nobody can make rows whose digests collide.
KEY = int.from_bytes(os.urandom(8), "little")


@dataclass(frozen=True, eq=False)
class RowCodes:
    """What is known of the rows of one write beneath it, and what is noted of them as they are encoded.

    `made` is not filled beforehand: fresh memory takes several times as long as what is written to it, and training
    waits meanwhile.
    """

    # (n, columns): the codes that rows get which are `noted`; None where nobody asks for them
    made: Codes | None
    # The codes of all rows held, as the delta's base has them; None if no row may be relative
    parent: Codes | None = None
    rows: RowIds | None = None  # (n,): where the rows lie in `parent`; None for all of them
    digests: Digests | None = None  # (n,): digests that rows without codes get; 0 of others
    noted: Mask | None = None  # (n,): whose codes are in `made`
    # What is known of the array once the write is committed: the rows held, and the configuration of the codec
    first_row: int = 0
    shape: tuple[int, int] = (0, 0)
    codec: Mapping[str, Any] = field(default_factory=dict)
    is_gridded: bool = False

    def known(self, begin: int, end: int) -> tuple[RowIds, Codes]:
        """Which of the rows at positions `begin` to `end` of the write have known parents, and their parents' codes."""
        codes = self._parents(begin, (end - begin, 1))
        found = np.flatnonzero(_are_known(codes))
        return found + begin, codes[found]

    def forget_parents(self) -> None:
        """Make all rows of the array unknown, also to later deltas: none is written relative."""
        if self.parent is not None:
            self.parent[:, 0] = unknown_code(self.parent.dtype)

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
    ) -> tuple[bytes, RowCounts]:
        """The payload of a chunk, as `RowCodec.encode_rows` makes it, with rows relative to their parents.

        `codec`: that of the write, on a grid.
        `values`, `offsets`, `chunk_rows`, `element`, `seal`: as for `encode_rows`.
        `begin`: position of the first of these rows in the write.
        `quantized`: as for `LatticeRows.encode_over`, if codes were computed elsewhere.

        Returns: with it how many of the rows are stored otherwise than on the grid.
        """
        own = gridded_codec(codec)
        assert own is not None
        parent = self._parents(begin, values.shape)
        known = _are_known(parent)
        data, codes, coded, counts = own.encode_over(
            values, offsets, chunk_rows, parent, known, element=element, seal=seal, quantized=quantized
        )
        self._note_codes(begin, values, codes, coded, coded if quantized else None)
        if isinstance(codec, Followed):
            data = codec.compressors.pack(data, chunk_rows, values.shape[1], element)
        return data, counts

    def _parents(self, begin: int, shape: tuple[int, ...]) -> Codes:
        if self.parent is None:
            return np.broadcast_to(np.int8(unknown_code(np.int8)), shape)
        end = begin + shape[0]
        return self.parent[begin:end] if self.rows is None else self.parent[self.rows[begin:end]]

    def all_made(self) -> Codes | None:
        """The codes of all rows. Those that were not noted are unknown."""
        if self.made is not None and self.noted is not None:
            self.made[~self.noted, 0] = unknown_code(self.made.dtype)
        return self.made

    @property
    def known_digests(self) -> Digests | None:
        """The digests, if there are any: beside codes most rows need none."""
        return (
            self.digests if self.made is None or (self.digests is not None and self.digests.any()) else None
        )

    def note(self, begin: int, values: Array) -> None:
        """Note rows of a codec without codes, from this position of the write on."""
        if self.digests is not None:
            self.digests[begin : begin + len(values)] = row_digests(values, KEY)

    def _note_codes(self, begin: int, values: Array, codes: Codes, coded: Mask, absent: Mask | None) -> None:
        """Note the codes of rows, and digests of those without, but of the rows whose values are `absent`."""
        own, fits = slice(begin, begin + len(codes)), coded
        if self.made is not None:
            most = np.iinfo(self.made.dtype).max
            fits = coded & ((codes <= most) & (codes >= -most)).all(axis=1)
            self.made[own][fits] = codes[fits]
            if self.noted is not None:
                self.noted[own][fits] = True
        elif self.digests is not None:
            self.digests[own][coded] = row_digests(codes[coded], KEY)
        others = ~fits if absent is None else ~(fits | absent)
        if self.digests is not None and others.any():
            self.digests[own][others] = row_digests(values[others], KEY)


@dataclass(eq=False)
class Known:
    """What is known of an array in one version, of the rows from `first_row` on.

    Codes on `grid`, and where they are unknown a digest; or digests alone, of codes on `grid`, or without one of rows
    that `codec` encoded.
    """

    version: str | None
    grid: Grid | None
    first_row: int
    shape: tuple[int, int]
    codes: Codes | None
    digests: Digests | None  # (rows,); 0 where nothing is known
    codec: Mapping[str, Any]
    of_whole: bool = False  # of what is read: whether it is the whole version beneath deltas

    def part(self, first_row: int, shape: tuple[int, int]) -> Known | None:
        """What is known of some of these rows; None if they are not among them."""
        if (first_row, shape) == (self.first_row, self.shape):
            return self
        begin, end = first_row - self.first_row, first_row - self.first_row + shape[0]
        if begin < 0 or end > self.shape[0] or shape[1] != self.shape[1]:
            return None
        codes = None if self.codes is None else self.codes[begin:end].copy()
        digests = None if self.digests is None else self.digests[begin:end].copy()
        return replace(self, first_row=first_row, shape=shape, codes=codes, digests=digests)

    def read(self, values: Array, begin: int, element: str, newer: Mask, strays: Array | None) -> None:
        """Learn of rows as they were read, from `begin` on.

        `newer`: which of them deltas over the whole version have.
        `strays`: of `chains.link.Strays`; None without a grid.
        """
        end = begin + len(values)
        assert self.digests is not None
        if self.codes is None or self.grid is None:
            self.digests[begin:end] = self._digests(values, element)
        else:
            codes = self.codes[begin:end]
            lacking = read_codes(values, self.grid, element, codes)
            if strays is not None:
                codes[strays != 0, 0] = unknown_code(codes.dtype)
                lacking |= strays != 0
            if lacking.any():
                self.digests[begin:end][lacking] = row_digests(values[lacking], KEY)
            if strays is not None:
                self.digests[begin:end][strays == Strays.OTHER] = 0  # they may move where the grid does
            if self.of_whole:
                codes[newer, 0] = unknown_code(codes.dtype)
        if self.of_whole:
            self.digests[begin:end][newer] = 0

    def changed(self, values: Array, begin: int, element: str) -> Mask:
        """Which of the rows from `begin` on, of the array type, are to be written."""
        end = begin + len(values)
        if self.codes is None:
            assert self.digests is not None
            other: Mask = self._digests(values, element) != self.digests[begin:end]
            return other
        assert self.grid is not None
        found = compare_rows(values, self.codes[begin:end], self.grid, element)
        changed: Mask = found != SAME
        unknown = np.flatnonzero(found == UNKNOWN)
        if self.digests is not None and len(unknown):
            digests = row_digests(values[unknown], KEY)
            changed[unknown] = digests != self.digests[begin:end][unknown]
        return changed

    def _digests(self, values: Array, element: str) -> Digests:
        if self.grid is None:
            return row_digests(values, KEY)
        return stored_digests(values, self.grid, element, KEY)


class CodeCache:
    """What this process knows of stored rows, by path of their array.

    It belongs to a version by its id, and is used by deltas over that version alone: so no failed save, rollback or
    fold can put other rows beneath a delta.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._known: dict[str, Known] = {}
        self._writes: dict[str, RowCodes] = {}
        self._free_bytes, self._room = free_bytes, -1  # of memory that codes may take; not asked for yet
        self._has_codes: dict[str, bool] = {}

    def has_room(self, path: str, shape: tuple[int, int], grid: Grid | None) -> bool:
        """Whether the codes of an array are kept: half of the free memory holds those of all arrays twice.

        While a whole version is written, there are those of the one before. It is decided once for each array.
        """
        if path not in self._has_codes:
            self._room = self._free_bytes() // 2 if self._room < 0 else self._room
            nbytes = 2 * math.prod(shape) * code_dtype(grid).itemsize
            if nbytes > self._room and all(self._has_codes.values()):
                log.warning(
                    "%s: its codes take %.1f MB of memory, and %.1f MB are left. Digests of 8 bytes a row take the "
                    "place of codes here and wherever there is no room: deltas take more bytes. explain() shows both",
                    *(path, nbytes / 2e6, self._room / 2e6),
                )
            self._has_codes[path] = nbytes <= self._room
            self._room -= nbytes if self._has_codes[path] else 0
        return self._has_codes[path]

    def may_have_codes(self, path: str) -> bool:
        """Whether the codes of an array are kept, as far as is decided."""
        return self._has_codes.get(path, True)

    def new_codes(self, path: str, shape: tuple[int, int], grid: Grid | None) -> Codes | None:
        """Codes of an array, none of which is known as yet; None where there is no grid, or no room for them."""
        has_codes = grid is not None and self.has_room(path, shape, grid)
        return _unknown(shape, code_dtype(grid)) if has_codes else None

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Bytes of memory that codes take, of these the exact ones, and digests."""
        known = self._known.values()
        codes = [each.codes for each in known if each.codes is not None]
        exact = sum(each.nbytes for each in codes if each.dtype == np.int32)
        digests = sum(each.digests.nbytes for each in known if each.digests is not None)
        return sum(each.nbytes for each in codes), exact, digests

    def clear(self) -> None:
        """Forget all: the next deltas are not relative, and nothing can be compared."""
        self._known, self._writes = {}, {}

    @property
    def written(self) -> Collection[str]:
        """Paths of the arrays of whose last writes something is noted."""
        return self._writes.keys()

    def find(
        self, path: str, codec: RowCodec, base: str | None, first_row: int, shape: tuple[int, int]
    ) -> Known | None:
        """What is known of such rows in the version `base`, if the codec would store them there as they are stored."""
        known = self._known.get(path)
        known = known.part(first_row, shape) if known is not None and known.version == base else None
        if known is None or base is None:
            return None
        self._known[path] = known  # a load notes also rows that other ranks write
        own = gridded_codec(codec)
        if known.grid is None:
            return known if known.codec == codec.get_config() else None
        return known if own is not None and is_same_grid(known.grid, grid_of(own)) else None

    def adopt(self, path: str, known: Known, version: str) -> None:
        """Take what was read of an array, as it is in a version."""
        if known.digests is not None and not known.digests.any() and known.codes is not None:
            known.digests = None
        known.version = version
        self._known[path] = known

    def for_write(
        self,
        path: str,
        codec: RowCodec,
        base: str | None,
        rows: RowIds | None,
        first_row: int,
        shape: tuple[int, int],
        *,
        is_kept: bool,
        is_compared: bool = False,
    ) -> RowCodes | None:
        """What a write of an array, of whole rows, has to note; None if nothing.

        `path`, `codec`, `base`: of the write.
        `rows`: (n,): the rows written, of those held; None for all.
        `first_row`, `shape`: the first row held; how many rows and columns are.
        `is_kept`: whether later deltas may depend on the version that is written.
        `is_compared`: whether later saves compare the array with it.
        """
        self._writes.pop(path, None)  # of a save that was not committed
        own, is_relative = gridded_codec(codec), relative_codec(codec) is not None
        if not (is_relative or is_compared):
            return None
        parent, count = None, shape[0] if rows is None else len(rows)
        if is_relative and base is not None:
            known = self.find(path, codec, base, first_row, shape)
            parent = None if known is None else known.codes
        made = digests = noted = None
        if is_kept and own is not None and self.has_room(path, shape, grid_of(own)):
            made = np.empty((count, shape[1]), code_dtype(grid_of(own)))
            noted = np.zeros(count, np.bool_)
        if is_kept and is_compared:
            digests = np.zeros(count, np.uint64)
        place = first_row, shape, codec.get_config(), own is not None
        codes = self._writes[path] = RowCodes(made, parent, rows, digests, noted, *place)
        return codes

    def commit(self, version: str, grids: Mapping[str, Grid | None]) -> None:
        """Keep what was noted of a save that was committed. A second call changes nothing.

        `version`: what it was committed as.
        `grids`: by path of an array of which rows were written: their grid, None if they have none in common.
        """
        for path, write in self._writes.items():
            made, digests = write.all_made(), write.known_digests
            if path not in grids or (made is None and digests is None):
                continue
            grid = grids[path] if write.is_gridded else None
            if write.is_gridded and grid is None:
                self._known.pop(path, None)
            elif write.rows is None:
                own = version, grid, write.first_row, write.shape, made, digests, write.codec
                self._known[path] = Known(*own)
            else:
                self._put(path, write, version, grid)

    def _put(self, path: str, write: RowCodes, version: str, grid: Grid | None) -> None:
        """Put what was noted of some rows over what is known of all of them in the version before.

        Every version that wrote rows of the array has noted these: one whose rows are not compared, and then are, is
        whole.
        """
        made, digests, known = write.made, write.known_digests, self._known.get(path)
        if (
            known is None
            or not is_same_grid(known.grid, grid)
            or (known.codes is None) != (made is None)
            or known.version is None
            or (known.first_row, known.shape) != (write.first_row, write.shape)
        ):
            blank = None if made is None else _unknown(write.shape, made.dtype)
            own = None, grid, write.first_row, write.shape, blank, None, write.codec
            known = self._known[path] = Known(*own)
        known.grid = grid  # moved, if it is another
        known.version = None  # an interrupt must not leave what is known of two versions under one id
        if digests is not None and known.digests is None:
            known.digests = np.zeros(write.shape[0], np.uint64)
        if made is not None and known.codes is not None:
            known.codes[write.rows] = made
        if known.digests is not None:
            known.digests[write.rows] = 0 if digests is None else digests
        known.version = version


def relative_codec(codec: RowCodec) -> LatticeRows | FloatingRows | None:
    """The codec itself, without those that follow, if its rows may be relative."""
    own = gridded_codec(codec)
    return own if own is not None and own.relative else None


def gridded_codec(codec: RowCodec) -> LatticeRows | FloatingRows | None:
    """The codec itself, without those that follow, if its rows are on a grid whose codes are kept."""
    own = codec.codec if isinstance(codec, Followed) else codec
    if not isinstance(own, LatticeRows | FloatingRows) or (is_exact(own) and not own.relative):
        return None
    return own


def is_exact(codec: RowCodec | None) -> TypeGuard[FloatingRows]:
    """Whether the codes of a codec's rows have all their bits."""
    return isinstance(codec, FloatingRows) and codec.grid.is_exact


def is_same_grid(one: Grid | None, other: Grid | None) -> bool:
    """Whether integers of one are those of the other, wherever they have moved to."""
    return one == other or (one is not None and other is not None and one.at(*STILL) == other.at(*STILL))


def grid_of(codec: LatticeRows | FloatingRows) -> Grid | None:
    """The grid of a codec's rows; None as long as there is no step."""
    if isinstance(codec, FloatingRows):
        return codec.grid
    return None if codec.step is None else Grid(codec.step)


def _are_known(codes: Codes) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = codes[:, 0] != unknown_code(codes.dtype)
    return known


def _unknown(shape: tuple[int, int], dtype: npt.DTypeLike) -> Codes:
    codes: Codes = np.empty(shape, dtype)
    codes[:, 0] = unknown_code(dtype)
    return codes


@dataclass(frozen=True)
class CodedRows:
    """Rows that a device has quantized, with the codec of their write."""

    codes: QuantizedRows | npt.NDArray[np.int16]  # of `UniformRows`; or (n, columns): on a grid
    is_raw: Mask  # (n,): which rows are stored as they are
    raw_values: Array  # (m, columns): their values


Block = Array | CodedRows
"""Rows: their values, (n, columns) and C-contiguous, or codes that are ready."""


class Rows(Protocol):
    """Where the rows of a write come from."""

    def block(self, begin: int, end: int) -> Block:
        """The rows at positions begin ... end - 1 of the write's ids."""


def encode_block(
    codec: RowCodec,
    block: Block,
    offsets: Offsets | None,
    edges: Sequence[int],
    rows: int,
    *,
    element: str,
    seals: Sequence[int],
    begin: int = 0,
    codes: RowCodes | None = None,
    counted: list[RowCounts] | None = None,
) -> list[bytes]:
    """The payloads of chunks that follow one another: every one that a save encodes is made here.

    `codec`, `offsets`, `edges`, `rows`, `element`, `seals`: as for `cnr_codecs.protocol.encode_chunks`.
    `begin`: the position of the first row in the write.
    `codes`: the parents of rows that may be relative, and what is noted of the rows; None for neither.
    `counted`: gets how the rows of each chunk on a grid are stored.
    """
    if isinstance(block, CodedRows):
        made, is_raw, raw_values = block.codes, block.is_raw, block.raw_values
        if isinstance(made, QuantizedRows):
            assert isinstance(codec, UniformRows)
            return codec.encode_codes(made, raw_values, offsets, edges, rows, element=element, seals=seals)
        values = np.zeros(made.shape, raw_values.dtype)
        values[is_raw] = raw_values  # others are not looked at
    elif gridded_codec(codec) is None:
        if codes is not None:
            codes.note(begin, block)
        return encode_chunks(codec, block, offsets, edges, rows, element=element, seals=seals)
    else:
        values, made = block, None
    codes, counted, payloads = codes or RowCodes(None), [] if counted is None else counted, []
    for (first, last), seal in zip(pairwise(edges), seals, strict=True):
        own, places = slice(first, last), None if offsets is None else offsets[first:last]
        quantized = None if made is None else (made[own][~is_raw[own]], is_raw[own])
        of_chunk = values[own], begin + first, places, rows, element, seal, quantized
        payload, counts = codes.encode(codec, *of_chunk)
        payloads.append(payload)
        counted.append(counts)
    return payloads
