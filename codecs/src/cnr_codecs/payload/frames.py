"""Zstandard frames of a known size: refused before they are unpacked if they claim another."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numcodecs import zstd

from cnr_codecs.errors import PayloadError

Frame: TypeAlias = bytes | memoryview
# Measured on packed integers: higher levels take longer and no fewer bytes, lower ones many more bytes.
_LEVEL = 1
_MAGIC = 0xFD2FB528
# Of a frame's descriptor: which kinds of dictionary and what reserved bit a frame must not have.
_REFUSED_BITS = 0b1011


def compress(data: npt.NDArray[np.uint8]) -> bytes:
    """Return a frame of these bytes, at least one."""
    frame: bytes = zstd.compress(data, _LEVEL)
    return frame


def decompress(frame: Frame, size: int | None = None, *, most: int = 0) -> npt.NDArray[np.uint8]:
    """Return the bytes of a frame: `size`, or up to `most`. `PayloadError` if it has others or is damaged."""
    claimed = claimed_size(frame)
    if claimed != size if size is not None else not 1 <= claimed <= most:
        expected = f"one of {size} bytes" if size is not None else f"one of up to {most} bytes"
        raise PayloadError(f"a zstd frame of {len(frame)} bytes is not {expected}")
    out: npt.NDArray[np.uint8] = np.empty(claimed, np.uint8)
    try:
        zstd.decompress(frame, out)
    except (RuntimeError, ValueError) as error:
        raise PayloadError(f"a zstd frame of {len(frame)} bytes is damaged: {error}") from error
    return out


def claimed_size(frame: Frame) -> int:
    """The size that a frame's head claims; -1 if it claims none, or needs what frames here must not have."""
    if len(frame) < 6 or int.from_bytes(frame[:4], "little") != _MAGIC or frame[4] & _REFUSED_BITS:
        return -1
    kind, is_single = frame[4] >> 6, frame[4] >> 5 & 1
    width = 1 << kind if kind or is_single else 0
    first = 6 - is_single
    claimed = int.from_bytes(frame[first : first + width], "little") + (256 if width == 2 else 0)
    return claimed if width else -1
