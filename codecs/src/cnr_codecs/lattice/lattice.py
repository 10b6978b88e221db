"""The codec of the lattice: a row as integers on one step, which all rows of a table share.

A row's codes depend on that row and the step alone. Its bytes depend on the rows that it is encoded with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import Element, quantizable_element
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.kernels.lattice import quantize
from cnr_codecs.lattice.steps import block_sums, lattice_step, root_mean_square
from cnr_codecs.payload.coded import MAX_CODE, CodedRows
from cnr_codecs.payload.payload import ParameterType, Scheme, Segment, build
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.payload.validate import valid_step
from cnr_codecs.protocol import Offsets, Rows
from cnr_codecs.rows import check_offsets, check_rows, check_values, raw_segment

DEFAULT_RMS_STEP = 0.35
MIN_RMS_STEP, MAX_RMS_STEP = 1e-3, 16.0
# With codes up to this, a value that is rounded to a type of 16 bits still has its code.
_MAX_CODE_OF_16_BITS = 127
# A normal variable has the entropy of a uniform one of so many standard deviations.
_NORMAL_WIDTH = math.sqrt(2 * math.pi * math.e)
# What rows that differ in size add to that.
_CLASSES_BITS = 0.4

Codes: TypeAlias = npt.NDArray[np.int16]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LatticeRows:
    """Stores each value as the nearest multiple of one step, and the multiples entropy-coded.

    Parameters
    ----------
    rms_step
        The step as a share of the root mean square of the rows that are encoded together, 0.001 to 16; 0.35 if neither
        this nor `step` is given. The smaller, the smaller the errors and the more bytes.
    step
        The step itself, which must have 8 significant bits and be from 2**-100 to 2**100; `lattice_step` rounds others.
        With both, `rms_step` only says where the step is from.
    relative
        Whether a store may write rows that changed as differences from their integers in the version before. Payloads
        by themselves are not relative: `encode_over` makes such.

    Raises
    ------
    CodecConfigError
        An option is out of range.
    """

    rms_step: float | None = None
    step: float | None = None
    relative: bool = False

    def __post_init__(self) -> None:
        if type(self.relative) is not bool:
            raise CodecConfigError(f"relative must be true or false, got {self.relative!r}")
        if self.rms_step is None and self.step is None:
            object.__setattr__(self, "rms_step", DEFAULT_RMS_STEP)
        if self.rms_step is not None:
            object.__setattr__(self, "rms_step", _number("rms_step", self.rms_step))
            if not MIN_RMS_STEP <= self.rms_step <= MAX_RMS_STEP:
                raise CodecConfigError(
                    f"rms_step must be a number from {MIN_RMS_STEP} to {MAX_RMS_STEP}, got {self.rms_step!r}"
                )
        if self.step is not None:
            object.__setattr__(self, "step", _number("step", self.step))
            if not valid_step(self.step):
                raise CodecConfigError(
                    f"step must have 8 significant bits and be from 2**-100 to 2**100, got {self.step!r}; "
                    "lattice_step rounds a number to one"
                )

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that `row_codec` takes."""
        relative = {"relative": True} if self.relative else {}
        return {"id": "cnr_lattice", **self._options(), **relative}

    def zarr_codec(self) -> dict[str, Any]:
        """Return the entry of a Zarr v3 array's `codecs`, which has no relative rows."""
        return {"name": "cnr.lattice", "configuration": self._options()}

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the encoded bytes of a row of `dim` values that are distributed normally, as an estimate.

        The row's share of the row set is left out. Where only `step` is known, a value counts as a byte.
        """
        kind = quantizable_element(element)
        entropy = math.log2(_NORMAL_WIDTH / self.rms_step) if self.rms_step else 8.0
        bits = max(entropy, 0.0) + _CLASSES_BITS
        return min(dim * bits / 8, float(dim * kind.stored.itemsize))

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones; see `RowCodec.encode_rows`."""
        kind, values, offsets = check_rows(values, offsets, rows, quantizable_element(element).name)
        segments = self._segments(values, offsets, rows, kind) if len(values) else []
        return build(rows, values.shape[1], kind, segments, seal)

    def encode_over(
        self,
        values: Rows,
        offsets: Offsets | None,
        rows: int,
        parent: npt.NDArray[np.signedinteger[Any]],
        known: Mask,
        *,
        element: str,
        seal: int = 0,
        quantized: tuple[Codes, Mask] | None = None,
    ) -> tuple[bytes, Codes, Mask]:
        """Return the payload of a chunk whose rows are relative to older ones, their codes, and which rows have any.

        A row is stored as the difference of its codes and the older ones where these are known, else as `encode_rows`
        does. Readers add it to the codes that the row has beneath the payload, which must be on the same step.

        Parameters
        ----------
        values, offsets, rows, element, seal
            As for `encode_rows`.
        parent
            (n, dim) integers: the codes that each row has beneath, of magnitudes up to 32,767.
        known
            bool (n,): which of these are known.
        quantized
            int16 (m, dim), bool (n,): the codes of the rows that have any and which have none, if they were computed
            elsewhere. Only the values of the latter are looked at.

        Raises
        ------
        RowsError
            An argument is not as above, or the codec has no `step`.

        Returns
        -------
        payload, codes, coded
            The payload; int16 (n, dim), the codes; bool (n,), the rows that have codes: those of others are 0.
        """
        if self.step is None:
            raise RowsError("rows can be relative to others on a known step only: give one by with_step")
        kind, values, offsets = check_rows(values, offsets, rows, quantizable_element(element).name)
        held, raw = quantized or _quantize(values, self.step, kind)
        segments, codes = segments_over(values, offsets, rows, parent, known, held, raw, kind, (0, self.step))
        return build(rows, values.shape[1], kind, segments, seal), codes, ~raw

    def encode_codes(
        self,
        codes: Codes,
        raw: Mask,
        raw_values: Rows,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        element: str,
        seals: Sequence[int],
    ) -> list[bytes]:
        """Return the payloads of several chunks whose codes were computed elsewhere, as `encode_rows` returns each.

        Parameters
        ----------
        codes
            int16 (n, dim): the codes of the rows of all chunks on the codec's `step`; anything where `raw`.
        raw
            bool (n,): rows that are not finite, or have a code beyond `most_code`.
        raw_values
            (m, dim), of the element type's array dtype: these rows.
        offsets, edges, rows, element, seals
            As for `ChunksCodec.encode_chunks`.

        Raises
        ------
        RowsError
            An argument is not as above, or the codec has no `step`.
        """
        kind, raw_values = check_values(raw_values, rows, quantizable_element(element).name)
        dim, at = raw_values.shape[1], np.flatnonzero(raw)
        if self.step is None or codes.shape != (len(raw), dim) or len(at) != len(raw_values):
            raise RowsError(
                f"codes of {len(raw)} rows of {dim} values on the step {self.step} can't have the shape {codes.shape}, "
                f"{len(at)} raw rows and values of {len(raw_values)}"
            )
        payloads = []
        for (begin, end), seal in zip(pairwise(edges), seals, strict=True):
            places = np.arange(end - begin) if offsets is None else offsets[begin:end]
            check_offsets(places, end - begin, rows)
            first, last = np.searchsorted(at, (begin, end))
            segments, is_raw = [], raw[begin:end]
            if last - first < end - begin:
                held = codes[begin:end] if first == last else codes[begin:end][~is_raw]
                segments.append(_segment(held, places[~is_raw], rows, (0, self.step)))
            if first < last:
                values = raw_values[first:last]
                segments.append(raw_segment(values, places[is_raw], rows, np.arange(len(values)), kind))
            payloads.append(build(rows, dim, kind, segments, seal))
        return payloads

    def with_step(self, step: float) -> LatticeRows:
        """Return the same codec with the step of a table.

        Parameters
        ----------
        step
            As the option of that name.
        """
        return replace(self, step=step)

    def step_of(self, rms: float) -> float:
        """Return the step of rows.

        Parameters
        ----------
        rms
            The root mean square of their finite values.
        """
        if self.step is not None:
            return self.step
        assert self.rms_step is not None
        return lattice_step(self.rms_step * rms)

    def _options(self) -> dict[str, Any]:
        values = {"rms_step": self.rms_step, "step": self.step}
        return {name: value for name, value in values.items() if value is not None}

    def _segments(self, values: Rows, offsets: Offsets, rows: int, element: Element) -> list[Segment]:
        step = self.step
        if step is None:
            step = self.step_of(root_mean_square(block_sums(_wide(values))))
        codes, raw = _quantize(values, step, element)
        segments = []
        if len(codes):
            segments.append(
                _segment(codes, offsets if len(codes) == len(raw) else offsets[~raw], rows, (0, step))
            )
        if len(codes) < len(raw):
            segments.append(raw_segment(values, offsets, rows, np.flatnonzero(raw), element))
        return segments


def _wide(values: Rows) -> npt.NDArray[np.float32]:
    wide = np.ascontiguousarray(values, np.float32).view()
    wide.flags.writeable = False
    return wide


def _quantize(values: Rows, step: float, element: Element) -> tuple[Codes, Mask]:
    """Return the codes of the rows that have any, and which rows have none."""
    count, dim = values.shape
    codes, raw = np.empty((count, dim), np.int16), np.empty(count, np.uint8)
    held = quantize(
        _wide(values).reshape(-1), dim, 1 / step, most_code(step, element), codes.reshape(-1), raw
    )
    return codes[:held], raw.view(np.bool_)


def segments_over(
    values: Rows,
    offsets: Offsets,
    rows: int,
    parent: npt.NDArray[np.signedinteger[Any]],
    known: Mask,
    held: Codes,
    raw: Mask,
    element: Element,
    grid: tuple[int, float],
) -> tuple[list[Segment], Codes]:
    """Return the segments of `encode_over`, and the codes of all rows, 0 for those without.

    Parameters
    ----------
    values, offsets, rows, parent, known
        As for `encode_over`.
    held, raw
        The codes of the rows that have any, and which have none.
    element
        The element type.
    grid
        The bits of a floating grid and 0; or 0 and the step.

    Raises
    ------
    RowsError
        `parent` or `known` does not fit the rows.
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
    grid: tuple[int, float],
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


def most_code(step: float, element: Element) -> int:
    """Return the greatest magnitude of a code: such that a code is found again in the value that it decodes to."""
    if element.name == "float32":
        return MAX_CODE
    return min(_MAX_CODE_OF_16_BITS, math.ceil(element.overflow / step) - 1)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CodecConfigError(f"{name} must be a number, got {value!r}")
    return float(value)
