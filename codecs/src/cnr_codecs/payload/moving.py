"""Moves rows between payloads as they are stored: codes and parameters are copied, nothing is quantized again.

`take_rows` picks rows out of a payload, `merge_segments` joins what was picked out of several, `split_segments` cuts a
chunk's segments into those of smaller chunks, and `cnr_codecs.build_payload` makes a payload of the result: its rows
decode to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import RowsError
from cnr_codecs.payload.payload import PARAMETERS_PER_ROW, Payload, Segment
from cnr_codecs.payload.rowset import RowSet

Need = npt.NDArray[np.uint8]
# Codes, parameters (all codebooks where they are shared), and the shared codebook of each row.
_Part = tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.uint32] | None]


def take_rows(payload: Payload, need: Need, first_row: int = 0) -> list[Segment]:
    """The rows of a payload that are asked for, as segments of another chunk; clears their marks.

    Args:
        payload: what `parse` returned. The segments are copies, and don't keep its bytes alive.
        need: uint8 (n,), non-zero where a row of the other chunk, of n rows, is asked for. Marks of rows taken are
            set to 0.
        first_row: the row of the payload's chunk that the other chunk's first row stands for; may be negative.

    Raises:
        RowsError: `need` is not as said above.
    """
    if need.ndim != 1 or need.dtype != np.uint8 or not need.flags.writeable:
        raise RowsError(f"need must be writable uint8 (rows,); got {need.dtype} {need.shape}")
    taken = (_take(segment, need, first_row) for segment in payload.segments)
    return [segment for segment in taken if segment is not None]


def merge_segments(segments: Iterable[Segment]) -> list[Segment]:
    """One segment for each way of storing rows: scheme, bits and parameter type.

    Args:
        segments: of chunks of the same rows and columns; no row is in two of them.

    Raises:
        RowsError: chunks of different rows or columns, or a row that two segments of one kind hold.
    """
    kinds: dict[tuple[int, int, int], list[Segment]] = {}
    for segment in segments:
        kinds.setdefault((segment.scheme, segment.bits, segment.parameter_type), []).append(segment)
    return [alike[0] if len(alike) == 1 else _merge(alike) for _, alike in sorted(kinds.items())]


def split_segments(segments: Sequence[Segment], rows: int) -> Iterator[list[Segment]]:
    """The segments of consecutive chunks of `rows` rows each; the last may have fewer.

    Args:
        segments: of one chunk, or of chunks of the same rows, at least one. What comes out looks into them.
        rows: at least 1.
    """
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


def _take(segment: Segment, need: Need, first_row: int) -> Segment | None:
    taken = np.zeros(len(need), np.bool_)
    parts = []
    # Block by block: a list of all positions could take many times the memory that the rows take.
    for start, rows in segment.row_set.blocks():
        place = rows.astype(np.int64) - first_row
        begin, end = np.searchsorted(place, (0, len(need)))
        place = place[begin:end]
        wanted = np.flatnonzero(need[place])
        if len(wanted):
            taken[place[wanted]] = True
            parts.append(_stored(segment, wanted + (start + int(begin))))
    if not parts:
        return None
    need[taken] = 0
    return _joined(segment, parts, RowSet.marked(taken))


def _stored(segment: Segment, position: npt.NDArray[np.intp] | slice) -> _Part:
    """What is stored of the rows at these positions of a segment."""
    codes, parameters = segment.codes[position], segment.parameters
    if segment.books is not None:
        return codes, parameters, segment.books[position]
    return (
        codes,
        parameters[:, position] if segment.scheme in PARAMETERS_PER_ROW else parameters[position],
        None,
    )


def _joined(segment: Segment, parts: Sequence[_Part], row_set: RowSet) -> Segment:
    """Rows of a segment, those of `row_set`, as one segment."""
    axis = 1 if segment.scheme in PARAMETERS_PER_ROW else 0
    codes, parameters, books = parts[0]
    if len(parts) > 1:
        codes = np.concatenate([part[0] for part in parts])
    if segment.books is not None:
        held = np.concatenate([part[2] for part in parts if part[2] is not None])
        used, number = np.unique(held, return_inverse=True)
        parameters, books = parameters[used], number.astype(np.uint32)
    elif len(parts) > 1:
        parameters = np.concatenate([part[1] for part in parts], axis=axis)
    return Segment(segment.scheme, segment.bits, segment.parameter_type, row_set, parameters, codes, books)


def _merge(segments: Sequence[Segment]) -> Segment:
    """Segments of one kind as one, its rows in increasing order."""
    first = segments[0]
    if len({(segment.row_set.rows, segment.codes.shape[1]) for segment in segments}) > 1:
        raise RowsError("segments of chunks of different rows or columns can't be merged")
    places = np.concatenate([segment.row_set.offsets() for segment in segments])
    order = np.argsort(places, kind="stable")
    places = places[order]
    if (places[1:] == places[:-1]).any():
        raise RowsError(f"row {int(places[int(np.argmin(np.diff(places)))])} is in two segments")
    books = None
    if first.scheme in PARAMETERS_PER_ROW:
        parameters = np.concatenate([segment.parameters for segment in segments], axis=1)[:, order]
    else:
        parameters = np.concatenate([segment.parameters for segment in segments])
        books = _renumbered(segments)
        if books is None:
            parameters = parameters[order]
        else:
            books = books[order]
    codes = np.concatenate([segment.codes for segment in segments])[order]
    row_set = RowSet.of(places, first.row_set.rows)
    return Segment(first.scheme, first.bits, first.parameter_type, row_set, parameters, codes, books)


def _renumbered(segments: Sequence[Segment]) -> npt.NDArray[np.uint32] | None:
    """The shared codebook of each row when those of all segments stand one after the other."""
    numbers: list[npt.NDArray[Any]] = []
    before = 0
    for segment in segments:
        if segment.books is None:
            return None
        numbers.append(segment.books + np.uint32(before))
        before += len(segment.parameters)
    return np.concatenate(numbers)
