"""Rows that a device has quantized, in pieces that are on their way to the host: what makes payloads of them there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.lattice.segments import Codes, Mask
from cnr_codecs.payload.payload import ParameterType
from cnr_codecs.protocol import Offsets, Rows
from cnr_codecs.uniform.quantized import QuantizedRows
from cnr_codecs.uniform.uniform import UniformRows
from cnr_store.training.devices.moving import Arrays
from cnr_store.training.devices.support import failing_saves
from cnr_store.writing.row_codes import RowCodes

Codec = TypeVar("Codec", bound=UniformRows | LatticeRows | FloatingRows)


@dataclass(frozen=True)
class Piece(ABC):
    """Rows that were quantized by one launch.

    Attributes
    ----------
    raw, raw_values
        Which rows are stored as they are, ascending, and their values.
    arriving
        Waits for the rest.
    count
        How many rows there are.
    nbytes
        The host memory that all of it takes.
    """

    raw: npt.NDArray[np.intp]
    raw_values: Rows
    arriving: Callable[[], Arrays]
    count: int
    nbytes: int

    def raw_of(self, begin: int, end: int) -> Rows:
        """The values of those of these rows that are stored as they are."""
        first, last = np.searchsorted(self.raw, (begin, end))
        return self.raw_values[first:last]

    @abstractmethod
    def rows(self, begin: int, end: int) -> tuple[Any, ...]:
        """What was made of these rows; waits until it is in host memory."""


@dataclass(frozen=True)
class UniformPiece(Piece):
    """Rows with parameters of `kinds`, uint8 (count,)."""

    kinds: npt.NDArray[np.uint8]

    def rows(self, begin: int, end: int) -> tuple[QuantizedRows]:
        halves, codes, *floats = self.arriving()
        kinds, own = self.kinds[begin:end], slice(begin, end)
        scale, offset = floats[0][:, own] if floats else np.zeros((2, len(kinds)), np.float32)
        float16_rows = int((kinds == ParameterType.FLOAT16).sum())
        return (
            QuantizedRows(scale, offset, halves.view(np.uint16)[:, own], kinds, codes[own], float16_rows),
        )


@dataclass(frozen=True)
class IntegersPiece(Piece):
    """Rows as integers, on one step or a floating grid; `is_raw`, (count,), marks the raw ones."""

    is_raw: Mask

    def rows(self, begin: int, end: int) -> tuple[Codes, Mask]:
        (codes,) = self.arriving()
        return codes[begin:end], self.is_raw[begin:end]


@dataclass(frozen=True)
class Encoded(ABC, Generic[Codec]):
    """Rows of a table, quantized on `device`: see `writing.plan.EncodedRows`."""

    codec: Codec
    element: str
    pieces: Sequence[Piece]
    device: torch.device

    @property
    def nbytes(self) -> int:
        """The host memory that they take."""
        return sum(piece.nbytes for piece in self.pieces)

    def held(self, begin: int, end: int) -> tuple[list[tuple[Any, ...]], Rows]:
        """What each piece has of these rows, and the values of those that are raw."""
        found, raw, first = list[tuple[Any, ...]](), list[Rows](), 0
        with failing_saves(self.device, "rows that were quantized there"):
            for piece in self.pieces:
                low = max(begin - first, 0)
                high = max(low, min(end - first, piece.count))
                if low < high or (piece is self.pieces[-1] and not found):  # of no rows, those of one piece
                    found.append(piece.rows(low, high))
                    raw.append(piece.raw_of(low, high))
                first += piece.count
        return found, raw[0] if len(raw) == 1 else np.concatenate(raw)


class UniformEncoded(Encoded[UniformRows]):
    """Rows that are quantized uniformly."""

    def payloads(
        self,
        begin: int,
        end: int,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        seals: Sequence[int],
        codes: RowCodes | None = None,
    ) -> list[bytes]:
        """The payloads of chunks: see `EncodedRows.payloads`."""
        found, raw_values = self.held(begin, end)
        made = QuantizedRows.joined([each for (each,) in found])
        return self.codec.encode_codes(
            made, raw_values, offsets, edges, rows, element=self.element, seals=seals
        )


class IntegersEncoded(Encoded[LatticeRows | FloatingRows]):
    """Rows as integers, on one step or a floating grid."""

    def payloads(
        self,
        begin: int,
        end: int,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        seals: Sequence[int],
        codes: RowCodes | None = None,
    ) -> list[bytes]:
        """The payloads of chunks: see `EncodedRows.payloads`."""
        found, raw_values = self.held(begin, end)
        made, raw = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        held = made, raw, raw_values
        if codes is not None:
            return codes.encode_made(self.codec, held, begin, offsets, edges, rows, self.element, seals)
        return self.codec.encode_codes(*held, offsets, edges, rows, element=self.element, seals=seals)
