"""Decodes wanted rows of lattice segments, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import round_to_bfloat16
from cnr_codecs.entropy.lines import BLOCK_LINES, block_room
from cnr_codecs.kernels.lattice import place_floating, place_rows
from cnr_codecs.payload.coded import MANTISSA_BITS, CodedRows, checksum, floating_values
from cnr_codecs.payload.payload import Payload, Segment
from cnr_codecs.payload.target import Target

Codes = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.uint32]


def decode_lattice(payload: Payload, segment: Segment, target: Target) -> int:
    """Write the wanted rows of a lattice segment, and return how many these are.

    Only blocks with wanted rows are decoded. The checksum of the codes is compared if all of them are.

    Raises
    ------
    PayloadError
        The codes are damaged. Rows may have been written nevertheless.
    """
    coded = segment.coded_rows()
    blocks, block_rows = _Blocks(coded), BLOCK_LINES * coded.line_rows
    end_row = target.first_row + len(target.need)
    written = 0
    for start, rows in segment.row_set.blocks():
        begin, end = np.searchsorted(rows, (max(target.first_row, 0), max(end_row, 0))).tolist()
        while begin < end:
            number, first = divmod(start + begin, block_rows)
            stop = min(end, begin + block_rows - first)
            wanted = rows[begin:stop]
            if target.need[wanted.astype(np.int64) - target.first_row].any():
                codes = blocks.read(number)
                written += _place(payload, segment, codes, first * payload.dim, wanted, target)
            begin = stop
    blocks.prove()
    return written


class _Blocks:
    """The blocks of coded rows, to be read in order. The last one read is kept."""

    def __init__(self, coded: CodedRows) -> None:
        self._coded = coded
        self._room = block_room(coded.lines)
        self._number, self._codes = -1, self._room[:0]
        self._read, self._check = 0, 0

    def read(self, number: int) -> Codes:
        if number != self._number:
            self._codes = self._coded.decode_block(number, self._room)
            self._number = number
            self._read += 1
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
