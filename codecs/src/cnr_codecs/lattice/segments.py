"""Segments and payloads of rows whose integers are known, on one step or a floating grid."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.errors import RowsError
from cnr_codecs.payload.coded import CodedRows
from cnr_codecs.payload.payload import ParameterType, Scheme, Segment
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.protocol import Offsets, Rows
from cnr_codecs.rows import raw_segment

Codes: TypeAlias = npt.NDArray[np.int16]
Mask: TypeAlias = npt.NDArray[np.bool_]
Grid: TypeAlias = tuple[int, float]
"""The bits of a floating grid and 0; or 0 and the step."""


def segments_of(
    held: Codes, raw: Mask, raw_values: Rows, offsets: Offsets, rows: int, element: Element, grid: Grid
) -> list[Segment]:
    """Return the segments of rows, none of them relative.

    `held`, `raw`: (m, dim) and (n,): the codes of the rows that have any, and which have none.
    `raw_values`: (n - m, dim): the values of the latter.
    `offsets`, `rows`: of all n rows, as `RowCodec.encode_rows` takes them.
    `element`: the element type.
    `grid`: what the codes are on.
    """
    segments = []
    if len(held):
        places = offsets if len(held) == len(raw) else offsets[~raw]
        segments.append(_segment(held, places, rows, grid))
    if len(raw_values):
        order = np.arange(len(raw_values))
        segments.append(raw_segment(raw_values, offsets[raw], rows, order, element))
    return segments


def segments_over(
    values: Rows,
    offsets: Offsets,
    rows: int,
    parent: npt.NDArray[np.signedinteger[Any]],
    known: Mask,
    held: Codes,
    raw: Mask,
    element: Element,
    grid: Grid,
) -> tuple[list[Segment], Codes]:
    """Return the segments of `encode_over`, and the codes of all rows, 0 for those without.

    `values`, `offsets`, `rows`, `parent`, `known`: as for `encode_over`.
    `held`, `raw`: the codes of the rows that have any, and which have none.
    `element`: the element type.
    `grid`: what the codes are on.
    """
    if parent.shape != values.shape or known.shape != values.shape[:1]:
        raise RowsError(
            f"parent and known must be {values.shape} and {values.shape[:1]}, got {parent.shape} and {known.shape}"
        )
    codes = held
    if len(held) < len(raw):
        codes = np.zeros(values.shape, np.int16)
        codes[~raw] = held
    segments = []
    for chosen, is_relative in ((~known & ~raw, False), (known & ~raw, True)):
        if chosen.any():
            base = parent[chosen] if is_relative else None
            segments.append(_segment(codes[chosen], offsets[chosen], rows, grid, base))
    if raw.any():
        segments.append(raw_segment(values, offsets, rows, np.flatnonzero(raw), element))
    return segments, codes


def _segment(
    codes: Codes,
    offsets: Offsets,
    rows: int,
    grid: Grid,
    parent: npt.NDArray[np.signedinteger[Any]] | None = None,
) -> Segment:
    """Return the segment of rows of these codes, relative to those of the same rows in `parent` if there is one."""
    mantissa, step = grid
    row_set, parameters = RowSet.of(offsets, rows, gaps=True), np.full((1, 1), step, np.float32)
    kinds = mantissa, ParameterType.FLOAT32, row_set, parameters
    if parent is None:
        return Segment(Scheme.LATTICE, *kinds, codes.view(np.uint8))
    coded = CodedRows.encode(codes, mantissa, codes.astype(np.int32) - parent)
    return Segment(Scheme.RELATIVE, *kinds, np.empty((0, 2 * codes.shape[1]), np.uint8), coded=coded)
