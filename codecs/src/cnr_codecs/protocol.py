"""The protocol that every row codec follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.integer[Any]]


@runtime_checkable
class RowCodec(Protocol):
    """Encodes rows of a chunk to a payload. The payload itself says how it is decoded.

    An implementation is immutable. Many threads may call it at once.
    """

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that makes an equal codec: {"id": ..., option: value}."""
        ...

    def zarr_codec(self) -> dict[str, Any]:
        """Return the entry of a Zarr v3 array's `codecs`: {"name": ..., "configuration": {...}}."""
        ...

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return the expected encoded bytes of a row, without its share of the row set.

        Parameters
        ----------
        dim
            Values of the row.
        element
            The element type's name, such as "float32".

        Raises
        ------
        RowsError
            The codec doesn't store the element type.
        """
        ...

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of a chunk of `rows` rows that holds the given ones.

        Parameters
        ----------
        values
            (n, dim), of the element type's array dtype.
        offsets
            (n,) integers, strictly increasing: each row's place in the chunk. None stands for 0 to n - 1.
        rows
            The number of rows of the chunk, at least 1.
        element
            The element type's name, such as "float32".
        seal
            64 bits that tie the payload to its place in a store; 0 for none.

        Raises
        ------
        RowsError
            An argument is not as above, or the codec doesn't store the element type.
        """
        ...


class NamedCodec:
    """What the row codecs of this package share: a name, and options."""

    _name: ClassVar[str]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration that `row_codec` takes, without options that have their default."""
        return {"id": f"cnr_{self._name}", **self._options(), **self._own_options()}

    def zarr_codec(self) -> dict[str, Any]:
        """Return the entry of a Zarr v3 array's `codecs`."""
        return {"name": f"cnr.{self._name}", "configuration": self._options()}

    def _options(self) -> dict[str, Any]:
        return {}

    def _own_options(self) -> dict[str, Any]:
        """Options that the codec of a Zarr array does not have."""
        return {}


@runtime_checkable
class ChunksCodec(RowCodec, Protocol):
    """A row codec that encodes the rows of several chunks with one call of its kernel.

    Threads that run Python wait for each other at each such call, so one for many chunks costs less than one for each.
    """

    def encode_chunks(
        self,
        values: Rows,
        offsets: Offsets | None,
        edges: Sequence[int],
        rows: int,
        *,
        element: str,
        seals: Sequence[int],
    ) -> list[bytes]:
        """Return the payloads of several chunks, as `encode_rows` returns each.

        Parameters
        ----------
        values
            (n, dim), of the element type's array dtype: the rows of all chunks.
        offsets
            (n,) integers: each row's place in its chunk, strictly increasing in each. None stands for the first places.
        edges
            Where each chunk's rows begin in `values`, and where the last one's end. A chunk has at least one.
        rows
            The number of rows of each chunk.
        element
            The element type's name, such as "float32".
        seals
            Each chunk's.

        Raises
        ------
        RowsError
            An argument is not as above, or the codec doesn't store the element type.
        """
        ...


def encode_chunks(
    codec: RowCodec,
    values: Rows,
    offsets: Offsets | None,
    edges: Sequence[int],
    rows: int,
    *,
    element: str,
    seals: Sequence[int],
) -> list[bytes]:
    """Return the payloads of several chunks; see `ChunksCodec.encode_chunks`. Any row codec will do."""
    if isinstance(codec, ChunksCodec):
        return codec.encode_chunks(values, offsets, edges, rows, element=element, seals=seals)
    return encode_each(codec, values, offsets, edges, rows, element=element, seals=seals)


def encode_each(
    codec: RowCodec,
    values: Rows,
    offsets: Offsets | None,
    edges: Sequence[int],
    rows: int,
    *,
    element: str,
    seals: Sequence[int],
) -> list[bytes]:
    """Return what `encode_chunks` does, encoded one by one."""
    return [
        codec.encode_rows(
            values[begin:end],
            None if offsets is None else offsets[begin:end],
            rows,
            element=element,
            seal=seal,
        )
        for (begin, end), seal in zip(pairwise(edges), seals, strict=True)
    ]


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return codes packed to (n, ceil(dim * bits / 8)) bytes, the lowest bit first. Each row starts on a byte.

    Parameters
    ----------
    codes
        uint8 (n, dim), each below 2**bits.
    bits
        Bits of a code, 1 to 8.
    """
    flags = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(flags.reshape(len(codes), -1), axis=1, bitorder="little")
