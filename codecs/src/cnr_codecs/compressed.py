"""A row codec with codecs from bytes to bytes behind it: what is packed may be compressed once more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnr_codecs.elements import array_dtype
from cnr_codecs.errors import CodecConfigError, RowsError
from cnr_codecs.plugins.followers import check_known, follow, follower_config, follower_zarr_codec, undo
from cnr_codecs.protocol import Offsets, RowCodec, Rows

MOST_FOLLOWERS = 4


@dataclass(frozen=True)
class Followed:
    """A row codec whose payloads are handed on to codecs of numcodecs, in order.

    What `encode_rows` returns is not a payload but the last codec's bytes; `Unpacker` gives the payload back.

    Args:
        codec: the row codec.
        then: one to four configurations of numcodecs, such as ({"id": "zstd", "level": 3},). Those that turn bytes
            to bytes and that Zarr v3 has a name for: zstd, gzip, blosc, zlib, lz4, bz2, lzma, crc32, adler32 and
            fletcher32.

    Raises:
        CodecConfigError: none, too many, or one that can't follow or doesn't take its options.
    """

    codec: RowCodec
    then: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if isinstance(self.codec, Followed):
            raise CodecConfigError(
                "a codec that is followed by others can't be followed again: join the lists"
            )
        if not isinstance(self.then, list | tuple):
            raise CodecConfigError(f"then must be a list of configurations, got {self.then!r}")
        if not 1 <= len(self.then) <= MOST_FOLLOWERS:
            raise CodecConfigError(f"1 to {MOST_FOLLOWERS} codecs may follow, got {len(self.then)}")
        object.__setattr__(self, "then", tuple(follower_config(each) for each in self.then))

    def __hash__(self) -> int:
        return hash((self.codec, json.dumps(self.then, sort_keys=True)))

    def get_config(self) -> dict[str, Any]:
        """The row codec's configuration, and "then": the full configurations of what follows it."""
        return {**self.codec.get_config(), "then": [dict(each) for each in self.then]}

    def zarr_codec(self) -> dict[str, Any]:
        """The row codec's entry of a Zarr v3 array's `codecs`; see `zarr_codecs` for all of them."""
        return self.codec.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        """As the row codec's: what the others save is not known beforehand."""
        return self.codec.bytes_per_row(dim, element)

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """The payload of `RowCodec.encode_rows`, as the last of the codecs leaves it.

        Raises:
            RowsError: as the row codec, or it needs more bytes than a reader will undo.
        """
        data = self.codec.encode_rows(values, offsets, rows, element=element, seal=seal)
        return Packer(tuple(self.then)).pack(data, rows, values.shape[1], element)


def zarr_codecs(codec: RowCodec) -> list[dict[str, Any]]:
    """The entries of a Zarr v3 array's `codecs` that say how a chunk is encoded: the row codec's, then those of
    the codecs that follow it."""
    followers = codec.then if isinstance(codec, Followed) else ()
    return [codec.zarr_codec(), *Packer(tuple(followers)).zarr_codecs()]


def most_packed_bytes(rows: int, dim: int, element: str) -> int:
    """The most bytes that a payload of a chunk, or any stage of it behind a row codec, may have to be read: 5/4 of
    the chunk's decoded bytes and 1 MiB, which covers the row sets, parameters and heads of any sensible payload.
    """
    decoded_bytes = rows * dim * array_dtype(element).itemsize
    return decoded_bytes + decoded_bytes // 4 + (1 << 20)


@dataclass(frozen=True)
class Packer:
    """Hands payloads on to what follows a row codec. `then` are full configurations, in order."""

    then: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Packer:
        """For the configuration of a row codec, which need not be known; "then" says what follows it, if anything.

        Raises:
            CodecConfigError: "then" isn't what `Followed` takes.
        """
        then = config.get("then", [])
        if not isinstance(then, list | tuple) or len(then) > MOST_FOLLOWERS:
            raise CodecConfigError(f"then must list at most {MOST_FOLLOWERS} configurations, got {then!r}")
        return cls(tuple(follower_config(each) for each in then))

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The entries of a Zarr v3 array's `codecs` behind the row codec's."""
        return [follower_zarr_codec(each) for each in self.then]

    def pack(self, data: bytes, rows: int, dim: int, element: str) -> bytes:
        """The payload of a chunk of (rows, dim), as the last of the codecs leaves it.

        Raises:
            RowsError: the payload, or a stage of it, has more bytes than a reader will undo.
        """
        most = most_packed_bytes(rows, dim, element)
        for config in self.then:
            if len(data) > most:
                raise RowsError(
                    f"{len(data)} bytes for a chunk of {rows} x {dim} {element}: readers undo at most {most}; use "
                    "fewer rows a chunk"
                )
            data = follow(config, data)
        return data


@dataclass(frozen=True)
class Unpacker:
    """Undoes what follows a row codec. `names` are the Zarr names, in the order of encoding."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, codecs: Iterable[Mapping[str, Any]]) -> Unpacker:
        """For the entries of a Zarr v3 array's `codecs` behind the row codec's.

        Raises:
            CodecConfigError: there are too many, or one that this release doesn't know.
        """
        names = tuple(check_known(entry.get("name")) for entry in codecs)
        if len(names) > MOST_FOLLOWERS:
            raise CodecConfigError(
                f"{len(names)} codecs behind a row codec, at most {MOST_FOLLOWERS} are read"
            )
        return cls(names)

    def unpack(self, data: Any, most_bytes: int) -> Any:
        """The payload, a bytes-like; `data` itself where nothing follows.

        Raises:
            PayloadLimitError: the payload, or a stage of it, has more than `most_bytes`; see `most_packed_bytes`.
            PayloadError: the bytes are not what these codecs write.
        """
        for name in reversed(self.names):
            data = undo(name, data, most_bytes)
        return data
