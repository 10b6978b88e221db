"""A fast path for plain payloads, which nearly all chunks are. It validates and decodes in one step.

A plain payload has one segment of all rows, of float32 values, quantized asymmetrically with float16
parameters. The result equals that of `validate` and `decode`, which take every payload.
"""

from __future__ import annotations

import struct
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from cnr_codecs.elements import BY_NAME
from cnr_codecs.kernels.decode import decode_all, scratch_for
from cnr_codecs.kernels.pack import codes_apart
from cnr_codecs.payload.payload import (
    CHECKSUM,
    ENTRY,
    HEAD_BYTES,
    HEADER,
    MAGIC,
    VERSION,
    ParameterType,
    Scheme,
    row_bytes,
)
from cnr_codecs.payload.rowset import RowSetKind

_HEAD = struct.Struct("<" + "".join(part.format[1:] for part in (HEADER, HEAD_BYTES, ENTRY, CHECKSUM)))
_FLOAT32 = BY_NAME["float32"]
_START = [MAGIC, VERSION, _FLOAT32.code, 1]
# As numbers: those of an enumeration take ten times as long to compare.
_KINDS = (int(Scheme.ASYMMETRIC), int(ParameterType.FLOAT16), int(RowSetKind.PREFIX))


def decode_plain(
    data: npt.NDArray[np.uint8], max_bytes: int, out: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.float32] | None:
    """Return the chunk (rows, dim) of a plain payload.

    Return None if the payload is not plain, not valid, too large, or doesn't fit `out`: the general path then decides.

    `max_bytes`: the most bytes that the decoded chunk may take.
    `out`: where the chunk is decoded to, instead of new memory. It must be flat float32 of the chunk's size, aligned
    and writable.
    """
    if len(data) < _HEAD.size:
        return None
    *start, rows, dim, _, nbytes, scheme, bits, parameters, row_set, count, none, held, checksum = (
        _HEAD.unpack_from(data.data)
    )
    body_bytes = rows * (4 + row_bytes(Scheme.ASYMMETRIC, bits, dim))
    if not (
        start == _START
        and (scheme, parameters, row_set) == _KINDS
        and 1 <= bits <= 8
        and (nbytes, count, none, held) == (_HEAD.size, rows, 0, body_bytes)
        and 0 < rows * dim * _FLOAT32.array.itemsize <= max_bytes
        and len(data) == _HEAD.size + body_bytes
        and google_crc32c.value(data[: _HEAD.size - CHECKSUM.size]) == checksum
    ):
        return None
    if out is None:
        out = np.empty(rows * dim, _FLOAT32.array)
    elif out.dtype != _FLOAT32.array or out.shape != (rows * dim,) or not out.flags.carray:
        return None
    first = _HEAD.size + 4 * rows
    # The copy is aligned, and nobody can change it between validation and use.
    halves = np.frombuffer(data[_HEAD.size : first].tobytes(), np.uint16).reshape(2, rows)
    packed = data[first:]
    packed.flags.writeable = False
    apart, scratch = codes_apart(dim, bits), scratch_for(dim, bits)
    return out.reshape(rows, dim) if decode_all(packed, halves, bits, dim, apart, out, scratch) else None
