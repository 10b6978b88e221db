"""Reads untrusted bytes part by part."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.errors import PayloadError

_NO_BYTES = np.empty(0, np.uint8)


class Reader:
    """Reads consecutive parts of a buffer, and raises where one would pass its end."""

    def __init__(self, buffer: npt.NDArray[np.uint8], position: int) -> None:
        self.buffer = buffer
        self.position = position

    def read(self, size: int, where: str, what: str) -> npt.NDArray[np.uint8]:
        end = self.position + size
        if end > len(self.buffer):
            raise PayloadError(
                f"{where}: {what} truncated: {size} bytes needed at byte {self.position} of {len(self.buffer)}"
            )
        view = self.buffer[self.position : end]
        self.position = end
        return view


def as_bytes(data: Any) -> npt.NDArray[np.uint8]:
    """Return the bytes of a buffer, read-only. `PayloadError` if it is no contiguous buffer."""
    try:
        view = memoryview(data)
        buffer = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else _NO_BYTES
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"payload: expected contiguous bytes, got {type(data).__name__}: {error}"
        ) from error
    # Kernels are compiled for read-only codes alone.
    buffer.flags.writeable = False
    return buffer
