"""Segments and payloads of rows whose integers are known, on one step or a floating grid."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element
from cnr_codecs.errors import RowsError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import count_zero_rows
from cnr_codecs.payload.coded import MAX_CODE, CodedRows, Codes, Grid
from cnr_codecs.payload.payload import ParameterType, Scheme, Segment, build, row_bytes
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.payload.validate import MIN_STEP
from cnr_codecs.protocol import Offsets, Rows
from cnr_codecs.rows import raw_segment

Mask: TypeAlias = npt.NDArray[np.bool_]


class RowCounts(NamedTuple):
    """How many rows on a grid are stored in another way than on that grid, or are zeros on it."""

    raw: int = 0  # stored as they are
    finer: int = 0  # on a step of their own, finer than that of the others
    zero: int = 0  # decoded to zeros alone
    # Of values in rows that a caller has sampled: not 0; beyond twice what the median was, and below half of it
    nonzero: int = 0
    large: int = 0
    small: int = 0


class Encoded(NamedTuple):
    """What `encode_over` returns of n rows."""

    payload: bytes
    codes: Codes  # (n, dim), of the dtype of the grid: 0 of rows without
    coded: Mask  # bool (n,): which rows have codes
    counts: RowCounts


def nothing_known(values: Rows) -> tuple[Codes, Mask]:
    """Return `parent` and `known` of `encode_over` for rows that have nothing beneath them."""
    return np.broadcast_to(np.int16(0), values.shape), np.zeros(values.shape[:1], np.bool_)


def _others(values: Rows, offsets: Offsets, rows: int, element: Element, grid: Grid) -> list[Segment]:
    """Return the segments of rows without codes on the grid of others.

    Those that would be zero on a step, and are not, are on steps 16, 256, ... times finer, where their greatest codes
    are from 4 to 64. In types of 16 bits, whose numbers are no multiples of such steps, they are raw as the others are.
    """
    segments, is_raw = [], np.ones(len(values), np.bool_)
    if grid.step and element.name == "float32":
        with np.errstate(invalid="ignore"):
            ratios = np.abs(values).max(axis=1).astype(np.float64) * (1 / grid.step)
        _, exponents = np.frexp(ratios)
        finer = np.where((ratios > 0) & (np.rint(ratios) == 0), -(-(3 - exponents) // 4), 0)
        for power in np.unique(finer[finer > 0]).tolist():
            step = grid.step * 16.0**-power
            if step >= MIN_STEP:
                chosen = finer == power
                codes = np.rint(values[chosen].astype(np.float64) * (1 / step)).astype(np.int16)
                segments.append(_segment(codes, offsets[chosen], rows, Grid(step)))
                is_raw &= ~chosen
    if is_raw.any():
        segments.append(raw_segment(values, offsets, rows, np.flatnonzero(is_raw), element))
    return segments


def encode_segments(
    values: Rows,
    offsets: Offsets,
    rows: int,
    parent: npt.NDArray[np.signedinteger[Any]],
    known: Mask,
    held: Codes,
    raw: Mask,
    element: Element,
    grid: Grid,
    seal: int,
) -> Encoded:
    """Return what `encode_over` does.

    `values`, `offsets`, `rows`, `parent`, `known`, `seal`: as for `encode_over`.
    `held`, `raw`: the codes of the rows that have any, and which have none.
    """
    if parent.shape != values.shape or known.shape != values.shape[:1]:
        raise RowsError(
            f"parent and known must be {values.shape} and {values.shape[:1]}, got {parent.shape} and {known.shape}"
        )
    codes, coded, others = held, ~raw, len(raw) - len(held)
    zero = count_zero_rows(read_only(held), held.shape[1])
    if others:
        codes = np.zeros(values.shape, grid.dtype)
        codes[coded] = held
    segments = []
    for chosen, is_relative in ((coded > known, False), (coded & known, True)):
        count = np.count_nonzero(chosen)
        if count:
            own = slice(None) if count == len(chosen) else chosen  # no copies of all rows
            segments.append(
                _segment(codes[own], offsets[own], rows, grid, parent[own] if is_relative else None)
            )
    if others:
        segments += _others(values[raw], offsets[raw], rows, element, grid)
    kept = sum(each.row_set.count for each in segments if each.scheme is Scheme.RAW)
    counts = RowCounts(kept, others - kept, zero)
    return Encoded(build(rows, values.shape[1], element, segments, seal), codes, coded, counts)


def _segment(
    codes: Codes,
    offsets: Offsets,
    rows: int,
    grid: Grid,
    parent: npt.NDArray[np.signedinteger[Any]] | None = None,
) -> Segment:
    """Return the segment of rows of these codes, relative to those of the same rows in `parent` if there is one."""
    kinds = grid.mantissa, ParameterType.FLOAT32, RowSet.of(offsets, rows), grid.parameters
    if parent is None:
        return Segment(Scheme.LATTICE, *kinds, codes.view(np.uint8))
    coded = CodedRows.encode(codes, grid, _differences(codes, parent))
    no_codes = np.empty((0, row_bytes(Scheme.RELATIVE, grid.mantissa, codes.shape[1])), np.uint8)
    return Segment(Scheme.RELATIVE, *kinds, no_codes, coded=coded)


def _differences(
    codes: Codes, parent: npt.NDArray[np.signedinteger[Any]]
) -> npt.NDArray[np.signedinteger[Any]]:
    """Return codes less their parents, int16 where all fit, which is half the memory; of exact ones modulo 2**32."""
    most = sum(max(int(each.max()), -int(each.min())) for each in (codes, parent))
    found: npt.NDArray[np.signedinteger[Any]]
    found = np.subtract(codes, parent, dtype=np.int16 if most <= MAX_CODE else np.int32)
    return found
