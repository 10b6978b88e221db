"""Rows to write: the one source of their bytes, and the one place where payloads are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cnr_codecs import RowCodec, UniformRows
from cnr_codecs.lattice.segments import RowCounts
from cnr_codecs.protocol import Offsets, encode_chunks
from cnr_codecs.uniform.uniform import QuantizedRows
from cnr_store.writing.row_codes import Array, Mask, RowCodes, gridded_codec


@dataclass(frozen=True)
class CodedRows:
    """Rows that a device has quantized, with the codec of their write."""

    codes: QuantizedRows | npt.NDArray[np.int16]  # of `UniformRows`; or (n, columns): on a grid
    is_raw: Mask  # (n,): which rows are stored as they are
    raw_values: Array  # (m, columns): their values


Block = Array | CodedRows
"""Rows: their values, (n, columns) and C-contiguous, or codes that are ready."""


class Rows(Protocol):
    """Where the rows of a write come from."""

    def block(self, begin: int, end: int) -> Block:
        """The rows at positions begin ... end - 1 of the write's ids."""


def encode_block(
    codec: RowCodec,
    block: Block,
    offsets: Offsets | None,
    edges: Sequence[int],
    rows: int,
    *,
    element: str,
    seals: Sequence[int],
    begin: int = 0,
    codes: RowCodes | None = None,
    counted: list[RowCounts] | None = None,
) -> list[bytes]:
    """The payloads of chunks that follow one another: every one that a save encodes is made here.

    `codec`, `offsets`, `edges`, `rows`, `element`, `seals`: as for `cnr_codecs.protocol.encode_chunks`.
    `begin`: the position of the first row in the write.
    `codes`: the parents of rows that may be relative, and what is noted of the rows; None for neither.
    `counted`: gets how the rows of each chunk on a grid are stored.
    """
    if isinstance(block, CodedRows):
        made, is_raw, raw_values = block.codes, block.is_raw, block.raw_values
        if isinstance(made, QuantizedRows):
            assert isinstance(codec, UniformRows)
            return codec.encode_codes(made, raw_values, offsets, edges, rows, element=element, seals=seals)
        values = np.zeros(made.shape, raw_values.dtype)
        values[is_raw] = raw_values  # others are not looked at
    elif gridded_codec(codec) is None:
        if codes is not None:
            codes.note(begin, block)
        return encode_chunks(codec, block, offsets, edges, rows, element=element, seals=seals)
    else:
        values, made = block, None
    codes, counted, payloads = codes or RowCodes(None), [] if counted is None else counted, []
    for (first, last), seal in zip(pairwise(edges), seals, strict=True):
        own, places = slice(first, last), None if offsets is None else offsets[first:last]
        quantized = None if made is None else (made[own][~is_raw[own]], is_raw[own])
        of_chunk = values[own], begin + first, places, rows, element, seal, quantized
        payload, counts = codes.encode(codec, *of_chunk)
        payloads.append(payload)
        counted.append(counts)
    return payloads
