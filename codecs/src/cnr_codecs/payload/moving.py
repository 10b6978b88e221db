"""Moves stored rows between payloads. Codes and parameters are copied, so moved rows decode to the same bits.

Codes of a lattice are decoded and coded anew, but not made anew.

`take_rows` picks rows of a payload, `merge_segments` joins segments, and `split_segments` cuts a chunk's segments into
those of smaller chunks. `cnr_codecs.build_payload` makes a payload of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import RowsError
from cnr_codecs.payload.lattice import takes_relative
from cnr_codecs.payload.payload import PARAMETERS_PER_ROW, Payload, Scheme, Segment
from cnr_codecs.payload.pending import Pending
from cnr_codecs.payload.rowset import RowSet

Need = npt.NDArray[np.uint8]
# Codes, parameters (all codebooks where rows share them), and the codebook of each row.
_Part = tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.uint32] | None]


def take_rows(
    payload: Payload, need: Need, first_row: int = 0, pending: Pending | None = None
) -> list[Segment]:
    """Return the wanted rows of a payload as segments of another chunk, and clear their marks.

    Parameters
    ----------
    payload
        As `parse` returns it. The segments are copies, so they don't keep its bytes in memory.
    need
        uint8 (n,), non-zero where a row of the other chunk, of n rows, is wanted. Marks of the returned rows
        are set to 0.
    first_row
        The row of the payload's chunk that is row 0 of the other chunk. It may be negative.
    pending
        As for `decode_into`. Relative rows are added to it, and are returned with the codes of an older payload: no
        segment that is returned is relative.

    Raises
    ------
    RowsError
        `need` is not as above.
    PayloadError
        As `decode_into`.
    """
    if need.ndim != 1 or need.dtype != np.uint8 or not need.flags.writeable:
        raise RowsError(f"need must be writable uint8 (rows,); got {need.dtype} {need.shape}")
    taken = [
        _take(segment, need, first_row, pending)
        for segment in payload.segments
        if not takes_relative(payload, segment, need, first_row, pending)
    ]
    return [segment for segment in taken if segment is not None]


def merge_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Return one segment for each scheme, bits and parameter type, and of lattices for each grid.

    Relative segments stay as they are: each has the checksum of what its own rows end up with.

    Parameters
    ----------
    segments
        Segments of chunks that have the same number of rows and of columns. No row may be in two of them.

    Raises
    ------
    RowsError
        The chunks differ in rows or columns, or two segments of one kind have the same row.
    """
    kinds: dict[tuple[int, int, int, tuple[float, ...]], list[Segment]] = {}
    for number, segment in enumerate(segments):
        apart = tuple(segment.parameters[0].tolist()) if segment.scheme is Scheme.LATTICE else ()
        if segment.scheme is Scheme.RELATIVE:
            apart = (float(number),)
        kind = segment.scheme, segment.bits, segment.parameter_type, apart
        kinds.setdefault(kind, []).append(segment)
    return [alike[0] if len(alike) == 1 else _merge(alike) for _, alike in sorted(kinds.items())]


def split_segments(segments: Sequence[Segment], rows: int) -> Iterator[list[Segment]]:
    """Yield the segments of consecutive chunks of `rows` rows each. The last chunk may have fewer rows.

    Parameters
    ----------
    segments
        Segments of one chunk, at least one, none of them relative. The yielded segments are views of them.
    rows
        Rows of a chunk, at least 1.
    """
    segments = [_decoded(segment) for segment in segments]
    whole = segments[0].row_set.rows
    starts = np.arange(0, whole + rows, rows)
    placed = [(segment, segment.row_set.offsets()) for segment in segments]
    cuts = [np.searchsorted(places, starts).tolist() for _, places in placed]
    for number, start in enumerate(range(0, whole, rows)):
        chunk = []
        for (segment, places), cut in zip(placed, cuts, strict=True):
            if cut[number] < cut[number + 1]:
                position = slice(cut[number], cut[number + 1])
                row_set = RowSet.of(places[position] - start, min(rows, whole - start))
                chunk.append(_joined(segment, [_stored(segment, position)], row_set))
        yield chunk


def _decoded(segment: Segment) -> Segment:
    """Return the segment with its codes as integers, if it is coded."""
    if segment.coded is None:
        return segment
    if segment.scheme is Scheme.RELATIVE:
        raise RowsError("rows that are relative to older ones can't be moved without these")
    codes = segment.coded.decode().view(np.uint8).reshape(segment.row_set.count, -1)
    return replace(segment, codes=codes, coded=None)


def _take(segment: Segment, need: Need, first_row: int, pending: Pending | None) -> Segment | None:
    is_coded = segment.coded is not None
    if is_coded:
        if not any(need[places].any() for _, places in segment.row_set.placed(first_row, len(need))):
            return None
        segment = _decoded(segment)
    taken = np.zeros(len(need), np.bool_)
    parts = []
    # One block at a time: all positions together could take many times the memory of the rows.
    for start, place in segment.row_set.placed(first_row, len(need)):
        wanted = np.flatnonzero(need[place])
        if len(wanted):
            taken[place[wanted]] = True
            # Codes that were decoded here are nobody else's: they need no copy where all rows are wanted.
            is_whole = is_coded and len(wanted) == segment.row_set.count
            part = _stored(segment, slice(None) if is_whole else wanted + start)
            if pending is not None and segment.scheme is Scheme.LATTICE:
                rows, grid = place[wanted].astype(np.uint32), segment.grid
                pending.settle(part[0].view(grid.dtype), rows, need, 0, grid)  # a copy of those stored
            parts.append(part)
    if not parts:
        return None
    need[taken] = 0
    return _joined(segment, parts, RowSet.marked(taken))


def _stored(segment: Segment, position: npt.NDArray[np.intp] | slice) -> _Part:
    """Return what a segment stores of the rows at these positions."""
    codes, parameters = segment.codes[position], segment.parameters
    if segment.books is not None:
        return codes, parameters, segment.books[position]
    if segment.scheme is Scheme.LATTICE:
        return codes, parameters, None
    return (
        codes,
        parameters[:, position] if segment.scheme in PARAMETERS_PER_ROW else parameters[position],
        None,
    )


def _joined(segment: Segment, parts: Sequence[_Part], row_set: RowSet) -> Segment:
    """Return parts of a segment as one segment, whose rows are `row_set`."""
    axis = 1 if segment.scheme in PARAMETERS_PER_ROW else 0
    codes, parameters, books = parts[0]
    if len(parts) > 1:
        codes = np.concatenate([part[0] for part in parts])
    if segment.books is not None:
        held = np.concatenate([part[2] for part in parts if part[2] is not None])
        used, number = np.unique(held, return_inverse=True)
        parameters, books = parameters[used], number.astype(np.uint32)
    elif len(parts) > 1 and segment.scheme is not Scheme.LATTICE:
        parameters = np.concatenate([part[1] for part in parts], axis=axis)
    return Segment(segment.scheme, segment.bits, segment.parameter_type, row_set, parameters, codes, books)


def _merge(segments: Sequence[Segment]) -> Segment:
    """Return segments of one kind as one segment, with its rows in increasing order."""
    segments = [_decoded(segment) for segment in segments]
    first = segments[0]
    if len({(segment.row_set.rows, segment.codes.shape[1]) for segment in segments}) > 1:
        raise RowsError("segments of chunks that differ in rows or columns can't be merged")
    places = np.concatenate([segment.row_set.offsets() for segment in segments])
    order = np.argsort(places, kind="stable")
    places = places[order]
    if (places[1:] == places[:-1]).any():
        raise RowsError(f"row {int(places[int(np.argmin(np.diff(places)))])} is in two segments")
    parameters, codes, books = first.parameters, np.concatenate([each.codes for each in segments]), None
    if first.books is not None:  # the codebooks of all segments, one after the other
        before = accumulate((len(each.parameters) for each in segments), initial=0)
        numbered = zip((each.books for each in segments), before, strict=False)
        books = np.concatenate([held + np.uint32(count) for held, count in numbered if held is not None])
    if first.scheme is not Scheme.LATTICE:
        axis = 1 if first.scheme in PARAMETERS_PER_ROW else 0
        parameters = np.concatenate([segment.parameters for segment in segments], axis=axis)
    whole = replace(first, parameters=parameters, codes=codes, books=books)
    codes, parameters, books = _stored(whole, order)
    row_set = RowSet.of(places, first.row_set.rows)
    return replace(whole, row_set=row_set, parameters=parameters, codes=codes, books=books)
