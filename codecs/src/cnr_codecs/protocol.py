"""What a row codec is."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.integer[Any]]


@runtime_checkable
class RowCodec(Protocol):
    """Turns rows of a chunk into a payload, which says itself how it is decoded.

    Implementations are immutable, and may be used by many threads at once.
    """

    def get_config(self) -> dict[str, Any]:
        """The configuration that makes an equal codec: {"id": ..., option: value}."""
        ...

    def zarr_codec(self) -> dict[str, Any]:
        """The entry of a Zarr v3 array's `codecs`: {"name": ..., "configuration": {...}}."""
        ...

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Expected encoded bytes of a row of `dim` values of an element type, without its share of the row
        set.

        Raises:
            RowsError: the codec doesn't store that element type.
        """
        ...

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """The payload of a chunk of `rows` rows, of which it holds these.

        Args:
            values: (n, dim), of the element type's array dtype.
            offsets: (n,) integers: where in the chunk each row belongs, strictly increasing; None for rows
            0 to n - 1.
            rows: rows of the chunk, at least 1.
            element: the element type's name, such as "float32".
            seal: 64 bits that bind the payload to its place; 0 for none.

        Raises:
            RowsError: an argument is not as said above, or the codec doesn't store that element type.
        """
        ...
