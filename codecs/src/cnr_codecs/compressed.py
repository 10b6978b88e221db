"""Row codecs by their configurations, and compressors of numcodecs that follow them.

The list of compressors is closed, so a store can't make a reader run what happens to be installed. Each of them tells
in its first bytes how large they are decompressed, so what is too large is refused before it takes memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numcodecs

from cnr_codecs.elements import array_dtype
from cnr_codecs.errors import CodecConfigError, PayloadError, PayloadLimitError, RowsError
from cnr_codecs.kmeans.kmeans import KMeansRows
from cnr_codecs.lattice.floating import FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.payload.frames import claimed_size
from cnr_codecs.protocol import Offsets, RowCodec, Rows
from cnr_codecs.rows import LosslessRows
from cnr_codecs.uniform.uniform import UniformRows

_Codec = UniformRows | KMeansRows | LatticeRows | FloatingRows | LosslessRows
_KINDS: tuple[type[_Codec], ...] = (UniformRows, KMeansRows, LatticeRows, FloatingRows, LosslessRows)
_CODECS = {f"cnr_{kind._name}": kind for kind in _KINDS}
MAX_FOLLOWERS = 4
_ZARR_NAMES = {"zstd": "zstd", "blosc": "blosc", "lz4": "numcodecs.lz4"}
_BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
_BLOSC_HEAD_BYTES = 16


@dataclass(frozen=True)
class Compressors:
    """Compressors that follow a row codec, in the order in which they encode.

    Parameters
    ----------
    configs
        Their full numcodecs configurations. To `unpack`, their "id" suffices.
    """

    configs: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, then: Any) -> Compressors:
        """Return the compressors that a row codec's configuration lists.

        Parameters
        ----------
        then
            The list under "then", whether this release knows the row codec or not.

        Raises
        ------
        CodecConfigError
            It is not a list as `Followed` takes it, or an empty one.
        """
        if not isinstance(then, list | tuple) or len(then) > MAX_FOLLOWERS:
            raise CodecConfigError(f"then must list at most {MAX_FOLLOWERS} configurations, got {then!r}")
        return cls(tuple(map(_full_config, then)))

    @classmethod
    def of_zarr(cls, codecs: Iterable[Mapping[str, Any]]) -> Compressors:
        """Return the compressors that a Zarr v3 array names, to `unpack` by.

        Parameters
        ----------
        codecs
            The entries of the array's `codecs` behind the row codec's.

        Raises
        ------
        CodecConfigError
            There are too many entries, or this release doesn't know one of them.
        """
        configs = tuple({"id": _known_id(entry.get("name"))} for entry in codecs)
        if len(configs) > MAX_FOLLOWERS:
            raise CodecConfigError(
                f"{len(configs)} codecs follow the row codec, this release reads at most {MAX_FOLLOWERS}"
            )
        return cls(configs)

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """Return the entries of a Zarr v3 array's `codecs` behind the row codec's."""
        return [*map(_zarr_codec, self.configs)]

    def pack(self, data: bytes, rows: int, dim: int, element: str) -> bytes:
        """Return a payload compressed.

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
        for config in self.configs:
            if len(data) > max_bytes:
                raise RowsError(
                    f"a chunk of {rows} x {dim} {element} takes {len(data)} bytes, readers accept at most "
                    f"{max_bytes}; use fewer rows a chunk"
                )
            data = bytes(numcodecs.get_codec(dict(config)).encode(data))
        return data

    def unpack(self, data: Any, most_bytes: int) -> Any:
        """Return the payload, as a bytes-like object. Without compressors it is `data` itself.

        Parameters
        ----------
        data
            The bytes of the last compressor.
        most_bytes
            The most bytes that the payload, or a stage of its encoding, may have; see `most_packed_bytes`.

        Raises
        ------
        PayloadLimitError
            It has more.
        PayloadError
            The bytes are not what these compressors write.
        """
        for config in reversed(self.configs):
            data = _decompress(config["id"], memoryview(data).cast("B"), most_bytes)
        return data


@dataclass(frozen=True)
class Followed:
    """A row codec whose payloads are compressed by codecs of numcodecs, in order.

    `encode_rows` returns the last compressor's bytes, not a payload. `Compressors.unpack` decodes them to the payload.

    Parameters
    ----------
    codec
        The row codec.
    then
        One to four configurations of numcodecs, such as ({"id": "zstd", "level": 3},), of zstd, blosc or lz4.

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
        if not self.then:
            raise CodecConfigError(f"then must list 1 to {MAX_FOLLOWERS} configurations, got {self.then!r}")
        object.__setattr__(self, "then", Compressors.of(self.then).configs)

    def __hash__(self) -> int:
        return hash((self.codec, json.dumps(self.then, sort_keys=True)))

    @property
    def compressors(self) -> Compressors:
        """The compressors of `then`."""
        return Compressors(tuple(self.then))

    def get_config(self) -> dict[str, Any]:
        """Return the row codec's configuration with "then", the full configurations of the compressors."""
        return {**self.codec.get_config(), "then": [dict(each) for each in self.then]}

    def zarr_codec(self) -> dict[str, Any]:
        """Return the row codec's entry of a Zarr v3 array's `codecs`. `zarr_codecs` returns all entries."""
        return self.codec.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        """Return what the row codec does. What the compressors save is not known beforehand."""
        return self.codec.bytes_per_row(dim, element)

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        """Return the payload of `RowCodec.encode_rows`, compressed.

        Raises
        ------
        RowsError
            As the row codec, or the payload has more bytes than readers accept.
        """
        data = self.codec.encode_rows(values, offsets, rows, element=element, seal=seal)
        return self.compressors.pack(data, rows, values.shape[1], element)


def row_codec(config: str | Mapping[str, Any] | RowCodec) -> RowCodec:
    """Return the row codec of a name or of a configuration, such as {"id": "cnr_uniform", "bits": 4}.

    Parameters
    ----------
    config
        A name, such as "cnr_uniform", or a configuration. Its entry "then", if any, lists the numcodecs
        configurations that follow the row codec; see `Followed`. A row codec is returned as it is.

    Raises
    ------
    CodecConfigError
        The name is unknown, or the codec doesn't take these options.
    """
    if isinstance(config, RowCodec):
        return config
    if isinstance(config, str):
        config = {"id": config}
    if not isinstance(config, Mapping):
        raise CodecConfigError(
            f"expected a codec's name, configuration or object, got {type(config).__name__}"
        )
    options = dict(config)
    name = options.pop("id", None)
    if name not in _CODECS:
        raise CodecConfigError(f"unknown codec {name!r}; use one of {', '.join(_CODECS)}")
    then = options.pop("then", None)
    try:
        codec = _CODECS[name](**options)
    except TypeError as error:
        raise CodecConfigError(f"codec {name} doesn't take these options: {error}") from error
    return codec if then is None else Followed(codec, then)


def zarr_codecs(codec: RowCodec) -> list[dict[str, Any]]:
    """Return the entries of a Zarr v3 array's `codecs`: the row codec's, then those of the compressors behind it.

    Parameters
    ----------
    codec
        A row codec, followed by compressors or not.
    """
    return [codec.zarr_codec(), *(codec.compressors.zarr_codecs() if isinstance(codec, Followed) else ())]


def most_packed_bytes(rows: int, dim: int, element: str) -> int:
    """Return the most bytes that readers accept for a chunk's payload, and for each stage of its compression.

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


def _known_id(zarr_name: Any) -> str:
    for name, known in _ZARR_NAMES.items():
        if zarr_name == known:
            return name
    raise CodecConfigError(
        f"codec {zarr_name!r} follows the row codec, and this release doesn't read it; it reads "
        f"{', '.join(_ZARR_NAMES.values())}"
    )


def _full_config(config: Any) -> dict[str, Any]:
    """Return the configuration with every option, as numcodecs states it."""
    name = config.get("id") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or name not in [*_ZARR_NAMES]:
        raise CodecConfigError(
            f"{name!r} can't follow a row codec; give a configuration {{'id': ...}} of one of {', '.join(_ZARR_NAMES)}"
        )
    try:
        codec = numcodecs.get_codec(dict(config))
        codec.encode(bytes(1))  # of some options it tells only then
        full: dict[str, Any] = codec.get_config()
    except (TypeError, ValueError, RuntimeError) as error:
        raise CodecConfigError(f"codec {name} doesn't take these options: {error}") from error
    return full


def _zarr_codec(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in config.items() if name != "id"}
    if config["id"] == "blosc":
        # numcodecs' automatic shuffle (-1) shuffles bits where items are single bytes, as in a payload.
        options = {"typesize": 1, **options, "shuffle": _BLOSC_SHUFFLES[config["shuffle"]]}
    return {"name": _ZARR_NAMES[config["id"]], "configuration": options}


def _decompress(name: str, data: memoryview, max_bytes: int) -> bytearray:
    size = _claimed_size(name, data)
    if size < 0:
        raise PayloadError(
            f"codec {name}: {len(data)} bytes are damaged, or do not tell their decompressed size"
        )
    if size > max_bytes:
        raise PayloadLimitError(f"codec {name}: {size} bytes when decompressed, the limit is {max_bytes}")
    found = bytearray(size)
    try:
        if found:
            numcodecs.get_codec({"id": name}).decode(data, out=found)
    except (ValueError, RuntimeError) as error:
        raise PayloadError(f"codec {name}: the bytes are damaged, or not its own: {error}") from error
    return found


def _claimed_size(name: str, data: memoryview) -> int:
    """Return the size that the first bytes tell; -1 if they can't be this compressor's."""
    if name == "zstd":
        return claimed_size(data)
    if name == "lz4":
        return int.from_bytes(data[:4], "little") if len(data) >= 4 else -1
    if len(data) < _BLOSC_HEAD_BYTES:
        return -1
    size, _, length = struct.unpack_from("<III", data, 4)
    return int(size) if length == len(data) else -1  # the library trusts the length
