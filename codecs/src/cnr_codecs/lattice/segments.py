"""Rows as integers on one step or a floating grid: what the codecs of both share, and the segments that they make."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, quantizable_element
from cnr_codecs.errors import RowsError
from cnr_codecs.kernels.building.compiled import read_only
from cnr_codecs.kernels.lattice import count_zero_rows
from cnr_codecs.payload.coded import MAX_CODE, NARROW_DIM, CodedRows, Codes, Grid
from cnr_codecs.payload.payload import ParameterType, Scheme, Segment, build, row_bytes
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.payload.validate import MIN_STEP
from cnr_codecs.protocol import NamedCodec, Offsets, Rows
from cnr_codecs.rows import check_rows, raw_segment

Mask: TypeAlias = npt.NDArray[np.bool_]
Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]


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


class GridRows(NamedCodec):
    """Stores rows as integers on one grid."""

    relative: bool

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones; see `RowCodec.encode_rows`."""
        none = np.broadcast_to(np.int16(0), values.shape), np.zeros(values.shape[:1], np.bool_)
        return self.encode_over(values, offsets, rows, *none, element=element, seal=seal).payload

    def encode_over(
        self,
        values: Rows,
        offsets: Offsets | None,
        rows: int,
        parent: Integers,
        known: Mask,
        *,
        element: str,
        seal: int = 0,
        quantized: tuple[Codes, Mask] | None = None,
    ) -> Encoded:
        """Return the payload of a chunk whose rows are relative to older ones, and what is known of these rows.

        A row is stored as the difference of its codes and the older ones where these are known, else as `encode_rows`
        does. Readers add it to the codes that the row has beneath the payload, which must be on the same grid.

        On a floating grid of up to 7 bits, rows whose codes differ more from the older ones than among themselves are
        not relative: as differences they would take more bytes.

        Parameters
        ----------
        values, offsets, rows, element, seal
            As for `encode_rows`.
        parent
            (n, dim) integers: the codes that each row has beneath, of magnitudes up to 32,767; of 23 bits int32.
        known
            bool (n,): which of these are known.
        quantized
            (m, dim) of the grid's dtype, bool (n,): the codes of the rows that have any and which have none, if they
            were computed elsewhere. Only the values of the latter are looked at.

        Raises
        ------
        RowsError
            An argument is not as above, or codes are known and the codec is a lattice without a `step`.
        """
        kind, values, offsets = check_rows(values, offsets, rows, self._element(element).name)
        if parent.shape != values.shape or known.shape != values.shape[:1]:
            raise RowsError(
                f"parent and known must be {values.shape} and {values.shape[:1]}, got {parent.shape} and {known.shape}"
            )
        grid = self._grid_of(values, quantized is not None or bool(known.any()))
        held, raw = quantized or self._codes(values, grid, kind)
        near = known & ~raw
        if grid.is_centered and near.any():
            near[near] = _are_near(held[near[~raw]], parent[near])
        return encode_segments(values, offsets, rows, parent, near, held, raw, kind, grid, seal)

    def _own_options(self) -> dict[str, Any]:
        return {"relative": True} if self.relative else {}

    def _element(self, name: str) -> Element:
        """Return the element type of that name, if the codec stores its rows."""
        return quantizable_element(name)

    @abstractmethod
    def _grid_of(self, values: Rows, is_known: bool) -> Grid:
        """Return the grid of rows, which must not depend on these where codes on it are known."""

    @abstractmethod
    def _codes(self, values: Rows, grid: Grid, element: Element) -> tuple[Codes, Mask]:
        """Return the codes (m, dim) of the rows that have any, and which rows, bool (n,), have none."""


def _are_near(codes: Codes, parent: Integers) -> Mask:
    """Return which rows differ from their parents by less than from the centers that they are else coded from."""
    sizes, counts = np.abs(codes.astype(np.int32)), np.count_nonzero(codes, axis=1, keepdims=True)
    totals = sizes.sum(axis=1, keepdims=True)
    if codes.shape[1] <= NARROW_DIM:  # several rows have one center
        totals, counts = totals.sum(keepdims=True), counts.sum(keepdims=True)
    apart = np.where(codes, np.abs(sizes - totals / np.maximum(counts, 1)), 0).sum(axis=1)
    near: Mask = np.abs(codes.astype(np.int32) - parent).sum(axis=1) <= apart
    return near


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
    parent: Integers,
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
    codes: Codes, offsets: Offsets, rows: int, grid: Grid, parent: Integers | None = None
) -> Segment:
    """Return the segment of rows of these codes, relative to those of the same rows in `parent` if there is one."""
    kinds = grid.mantissa, ParameterType.FLOAT32, RowSet.of(offsets, rows), grid.parameters
    if parent is None:
        return Segment(Scheme.LATTICE, *kinds, codes.view(np.uint8))
    coded = CodedRows.encode(codes, grid, _differences(codes, parent))
    no_codes = np.empty((0, row_bytes(Scheme.RELATIVE, grid.mantissa, codes.shape[1])), np.uint8)
    return Segment(Scheme.RELATIVE, *kinds, no_codes, coded=coded)


def _differences(codes: Codes, parent: Integers) -> Integers:
    """Return codes less their parents, int16 where all fit, which is half the memory; of exact ones modulo 2**32."""
    most = sum(max(int(each.max()), -int(each.min())) for each in (codes, parent))
    found: Integers = np.subtract(codes, parent, dtype=np.int16 if most <= MAX_CODE else np.int32)
    return found
