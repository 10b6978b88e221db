"""The codecs as Zarr sees them."""

import copy
import json
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.abc.store import ByteRequest
from zarr.codecs import Crc32cCodec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.core.sync import sync
from zarr.registry import get_codec_class
from zarr.storage import MemoryStore

import cnr_codecs
from cnr_codecs import (
    CodecConfigError,
    FloatingRows,
    KMeansRows,
    LatticeRows,
    LosslessRows,
    PayloadError,
    RowCodec,
    RowsError,
    UniformRows,
)
from cnr_codecs.kmeans.kmeans import GroupName
from cnr_codecs.plugins.zarr import ZarrFloating, ZarrKMeans, ZarrLattice, ZarrRows, ZarrUniform
from cnr_codecs.protocol import Rows

OPTIONS: dict[str, Any] = {"scheme": "adaptive", "bits": 4}
ADAPTIVE: dict[str, Any] = {"name": "cnr.uniform", "configuration": OPTIONS}
VALUES = np.random.default_rng(3).normal(0, 0.1, (1000, 16)).astype(np.float32)


def create(
    serializer: Any = ADAPTIVE,
    *,
    store: MemoryStore | None = None,
    shape: tuple[int, ...] = (1000, 16),
    chunks: tuple[int, ...] = (64, 16),
    dtype: str = "float32",
    **options: Any,
) -> zarr.Array[Any]:
    options = {"fill_value": np.nan if np.dtype(dtype).kind == "f" else 0, "compressors": None} | options
    return zarr.create_array(
        MemoryStore() if store is None else store,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        serializer=serializer,
        **options,
    )


def read(array: zarr.Array[Any]) -> Rows:
    return np.asarray(array[:])


def stored(array: zarr.Array[Any]) -> MutableMapping[str, Buffer]:
    """The objects of an array, by key."""
    assert isinstance(array.store, MemoryStore)
    objects: MutableMapping[str, Buffer] = array.store._store_dict
    return objects


def decoded(codec: RowCodec, values: Rows) -> Rows:
    """What rows become, without Zarr."""
    element = cnr_codecs.element_of(values.dtype)
    payload = cnr_codecs.parse(codec.encode_rows(values, None, len(values), element=element))
    out = np.empty_like(values)
    cnr_codecs.decode_into(payload, out, np.ones(len(values), np.uint8))
    return out


@pytest.mark.parametrize(
    "codec",
    [
        ZarrUniform(),
        ZarrUniform("symmetric", 8),
        ZarrUniform("adaptive", 2, bins=30, ratio=0.25),
        ZarrKMeans(),
        ZarrKMeans(2, exact=True),
        ZarrKMeans(4, "block", block_rows=32),
        ZarrKMeans(4, "cluster", clusters=16),
        ZarrFloating(),
        ZarrFloating(7),
        ZarrLattice(),
        ZarrLattice(0.1),
        ZarrLattice(step=0.25),
        ZarrRows(),
    ],
)
def test_metadata_round_trips(
    codec: ZarrUniform | ZarrKMeans | ZarrLattice | ZarrFloating | ZarrRows,
) -> None:
    entry = json.loads(json.dumps(codec.to_dict()))
    assert type(codec).from_dict(entry) == codec
    assert get_codec_class(entry["name"]) is type(codec)
    assert entry == codec.rows_codec.zarr_codec()


def test_options_of_the_walk_stand_in_the_metadata_and_their_absence_means_the_search() -> None:
    walk = ZarrUniform(bins=45)
    assert walk == ZarrUniform(bins=45, ratio=0.5) != ZarrUniform()
    assert walk.to_dict()["configuration"] == OPTIONS | {"bins": 45, "ratio": 0.5}
    assert ZarrUniform().to_dict() == ADAPTIVE


def test_default_block_rows_are_left_out_of_the_metadata() -> None:
    assert ZarrKMeans(4, "block", block_rows=64) == ZarrKMeans(4, "block")


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "cnr.uniform", "configuration": {"bitz": 4}},
        {"name": "cnr.uniform", "configuration": {"bits": 40}},
        {"name": "cnr.kmeans", "configuration": {"group": "column"}},
        {"name": "cnr.floating", "configuration": {"mantissa_bits": 8}},
        {"name": "cnr.floating", "configuration": {"bits": 4}},
        {"name": "cnr.lattice", "configuration": {"step": 0.1}},
        {"name": "cnr.lattice", "configuration": {"bits": 4}},
        {"name": "cnr.rows", "configuration": {"bits": 4}},
    ],
)
def test_wrong_options_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(CodecConfigError):
        get_codec_class(entry["name"]).from_dict(entry)


@pytest.mark.parametrize("group", ["row", "block", "cluster"])
def test_k_means_arrays_read_what_the_codec_decodes(group: GroupName) -> None:
    serializer = {"name": "cnr.kmeans", "configuration": {"bits": 2, "group": group}}
    array = create(serializer, chunks=(250, 16), shards=(500, 16))
    array[:] = VALUES
    codec = KMeansRows(2, group)
    expected = np.concatenate([decoded(codec, VALUES[row : row + 250]) for row in range(0, 1000, 250)])
    np.testing.assert_array_equal(array[:], expected)
    np.testing.assert_array_equal(zarr.open_array(array.store, mode="r")[299:301], expected[299:301])


@pytest.mark.parametrize("codec", [LatticeRows(0.2), LatticeRows(step=0.03125), FloatingRows()])
def test_arrays_of_a_lattice_read_what_the_codec_decodes(codec: LatticeRows | FloatingRows) -> None:
    array = create(codec.zarr_codec(), chunks=(250, 16), shards=(500, 16))
    array[:] = VALUES
    expected = np.concatenate([decoded(codec, VALUES[row : row + 250]) for row in range(0, 1000, 250)])
    np.testing.assert_array_equal(array[:], expected)
    np.testing.assert_array_equal(zarr.open_array(array.store, mode="r")[299:301], expected[299:301])


@pytest.mark.parametrize("chunks", [(64, 16), (1000, 16), (300, 8)])
def test_arrays_read_what_the_codec_decodes(chunks: tuple[int, ...]) -> None:
    array = create(chunks=chunks)
    array[:] = VALUES
    expected = np.concatenate(
        [
            decoded(UniformRows(), np.ascontiguousarray(VALUES[:, c : c + chunks[1]]))
            for c in range(0, 16, chunks[1])
        ],
        axis=1,
    )
    np.testing.assert_array_equal(array[:], expected)
    np.testing.assert_array_equal(array[299:301, 7:9], expected[299:301, 7:9])
    reopened = zarr.open_array(array.store, mode="r")
    np.testing.assert_array_equal(reopened[:], expected)


def test_rows_are_lossless() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 32, (100, 6), np.uint32).view(np.float32)
    array = create("auto", shape=(100, 6), chunks=(32, 6))
    array = create({"name": "cnr.rows", "configuration": {}}, shape=(100, 6), chunks=(32, 6))
    array[:] = values
    assert read(array).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64"])
def test_one_dimensional_arrays_of_every_kind(dtype: str) -> None:
    values = (np.arange(50) % 7).astype(dtype)
    array = create({"name": "cnr.rows"}, shape=(50,), chunks=(16,), dtype=dtype)
    array[:] = values
    np.testing.assert_array_equal(array[:], values)
    assert np.asarray(array[17:19]).dtype == values.dtype


def test_shards_with_checksums_read_single_rows() -> None:
    sizes = []

    class CountingStore(MemoryStore):
        async def get(
            self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            value = await super().get(key, prototype, byte_range)
            if value is not None and key.startswith("c/"):
                sizes.append(len(value))
            return value

    store = CountingStore()
    array = create(store=store, chunks=(64, 16), shards=(512, 16), compressors=[Crc32cCodec()])
    array[:] = VALUES
    expected = decoded(UniformRows(), VALUES)
    np.testing.assert_array_equal(array[:], expected)
    sizes.clear()
    np.testing.assert_array_equal(array[700:702], expected[700:702])
    assert len(sizes) == 2, "the shard's index and one chunk"
    assert sum(sizes) < 64 * 16 * 4


def test_a_damaged_shard_is_an_error() -> None:
    array = create(chunks=(64, 16), shards=(512, 16), compressors=[Crc32cCodec()])
    array[:] = VALUES
    key = "c/0/0"
    shard = bytearray(stored(array)[key].to_bytes())
    shard[40] ^= 1
    sync(array.store.set(key, zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(bytes(shard))))
    with pytest.raises(ValueError, match="checksum"):
        array[:]


def test_a_chunk_of_another_shape_or_type_is_an_error() -> None:
    array = create(shape=(64, 16))
    prototype = zarr.core.buffer.default_buffer_prototype().buffer
    for rows, dim, element in ((32, 16, "float32"), (64, 8, "float32"), (64, 16, "float16")):
        values = np.zeros((rows, dim), element)
        data = LosslessRows().encode_rows(values, None, rows, element=element)
        sync(array.store.set("c/0/0", prototype.from_bytes(data)))
        with pytest.raises(PayloadError, match=f"{rows} x {dim} {element}"):
            array[:]


def test_rows_that_are_not_present_read_as_fill() -> None:
    array = create(shape=(64, 4), chunks=(64, 4))
    values = VALUES[:3, :4].copy()
    data = LosslessRows().encode_rows(values, np.array([5, 9, 63]), 64, element="float32")
    sync(array.store.set("c/0/0", zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data)))
    rows = read(array)
    np.testing.assert_array_equal(rows[[5, 9, 63]], values)
    assert np.isnan(np.delete(rows, [5, 9, 63], axis=0)).all()


def test_only_rows_of_the_fill_values_nan_are_left_out() -> None:
    array = create(shape=(70, 2), chunks=(64, 2))
    values = np.zeros((70, 2), np.float32)
    values[1] = np.nan
    values[2, 0] = np.nan
    values[3] = np.array(0x7FC00001, np.uint32).view(np.float32)
    array[:] = values
    assert read(array).tobytes() == values.tobytes()

    def present(key: str) -> npt.NDArray[np.int64]:
        return cnr_codecs.present_rows(cnr_codecs.parse(stored(array)[key].to_bytes()))

    np.testing.assert_array_equal(present("c/0/0"), np.delete(np.arange(64), 1))
    np.testing.assert_array_equal(present("c/1/0"), np.arange(6))


def test_bfloat16_payloads_read_as_float32() -> None:
    array = create(shape=(8, 3), chunks=(8, 3))
    values = (VALUES[:8, :3].view(np.uint32) & 0xFFFF0000).view(np.float32)
    data = LosslessRows().encode_rows(values, None, 8, element="bfloat16")
    sync(array.store.set("c/0/0", zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data)))
    np.testing.assert_array_equal(array[:], values)


def test_updating_a_few_rows_keeps_the_others() -> None:
    array = create({"name": "cnr.rows"}, shape=(100, 16), chunks=(64, 16))
    array[:] = VALUES[:100]
    array[60:70] = 1
    expected = VALUES[:100].copy()
    expected[60:70] = 1
    np.testing.assert_array_equal(array[:], expected)


@pytest.mark.parametrize("shards", [None, (128, 16)])
@pytest.mark.parametrize("dtype", ["int32", "float64", "complex64"])
def test_dtypes_that_are_not_stored_are_refused_at_creation(
    dtype: str, shards: tuple[int, int] | None
) -> None:
    with pytest.raises(RowsError, match=dtype):
        create(dtype=dtype, shape=(256, 16), shards=shards)


@pytest.mark.parametrize("shape", [(1000, 16), (1000,)])
def test_the_lossless_codec_in_short_reads_the_shards_of_every_codec(shape: tuple[int, ...]) -> None:
    chunks, shards = (64, 16)[: len(shape)], (256, 16)[: len(shape)]
    array = create(shape=shape, chunks=chunks, shards=shards, compressors=[Crc32cCodec()])
    array[:] = VALUES.reshape(-1)[: np.prod(shape)].reshape(shape)
    expected = read(array)
    document = json.loads(stored(array)["zarr.json"].to_bytes())
    written = document["codecs"][0]["configuration"]["codecs"][0]
    assert written["name"] == "cnr.uniform"
    written |= {"name": "cnr.rows", "configuration": {}}
    codecs = document["codecs"]
    document["codecs"] = [{"name": "cnr.rows", "configuration": {"chunk_shape": list(chunks)}}]
    stored(array)["zarr.json"] = default_buffer_prototype().buffer.from_bytes(json.dumps(document).encode())
    short = zarr.open_array(array.store, mode="r")
    assert read(short).tobytes() == expected.tobytes()
    assert (short.chunks, short.shards) == (chunks, shards)
    assert json.loads(json.dumps(short.metadata.to_dict()["codecs"])) == codecs
    assert read(copy.deepcopy(short)).tobytes() == expected.tobytes()


def test_arrays_of_three_dimensions_are_refused() -> None:
    with pytest.raises(RowsError, match="shape"):
        create(shape=(4, 4, 4), chunks=(4, 4, 4))


def test_large_chunks_are_handed_to_threads_and_read_alike() -> None:
    values = np.random.default_rng(5).normal(size=(20000, 16)).astype(np.float32)
    array = create(shape=values.shape, chunks=values.shape)
    array[:] = values
    np.testing.assert_array_equal(array[:], decoded(UniformRows(), values))


def test_synchronous_methods_agree_with_zarrs_path() -> None:
    array = create(shape=(64, 16), chunks=(64, 16))
    array[:] = VALUES[:64]
    assert isinstance(array.metadata, ArrayV3Metadata)
    codec = array.metadata.codecs[0]
    assert isinstance(codec, ZarrUniform)
    spec = ArraySpec(
        shape=(64, 16),
        dtype=array.metadata.data_type,
        fill_value=np.float32(np.nan),
        config=ArrayConfig.from_dict({}),
        prototype=zarr.core.buffer.default_buffer_prototype(),
    )
    chunk = spec.prototype.nd_buffer.from_numpy_array(VALUES[:64])
    encoded = codec._encode_sync(chunk, spec)
    assert encoded is not None
    assert encoded.to_bytes() == stored(array)["c/0/0"].to_bytes()
    np.testing.assert_array_equal(codec._decode_sync(encoded, spec).as_numpy_array(), array[:])
    assert replace(codec).evolve_from_array_spec(array_spec=spec) == codec
    with pytest.raises(NotImplementedError):
        codec.compute_encoded_size(100, spec)
