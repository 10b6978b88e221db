"""Decodes wanted rows of lattice and of relative segments, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import round_to_bfloat16
from cnr_codecs.entropy.lines import BLOCK_LINES, block_room
from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.lattice import add_rows, place_floating, place_rows, settle_rows
from cnr_codecs.payload.coded import (
    MANTISSA_BITS,
    MAX_CODE,
    MAX_DIFFERENCE,
    CodedRows,
    checksum,
    floating_values,
)
from cnr_codecs.payload.payload import Payload, Segment
from cnr_codecs.payload.pending import Need, Pending, Target

Codes = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.uint32]
# Codes of a block, where those of the wanted rows begin, and these rows.
_Run = tuple[Codes, int, RowNumbers]


def decode_lattice(payload: Payload, segment: Segment, target: Target) -> int:
    """Write the wanted rows of a lattice segment, and return how many these are.

    Only blocks with wanted rows are decoded. The checksum of the codes is compared if all of them are.
    """
    grid, width = np.float32(segment.grid), payload.dim
    blocks, written = _Blocks(segment.coded_rows(), MAX_CODE), 0
    for codes, first, rows in _runs(segment, blocks, payload.dim, target.need, target.first_row):
        if target.pending is not None:
            place = rows, target.first_row, target.need, *target.pending.place()
            most = settle_rows(codes, first, width, grid, *place)
            target.pending.check_settled(most, segment.grid)
            if segment.bits and most > 0:
                target.pending.check_floating(codes[first : first + len(rows) * width], segment.bits)
        written += _place(payload, segment, codes, first, rows, target)
    blocks.prove()
    return written


def add_relative(payload: Payload, segment: Segment, need: Need, first_row: int, pending: Pending) -> None:
    """Add the wanted rows of a relative segment to what is pending, and mark them.

    `need`, `first_row`: as for `decode_into`.
    """
    assert segment.coded is not None
    grid = np.float32(segment.grid)
    if payload.dim != pending.sums.shape[1]:
        raise PayloadError("it has rows relative to older ones, and not all of their columns")
    pending.expect(segment, need, first_row)
    blocks = _Blocks(segment.coded, MAX_DIFFERENCE)
    for codes, first, rows in _runs(segment, blocks, payload.dim, need, first_row):
        if add_rows(codes, first, payload.dim, grid, rows, first_row, need, *pending.place()) < 0:
            pending.check_settled(-1, segment.grid)


def check_not_wanted(segment: Segment, need: Need, first_row: int) -> None:
    """Check that none of the rows of a relative segment is wanted, where nothing older can be read."""
    for _, block in segment.row_set.blocks():
        rows = block.astype(np.int64) - first_row
        begin, end = np.searchsorted(rows, (0, len(need)))
        if need[rows[begin:end]].any():
            raise PayloadError(
                f"{segment.row_set.count} of its rows are relative to those of an older version, which a payload alone "
                "doesn't have; read the version through cnr_store.view or cnr_store.open"
            )


def _runs(segment: Segment, blocks: _Blocks, dim: int, need: Need, first_row: int) -> Iterator[_Run]:
    """Yield the rows of a segment that lie in blocks with wanted ones, as far as `need` reaches."""
    block_rows, end_row = BLOCK_LINES * blocks.line_rows, first_row + len(need)
    for start, rows in segment.row_set.blocks():
        begin, end = np.searchsorted(rows, (max(first_row, 0), max(end_row, 0))).tolist()
        while begin < end:
            number, first = divmod(start + begin, block_rows)
            stop = min(end, begin + block_rows - first)
            wanted = rows[begin:stop]
            if need[wanted.astype(np.int64) - first_row].any():
                yield blocks.read(number), first * dim, wanted
            begin = stop


class _Blocks:
    """The blocks of coded rows, to be read in order. The last one read is kept.

    `most`: the greatest magnitude of a code.
    """

    def __init__(self, coded: CodedRows, most: int) -> None:
        self._coded, self._most = coded, most
        self.line_rows = coded.line_rows
        self._room = block_room(coded.lines)
        self._number, self._codes = -1, self._room[:0]
        self._read, self._check = 0, 0

    def read(self, number: int) -> Codes:
        if number != self._number:
            self._codes = self._coded.decode_block(number, self._room, self._most)
            self._number = number
            self._read += 1
            if self._most == MAX_CODE:
                self._check = checksum(self._check, self._codes)
        return self._codes

    def prove(self) -> None:
        if self._read == self._coded.lines.blocks:
            self._coded.prove(self._check)


def _place(
    payload: Payload, segment: Segment, codes: Codes, first: int, rows: RowNumbers, target: Target
) -> int:
    """Write rows whose codes begin at `first`."""
    step, mantissa = np.float32(segment.parameters[0, 0]), segment.bits
    place = (rows, target.first_row, target.need)
    if mantissa and target.out.dtype == np.float32:
        bits = target.flat.view(np.uint32)
        where = (codes, first, payload.dim, MANTISSA_BITS - mantissa)
        return int(place_floating(*where, *place, bits, target.stride))
    if payload.element == "float32":
        return int(place_rows(codes, first, payload.dim, step, *place, target.flat, target.stride))
    places = rows.astype(np.int64) - target.first_row
    chosen = np.flatnonzero(target.need[places])
    held = codes[first : first + len(rows) * payload.dim].reshape(len(rows), payload.dim)[chosen]
    places = places[chosen]
    target.out[places] = _values(held, step, mantissa, payload.element)
    target.need[places] = 0
    return len(places)


def _values(codes: Codes, step: np.float32, mantissa: int, element: str) -> npt.NDArray[Any]:
    """Return the values of codes. step * code is exact, and then rounded to the element type."""
    if mantissa:
        return floating_values(codes, mantissa, element)
    values = step * codes.astype(np.float32)
    if element == "bfloat16":
        return round_to_bfloat16(values)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float16)
