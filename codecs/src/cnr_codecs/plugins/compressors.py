"""The compressors and checksums of numcodecs that may follow a row codec, under the names that Zarr v3 gives them.

The list is closed: a codec that a store's metadata names is looked up here and nowhere else, so metadata can't make a
reader run what happens to be installed. Every codec decodes within a size that the caller knows beforehand.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numcodecs

from cnr_codecs.errors import CodecConfigError, PayloadError, PayloadLimitError
from cnr_codecs.payload.frames import claimed_size

# A dictionary of 64 MiB, that of lzma's highest preset, and what the decoder needs beside it.
_LZMA_MEMORY_BYTES = 80 << 20
_BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
# What the libraries raise for bytes that they did not write.
_DAMAGED = (ValueError, RuntimeError, OSError, EOFError, zlib.error, lzma.LZMAError)


class _Stream(Protocol):
    """The standard library's decompressors: bounded, and aware of their end."""

    @property
    def unused_data(self) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: memoryview, max_length: int, /) -> bytes: ...


@dataclass(frozen=True)
class Follower:
    """One bytes-to-bytes codec."""

    zarr_name: str  # its name in a Zarr array's `codecs`
    # `decode(data, max_bytes)` returns at most that many bytes, or raises
    decode: Callable[[memoryview, int], bytes | bytearray]
    # Makes the configuration in a Zarr array's `codecs` from that of numcodecs
    configuration: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


def follower_config(config: Any) -> dict[str, Any]:
    """Return the full configuration {"id": ..., every option} of a follower, as numcodecs states it."""
    name = config.get("id") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(name, str) or name not in _FOLLOWERS:
        raise CodecConfigError(
            f"{name!r} can't follow a row codec; give a configuration {{'id': ...}} of one of "
            f"{', '.join(_FOLLOWERS)}"
        )
    try:
        full: dict[str, Any] = numcodecs.get_codec(dict(config)).get_config()
    except (TypeError, ValueError) as error:
        raise CodecConfigError(f"codec {name} doesn't take these options: {error}") from error
    if name == "lzma" and full["format"] not in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE):
        raise CodecConfigError(
            "codec lzma must write the format xz or alone; the other formats don't say how they are read"
        )
    return full


def follower_zarr_codec(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a Zarr v3 array's `codecs` for a configuration that `follower_config` returned."""
    follower = _FOLLOWERS[config["id"]]
    options = {name: value for name, value in config.items() if name != "id"}
    return {"name": follower.zarr_name, "configuration": follower.configuration(options)}


def encode(config: Mapping[str, Any], data: bytes) -> bytes:
    """Return `data` encoded by the follower of a full configuration."""
    return bytes(numcodecs.get_codec(dict(config)).encode(data))


def decode(zarr_name: str, data: Any, max_bytes: int) -> bytes | bytearray:
    """Return what a follower encoded to `data`."""
    follower = _BY_ZARR_NAME[zarr_name]
    try:
        return follower.decode(memoryview(data).cast("B"), max_bytes)
    except (PayloadError, MemoryError):
        raise
    except _DAMAGED as error:
        raise PayloadError(f"codec {zarr_name}: the bytes are damaged, or not its own: {error}") from error


def known_zarr_name(zarr_name: Any) -> str:
    """Return the name, if it is that of a follower."""
    if not isinstance(zarr_name, str) or zarr_name not in _BY_ZARR_NAME:
        raise CodecConfigError(
            f"codec {zarr_name!r} follows the row codec but is unknown; this release reads {', '.join(_BY_ZARR_NAME)}"
        )
    return zarr_name


def _limit(size: int, max_bytes: int) -> int:
    if size > max_bytes:
        raise PayloadLimitError(f"{size} bytes when decompressed, the limit is {max_bytes}")
    return size


def _stream(make: Callable[[], _Stream]) -> Callable[[memoryview, int], bytes]:
    def decode(data: memoryview, max_bytes: int) -> bytes:
        stream = make()
        found = stream.decompress(data, max_bytes + 1)
        if len(found) > max_bytes:
            raise PayloadLimitError(f"more than {max_bytes} bytes when decompressed, which is the limit")
        if not stream.eof or stream.unused_data:
            raise PayloadError("the compressed bytes are truncated, or other bytes follow them")
        return found

    return decode


def _sized(name: str, size: Callable[[memoryview], int]) -> Callable[[memoryview, int], bytearray]:
    """Return the decoder of a codec whose bytes state the decompressed size at their start."""
    codec = numcodecs.get_codec({"id": name})

    def decode(data: memoryview, max_bytes: int) -> bytearray:
        found = bytearray(_limit(size(data), max_bytes))
        if found:
            codec.decode(data, out=found)
        return found

    return decode


def _checksum(name: str) -> Callable[[memoryview, int], bytes]:
    codec = numcodecs.get_codec({"id": name})

    def decode(data: memoryview, max_bytes: int) -> bytes:
        if len(data) <= 4:
            raise PayloadError(f"codec numcodecs.{name}: {len(data)} bytes, the checksum alone takes 4")
        _limit(len(data) - 4, max_bytes)
        return bytes(codec.decode(data))

    return decode


def _zstd_size(data: memoryview) -> int:
    size = claimed_size(data)
    if size < 0:
        raise PayloadError("codec zstd: the bytes are no frame that states its size and needs no dictionary")
    return size


def _lz4_size(data: memoryview) -> int:
    if len(data) < 4:
        raise PayloadError(f"codec numcodecs.lz4: {len(data)} bytes, the header alone takes 4")
    return int.from_bytes(data[:4], "little")


def _blosc_size(data: memoryview) -> int:
    """Return the size in the header. Its length is checked here, because the library trusts it."""
    if len(data) < 16:
        raise PayloadError(f"codec blosc: {len(data)} bytes, the header alone takes 16")
    size, _, length = struct.unpack_from("<III", data, 4)
    if length != len(data):
        raise PayloadError(f"codec blosc: {len(data)} bytes, the header says {length}")
    return int(size)


def _blosc_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    # numcodecs' automatic shuffle (-1) shuffles bits where items are single bytes, as in a payload.
    shuffle = _BLOSC_SHUFFLES[options["shuffle"] if options["shuffle"] >= 0 else 2]
    return {**options, "shuffle": shuffle, "typesize": 1}


_FOLLOWERS = {
    "zstd": Follower("zstd", _sized("zstd", _zstd_size)),
    "gzip": Follower("gzip", _stream(lambda: zlib.decompressobj(wbits=31))),
    "blosc": Follower("blosc", _sized("blosc", _blosc_size), _blosc_configuration),
    "zlib": Follower("numcodecs.zlib", _stream(zlib.decompressobj)),
    "lz4": Follower("numcodecs.lz4", _sized("lz4", _lz4_size)),
    "bz2": Follower("numcodecs.bz2", _stream(bz2.BZ2Decompressor)),
    "lzma": Follower(
        "numcodecs.lzma", _stream(lambda: lzma.LZMADecompressor(lzma.FORMAT_AUTO, _LZMA_MEMORY_BYTES))
    ),
    "crc32": Follower("numcodecs.crc32", _checksum("crc32")),
    "adler32": Follower("numcodecs.adler32", _checksum("adler32")),
    "fletcher32": Follower("numcodecs.fletcher32", _checksum("fletcher32")),
}
_BY_ZARR_NAME = {follower.zarr_name: follower for follower in _FOLLOWERS.values()}
