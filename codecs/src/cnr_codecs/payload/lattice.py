"""Decodes wanted rows of lattice and of relative segments, block by block, in the order in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cnr_codecs.errors import PayloadError
from cnr_codecs.kernels.lattice import place_rows
from cnr_codecs.payload.coded import (
    MAX_CODE,
    MAX_DIFFERENCE,
    CodedRows,
    begun,
    checksum,
    grid_values,
)
from cnr_codecs.payload.payload import Payload, Scheme, Segment
from cnr_codecs.payload.pending import Integers, Need, Pending, RowNumbers, Target


def decode_lattice(payload: Payload, segment: Segment, target: Target) -> int:
    """Write the wanted rows of a lattice segment, and return how many these are.

    Only blocks with wanted rows are decoded. The checksum of the codes is compared if all of them are.
    """
    coded = segment.coded_rows()
    written, check, is_whole = 0, begun(coded.grid, coded.lines), True
    for codes, rows in _wanted(segment, coded, target.need, target.first_row, MAX_CODE):
        if codes is None:
            is_whole = False
            continue
        check = checksum(check, codes)
        if target.pending is not None:
            target.pending.settle(codes, rows, target.need, target.first_row, segment.grid)
        written += _place(payload, segment, codes, rows, target)
    if is_whole:
        coded.prove(check)
    return written


def takes_relative(
    payload: Payload, segment: Segment, need: Need, first_row: int, pending: Pending | None
) -> bool:
    """Add the wanted rows of a segment to what is pending, and mark them, if it is relative. Whether it is.

    `PayloadError` if they have nothing beneath, or if rows are pending that the segment has no integers of.

    `need`, `first_row`, `pending`: as for `decode_into`.
    """
    if segment.scheme is not Scheme.RELATIVE:
        if pending is not None and segment.scheme is not Scheme.LATTICE:
            pending.check_none(segment.row_set, need, first_row)
        return False
    assert segment.coded is not None
    if pending is None:
        if any(need[places].any() for _, places in segment.row_set.placed(first_row, len(need))):
            raise PayloadError(
                f"{segment.row_set.count} of its rows are relative to those of an older version, which a payload alone "
                "doesn't have; read the version through cnr_store.view or cnr_store.open"
            )
        return True
    if payload.dim != pending.sums.shape[1]:
        raise PayloadError("it has rows relative to older ones, and not all of their columns")
    pending.expect(segment, need, first_row)
    for codes, rows in _wanted(segment, segment.coded, need, first_row, MAX_DIFFERENCE):
        if codes is not None:
            pending.add(codes, rows, need, first_row, segment.grid)
    return True


def _wanted(
    segment: Segment, coded: CodedRows, need: Need, first_row: int, most: int
) -> Iterator[tuple[Any, RowNumbers]]:
    """Yield the codes and the rows of each block; no codes where none of its rows is wanted.

    `most`: the greatest magnitude of a code.
    """
    offsets = segment.row_set.offsets().astype(np.uint32)
    wants_all = first_row <= 0 and len(need) + first_row >= segment.row_set.rows and bool(need.all())
    for number in range(len(coded.lines.blocks)):
        rows = coded.rows_of_block(number, offsets)
        yield coded.decode_block(number, most) if wants_all or _wants(rows, need, first_row) else None, rows


def _wants(rows: RowNumbers, need: Need, first_row: int) -> bool:
    """Whether one of the rows of a block is wanted."""
    places = rows.astype(np.int64) - first_row
    return bool(need[places[(places >= 0) & (places < len(need))]].any())


def _place(payload: Payload, segment: Segment, codes: Integers, rows: RowNumbers, target: Target) -> int:
    """Write the wanted ones of the rows of a block."""
    grid = segment.grid
    # Codes of up to 7 bits are exact in bfloat16 as well.
    if payload.element == "float32" or (payload.element == "bfloat16" and grid.is_centered):
        return int(place_rows(codes, payload.dim, grid.terms, rows, target.place(np.float32)))
    places = rows.astype(np.int64) - target.first_row
    chosen = np.flatnonzero((places >= 0) & (places < len(target.need)))
    chosen = chosen[target.need[places[chosen]] != 0]
    places = places[chosen]
    codes = codes.reshape(-1, payload.dim)[chosen]
    target.out[places] = grid_values(codes, grid, payload.element)
    target.need[places] = 0
    return len(places)
