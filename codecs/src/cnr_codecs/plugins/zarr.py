"""The codecs as serializers of Zarr v3 arrays.

zarr.create_array(..., serializer={"name": "cnr.uniform", "configuration": {"scheme": "adaptive", "bits": 4}})
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, Self, cast

from zarr.abc.codec import ArrayBytesCodec
from zarr.codecs import BytesCodec, Crc32cCodec, Endian, ShardingCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import parse_named_configuration

from cnr_codecs.dense import decode_dense, encode_dense
from cnr_codecs.elements import array_dtype, element_named, element_of
from cnr_codecs.errors import CodecConfigError, PayloadError, RowsError
from cnr_codecs.kmeans.kmeans import GroupName, KMeansRows
from cnr_codecs.lattice.floating import DEFAULT_MANTISSA_BITS, FloatingRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.payload.plain import decode_plain
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import RowCodec
from cnr_codecs.rows import LosslessRows
from cnr_codecs.uniform.uniform import SchemeName, UniformRows

# To hand a smaller chunk to a thread takes longer than to encode it.
_THREAD_BYTES = 1 << 20


class _ZarrCodec(ArrayBytesCodec):
    """What the codecs share. They encode chunks (rows, dim) or (rows,) to payloads.

    The fields of each are options of its `kind` of row codec, which proves them and fills in what was left out.
    """

    is_fixed_size = False
    name: ClassVar[str]
    kind: ClassVar[Callable[..., RowCodec]]

    def __post_init__(self) -> None:
        codec = self.rows_codec
        for field in fields(self):
            object.__setattr__(self, field.name, getattr(codec, field.name))

    @property
    def rows_codec(self) -> RowCodec:
        """The row codec that encodes the chunks."""
        return type(self).kind(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the codec of a metadata entry {"name": ..., "configuration": {...}}."""
        _, configuration = parse_named_configuration(data, cls.name, require_configuration=False)
        unknown = set(configuration or {}) - {field.name for field in fields(cls)}
        if unknown:
            raise CodecConfigError(f"codec {cls.name} has no option {', '.join(sorted(unknown))}")
        return cls(**(configuration or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata entry."""
        return self.rows_codec.zarr_codec()

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Check that the codec stores arrays of this shape and dtype."""
        if len(shape) not in (1, 2):
            raise RowsError(f"codec {self.name} stores arrays (rows, dim) or (rows,), got shape {shape}")
        self._element(dtype)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Return the codec itself, once it is valid for the array.

        Inside a shard, this is the only call that sees the array's dtype.
        """
        self.validate(shape=array_spec.shape, dtype=array_spec.dtype, chunk_grid=None)
        return self

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Refuse: the size of a chunk depends on its rows."""
        raise NotImplementedError(f"the size of a {self.name} chunk depends on its rows")

    def _element(self, dtype: Any) -> str:
        element = element_of(dtype.to_native_dtype())
        self.rows_codec.bytes_per_row(1, element)
        return element

    def _encode_sync(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        values = chunk_data.as_numpy_array()
        values = values.reshape(len(values), -1)
        return chunk_spec.prototype.buffer.from_bytes(encode_dense(self.rows_codec, values))

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        dtype = array_dtype(self._element(chunk_spec.dtype))
        rows, dim = (*chunk_spec.shape, 1)[:2]
        data, chunk_bytes = chunk_data.as_numpy_array(), rows * dim * dtype.itemsize
        plain = decode_plain(data, chunk_bytes)
        if plain is not None and plain.shape == (rows, dim) and plain.dtype == dtype:
            return chunk_spec.prototype.nd_buffer.from_numpy_array(plain.reshape(chunk_spec.shape))
        payload = parse(data, max_decoded_bytes=chunk_bytes)
        if (payload.rows, payload.dim) != (rows, dim) or element_named(payload.element).array != dtype:
            raise PayloadError(
                f"payload: it has {payload.rows} x {payload.dim} {payload.element} values, the chunk is "
                f"{rows} x {dim} {dtype}"
            )
        chunk = decode_dense(payload).reshape(chunk_spec.shape)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(chunk)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        if chunk_data.dtype.itemsize * prod(chunk_spec.shape) < _THREAD_BYTES:
            return self._encode_sync(chunk_data, chunk_spec)
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        if chunk_spec.dtype.to_native_dtype().itemsize * prod(chunk_spec.shape) < _THREAD_BYTES:
            return self._decode_sync(chunk_data, chunk_spec)
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)


@dataclass(frozen=True)
class ZarrUniform(_ZarrCodec):
    """Uniform quantization of each row. The options are those of `cnr_codecs.UniformRows`."""

    name: ClassVar[str] = "cnr.uniform"
    kind = UniformRows

    scheme: SchemeName = "adaptive"
    bits: int = 4
    bins: int | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class ZarrKMeans(_ZarrCodec):
    """k-means of each row or group of rows. The options are those of `cnr_codecs.KMeansRows`."""

    name: ClassVar[str] = "cnr.kmeans"
    kind = KMeansRows

    bits: int = 4
    group: GroupName = "row"
    exact: bool = False
    block_rows: int | None = None
    clusters: int | None = None


@dataclass(frozen=True)
class ZarrLattice(_ZarrCodec):
    """Rows as integers on one step. The options are those of `cnr_codecs.LatticeRows`."""

    name: ClassVar[str] = "cnr.lattice"
    kind = LatticeRows

    rms_step: float | None = None
    step: float | None = None


@dataclass(frozen=True)
class ZarrFloating(_ZarrCodec):
    """Values with fewer bits of their mantissa. The options are those of `cnr_codecs.FloatingRows`."""

    name: ClassVar[str] = "cnr.floating"
    kind = FloatingRows

    mantissa_bits: int = DEFAULT_MANTISSA_BITS


@dataclass(frozen=True)
class ZarrRows(_ZarrCodec):
    """Rows stored bit for bit. It reads the payloads of every row codec.

    {"name": "cnr.rows", "configuration": {"chunk_shape": ...}} is short for shards of such chunks: Zarr's
    `sharding_indexed` of that chunk_shape with the codecs cnr.rows and crc32c.
    """

    name: ClassVar[str] = "cnr.rows"
    kind = LosslessRows

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        configuration = data.get("configuration")
        if not isinstance(configuration, dict) or configuration.keys() != {"chunk_shape"}:
            return super().from_dict(data)
        shards = ShardingCodec(
            chunk_shape=configuration["chunk_shape"],
            codecs=[cls(), Crc32cCodec()],
            index_codecs=[BytesCodec(endian=Endian.little), Crc32cCodec()],
        )
        return cast("Self", shards)  # Zarr takes whatever codec a name stands for
