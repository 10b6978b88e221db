"""The codecs as numcodecs sees them."""

import array
import json
import mmap
import tempfile
from typing import Any

import numcodecs
import numpy as np
import pytest
from numcodecs.abc import Codec
from numcodecs.zstd import Zstd

from cnr_codecs import PayloadError, PayloadLimitError, RowsError, UniformRows
from cnr_codecs.plugins.numcodecs_plugin import (
    FloatingCodec,
    KMeansCodec,
    LatticeCodec,
    RowsCodec,
    UniformCodec,
)

CODECS = [
    UniformCodec(),
    UniformCodec("symmetric", 2),
    UniformCodec("asymmetric", 8),
    UniformCodec("adaptive", 3, bins=10, ratio=0.5),
    KMeansCodec(2),
    KMeansCodec(3, exact=True),
    KMeansCodec(4, "block", block_rows=20),
    KMeansCodec(1, "cluster", clusters=4),
    FloatingCodec(),
    FloatingCodec(5),
    LatticeCodec(),
    LatticeCodec(0.1, 0.015625),
    RowsCodec(),
]
NAMES: dict[str, Any] = {"UniformCodec": UniformCodec, "KMeansCodec": KMeansCodec, "RowsCodec": RowsCodec}
NAMES |= {"LatticeCodec": LatticeCodec, "FloatingCodec": FloatingCodec}
VALUES = np.random.default_rng(2).normal(0, 0.1, (50, 12)).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_configuration_round_trips_through_json(codec: Codec) -> None:
    config = json.loads(json.dumps(codec.get_config()))
    assert numcodecs.get_codec(config) == codec
    assert config["id"] == codec.codec_id
    assert eval(repr(codec), NAMES.copy()) == codec  # noqa: S307


def test_entry_points_find_the_codecs() -> None:
    from importlib.metadata import entry_points

    found = {point.name: point.load() for point in entry_points(group="numcodecs.codecs")}
    assert found["cnr_uniform"] is UniformCodec
    assert found["cnr_kmeans"] is KMeansCodec
    assert found["cnr_floating"] is FloatingCodec
    assert found["cnr_lattice"] is LatticeCodec
    assert found["cnr_rows"] is RowsCodec


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_arrays_of_every_layout_encode_alike(codec: Codec) -> None:
    encoded = codec.encode(VALUES)
    assert isinstance(encoded, bytes)
    assert codec.encode(np.asfortranarray(VALUES)) == encoded
    assert codec.encode(VALUES.astype(">f4")) == encoded
    assert codec.encode(np.repeat(VALUES, 2, axis=0)[::2]) == encoded


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_decoding_takes_every_kind_of_buffer(codec: Codec) -> None:
    encoded = codec.encode(VALUES)
    expected = codec.decode(encoded)
    assert expected.shape == VALUES.shape
    assert expected.dtype == np.float32
    with tempfile.TemporaryFile() as file:
        file.write(encoded)
        file.flush()
        buffers: list[Any] = [bytearray(encoded), memoryview(encoded), array.array("b", encoded)]
        buffers += [np.frombuffer(encoded, "u1"), mmap.mmap(file.fileno(), 0)]
        for buffer in buffers:
            np.testing.assert_array_equal(codec.decode(buffer), expected)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_decoding_fills_every_kind_of_output(codec: Codec) -> None:
    encoded = codec.encode(VALUES)
    expected = codec.decode(encoded)
    for out in (
        np.empty((50, 12), np.float32),
        np.empty((50, 12), np.float32, order="F"),
        np.empty(600, np.float32),
        np.empty((50, 12), ">f4"),
        np.empty((50, 24), np.float32)[:, ::2],
    ):
        assert codec.decode(encoded, out=out) is out
        np.testing.assert_array_equal(out.reshape(50, 12), expected)
    for raw in (
        bytearray(2400),
        memoryview(bytearray(2400)),
        array.array("b", bytes(2400)),
        np.empty(2400, "u1"),
    ):
        codec.decode(encoded, out=raw)
        assert bytes(raw) == expected.tobytes()


def test_one_dimension_is_a_column() -> None:
    for codec, values in (
        (RowsCodec(), np.arange(9, dtype=np.int16)),
        (UniformCodec(), VALUES[0]),
    ):
        decoded = codec.decode(codec.encode(values))
        assert decoded.shape == (len(values), 1)
        np.testing.assert_array_equal(decoded[:, 0], values)


def test_payloads_are_those_of_the_row_codec() -> None:
    expected = UniformRows("adaptive", 4).encode_rows(VALUES, None, 50, element="float32")
    assert UniformCodec().encode(VALUES) == expected


def test_another_codec_may_follow() -> None:
    packed = Zstd().encode(UniformCodec().encode(VALUES))
    assert UniformCodec().decode(Zstd().decode(packed)).shape == VALUES.shape


def test_rows_of_nan_are_stored() -> None:
    values = np.full((3, 40), np.nan, np.float32)
    decoded = UniformCodec().decode(UniformCodec().encode(values))
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("codec", [UniformCodec("symmetric", 1), RowsCodec()])
def test_large_arrays_round_trip_but_small_payloads_do_not_grow_large(codec: Codec) -> None:
    values = np.ones((1 << 15, 600), np.float32)
    encoded = codec.encode(values)
    np.testing.assert_array_equal(codec.decode(encoded), values)
    sparse = UniformRows().encode_rows(values[:1], None, 1 << 15, element="float32")
    with pytest.raises(PayloadLimitError):
        codec.decode(sparse)
    assert np.isnan(codec.decode(sparse, out=np.empty_like(values))[1:]).all()


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2, 2), "f4"), np.zeros((0, 3), "f4"), np.zeros((3, 0), "f4"), np.float32(3)]
)
@pytest.mark.parametrize("codec", [UniformCodec(), RowsCodec()], ids=repr)
def test_arrays_of_other_shapes_are_refused(codec: Codec, values: Any) -> None:
    with pytest.raises(RowsError, match="shape"):
        codec.encode(values)


def test_dtypes_that_are_not_stored_are_refused() -> None:
    for values in np.zeros((2, 2), np.int32), np.zeros((2, 2)):
        with pytest.raises(RowsError, match="cnr_rows"):
            UniformCodec().encode(values)
    for values in np.zeros((2, 2), "c8"), np.zeros((2, 2), "M8[s]"):
        with pytest.raises(RowsError, match="can't be stored"):
            RowsCodec().encode(values)


def test_wrong_bytes_and_outputs_are_refused() -> None:
    encoded = UniformCodec().encode(VALUES)
    with pytest.raises(PayloadError):
        UniformCodec().decode(encoded[:-1])
    for out in np.empty((50, 11), "f4"), np.empty((50, 12), "i4"), bytes(2400), np.empty(1200, "f2"):
        with pytest.raises(RowsError, match="out"):
            UniformCodec().decode(encoded, out=out)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_misaligned_bytes_are_filled(codec: Codec) -> None:
    encoded = codec.encode(VALUES)
    out = bytearray(VALUES.nbytes + 1)
    codec.decode(encoded, out=memoryview(out)[1:])
    assert out[1:] == codec.decode(encoded).tobytes()


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(100, np.uint8)[::2],
        np.zeros(100, np.uint16)[::2],
        np.zeros((10, 10), np.uint8)[:, ::2],
        np.array([1, "a"], object),
        np.zeros(4, [("a", object)]),
        None,
        "text",
    ],
)
def test_what_is_not_contiguous_bytes_is_refused(data: Any) -> None:
    for codec in UniformCodec(), RowsCodec():
        with pytest.raises(PayloadError, match="contiguous bytes"):
            codec.decode(data)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("element", ["f4", "f2"])
def test_nothing_is_raised_where_numpy_is_told_to_raise(codec: Codec, element: str) -> None:
    values = np.random.default_rng(0).normal(0, 1e-6, (40, 40)).astype(element)
    values.view(f"u{values.itemsize}")[3, 5] = 0x7F800001 if element == "f4" else 0x7C01
    values[4:8] = np.array([[1e-30], [np.inf], [1e4], [0]]).astype(element)
    values[12] = np.linspace(-6e4, 6e4, 40)
    if element == "f4":
        values[9:11] = np.array([[3e38], [-3e38]])
        values[11, ::2] = 3e38
    with np.errstate(all="raise"):
        decoded = codec.decode(codec.encode(values))
    for row in 3, 5:
        assert decoded[row].tobytes() == values[row].tobytes()
