"""Objects as bytes-like pieces, so that none is copied only to be joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

BytesLike: TypeAlias = bytes | bytearray | memoryview
Pieces: TypeAlias = list[memoryview]


def as_pieces(data: BytesLike | Sequence[BytesLike]) -> Pieces:
    """Return an object, or its pieces in order, as flat views of bytes. Empty pieces are left out."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = [memoryview(part) for part in parts]
    return [view.cast("B") for view in views if view.nbytes]
