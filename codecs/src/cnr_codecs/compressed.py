"""Row codecs that bytes-to-bytes codecs follow: compressors and checksums of numcodecs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnr_codecs.elements import array_dtype
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.plugins import compressors
from cnr_codecs.protocol import Offsets, RowCodec, Rows

MAX_FOLLOWERS = 4


@dataclass(frozen=True)
class Followed:
    """A row codec whose payloads are encoded further by codecs of numcodecs, in order.

    `encode_rows` returns the last codec's bytes, not a payload. `Unpacker` decodes them to the payload.

    Parameters
    ----------
    codec
        The row codec.
    then
        One to four configurations of numcodecs, such as ({"id": "zstd", "level": 3},). The codecs may be zstd, gzip,
        blosc, zlib, lz4, bz2, lzma, crc32, adler32 and fletcher32: they turn bytes to bytes, and Zarr v3 names them.

    Raises
    ------
    CodecConfigError
        There are none or too many, or one can't follow or doesn't take its options.
    """

    codec: RowCodec
    then: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if isinstance(self.codec, Followed):
            raise CodecConfigError(
                "codec is followed by others already and can't be followed again; join the two lists"
            )
        if not isinstance(self.then, list | tuple):
            raise CodecConfigError(f"then must be a list of configurations, got {self.then!r}")
        if not 1 <= len(self.then) <= MAX_FOLLOWERS:
            raise CodecConfigError(f"then must list 1 to {MAX_FOLLOWERS} codecs, got {len(self.then)}")
        object.__setattr__(self, "then", tuple(compressors.follower_config(each) for each in self.then))

    def __hash__(self) -> int:
        return hash((self.codec, json.dumps(self.then, sort_keys=True)))

    def get_config(self) -> dict[str, Any]:
        """Return the row codec's configuration with "then", the full configurations of the codecs that follow."""
        return {**self.codec.get_config(), "then": [dict(each) for each in self.then]}

    def zarr_codec(self) -> dict[str, Any]:
        """Return the row codec's entry of a Zarr v3 array's `codecs`. `zarr_codecs` returns all entries."""
        return self.codec.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return what the row codec does. What the other codecs save is not known beforehand."""
        return self.codec.bytes_per_row(dim, element)

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of `RowCodec.encode_rows`, encoded by the codecs that follow.

        Raises
        ------
        RowsError
            As the row codec, or the payload has more bytes than readers accept.
        """
        data = self.codec.encode_rows(values, offsets, rows, element=element, seal=seal)
        return Packer(tuple(self.then)).pack(data, rows, values.shape[1], element)


def zarr_codecs(codec: RowCodec) -> list[dict[str, Any]]:
    """Return the entries of a Zarr v3 array's `codecs`: the row codec's, then those of the codecs that follow it.

    Parameters
    ----------
    codec
        A row codec, followed by others or not.
    """
    then = tuple(codec.then) if isinstance(codec, Followed) else ()
    return [codec.zarr_codec(), *Packer(then).zarr_codecs()]


def most_packed_bytes(rows: int, dim: int, element: str) -> int:
    """Return the most bytes that readers accept for a chunk's payload, and for each stage of encoding behind it.

    That is 5/4 of the chunk's decoded bytes and 1 MiB, which covers the row sets, parameters and heads of any sensible
    payload.

    Parameters
    ----------
    rows, dim
        Rows and columns of the chunk.
    element
        The element type's name, such as "float32".
    """
    decoded_bytes = rows * dim * array_dtype(element).itemsize
    return decoded_bytes + decoded_bytes // 4 + (1 << 20)


@dataclass(frozen=True)
class Packer:
    """Encodes payloads by the codecs that follow a row codec.

    Parameters
    ----------
    then
        The full numcodecs configurations of these codecs, in order.
    """

    then: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Packer:
        """Return the packer for what follows a row codec.

        Parameters
        ----------
        config
            The row codec's configuration, whether this release knows it or not. Its "then" lists what follows.

        Raises
        ------
        CodecConfigError
            "then" is not as `Followed` takes it.
        """
        then = config.get("then", [])
        if not isinstance(then, list | tuple) or len(then) > MAX_FOLLOWERS:
            raise CodecConfigError(f"then must list at most {MAX_FOLLOWERS} configurations, got {then!r}")
        return cls(tuple(compressors.follower_config(each) for each in then))

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """Return the entries of a Zarr v3 array's `codecs` behind the row codec's."""
        return [compressors.follower_zarr_codec(each) for each in self.then]

    def pack(self, data: bytes, rows: int, dim: int, element: str) -> bytes:
        """Return a payload encoded by the codecs, in order.

        Parameters
        ----------
        data
            The payload of a chunk.
        rows, dim
            Rows and columns of the chunk.
        element
            The element type's name, such as "float32".

        Raises
        ------
        RowsError
            The payload, or a stage of its encoding, has more bytes than readers accept.
        """
        max_bytes = most_packed_bytes(rows, dim, element)
        for config in self.then:
            if len(data) > max_bytes:
                raise RowsError(
                    f"a chunk of {rows} x {dim} {element} takes {len(data)} bytes, readers accept at most "
                    f"{max_bytes}; use fewer rows a chunk"
                )
            data = compressors.encode(config, data)
        return data


@dataclass(frozen=True)
class Unpacker:
    """Decodes what the codecs behind a row codec encoded.

    Parameters
    ----------
    names
        The Zarr names of these codecs, in the order of encoding.
    """

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, codecs: Iterable[Mapping[str, Any]]) -> Unpacker:
        """Return the unpacker for what follows a row codec.

        Parameters
        ----------
        codecs
            The entries of a Zarr v3 array's `codecs` behind the row codec's.

        Raises
        ------
        CodecConfigError
            There are too many entries, or this release doesn't know one of them.
        """
        names = tuple(compressors.known_zarr_name(entry.get("name")) for entry in codecs)
        if len(names) > MAX_FOLLOWERS:
            raise CodecConfigError(
                f"{len(names)} codecs follow the row codec, this release reads at most {MAX_FOLLOWERS}"
            )
        return cls(names)

    def unpack(self, data: Any, most_bytes: int) -> Any:
        """Return the payload, as a bytes-like object. Without codecs that follow it is `data` itself.

        Parameters
        ----------
        data
            The bytes of the last codec.
        most_bytes
            The most bytes that the payload, or a stage of its encoding, may have; see `most_packed_bytes`.

        Raises
        ------
        PayloadLimitError
            It has more.
        PayloadError
            The bytes are not what these codecs write.
        """
        for name in reversed(self.names):
            data = compressors.decode(name, data, most_bytes)
        return data
