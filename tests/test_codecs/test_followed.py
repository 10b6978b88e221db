"""Row codecs with compressors behind them: what Zarr reads, what is undone, and how large it may become."""

import bz2
import gzip
import json
import struct
import warnings
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

import cnr_codecs
from cnr_codecs import (
    CodecConfigError,
    Followed,
    LosslessRows,
    PayloadError,
    PayloadLimitError,
    RowCodec,
    RowsError,
    UniformRows,
    Unpacker,
    row_codec,
    zarr_codecs,
)
from cnr_codecs.protocol import Offsets, Rows

CHAINS: dict[str, list[dict[str, Any]]] = {
    "zstd": [{"id": "zstd", "level": 3}],
    "gzip": [{"id": "gzip"}],
    "blosc": [{"id": "blosc", "cname": "zstd", "clevel": 4, "shuffle": -1}],
    "zlib": [{"id": "zlib", "level": 6}],
    "lz4": [{"id": "lz4"}],
    "bz2": [{"id": "bz2"}],
    "lzma": [{"id": "lzma", "preset": 1}],
    "crc32": [{"id": "crc32"}],
    "adler32": [{"id": "adler32"}],
    "fletcher32": [{"id": "fletcher32"}],
    "two": [{"id": "lz4"}, {"id": "zstd"}],
    "four": [{"id": "adler32"}, {"id": "zlib"}, {"id": "gzip"}, {"id": "fletcher32"}],
}


def some_rows(count: int = 600, dim: int = 16) -> Rows:
    rows = np.random.default_rng(5).normal(0, 0.1, (count, dim)).astype(np.float32)
    rows[::3] = rows[0]
    return rows


def encoded(codec: RowCodec, rows: Rows) -> bytes:
    return codec.encode_rows(rows, None, len(rows), element="float32", seal=7)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize(
    "inner", [{"id": "cnr_uniform", "bits": 4}, {"id": "cnr_rows"}], ids=lambda c: c["id"]
)
def test_what_follows_is_undone(chain: list[dict[str, Any]], inner: dict[str, Any]) -> None:
    codec = row_codec({**inner, "then": chain})
    rows = some_rows()
    data = encoded(codec, rows)
    payload = encoded(row_codec(inner), rows)
    assert data != payload
    _, *behind = zarr_codecs(codec)
    assert bytes(Unpacker.of(behind).unpack(memoryview(data), len(payload) + 100)) == payload


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_zarr_reads_and_writes_the_same_bytes(chain: list[dict[str, Any]]) -> None:
    codec = row_codec({"id": "cnr_uniform", "scheme": "asymmetric", "bits": 4, "then": chain})
    rows = some_rows()
    serializer, *compressors = zarr_codecs(codec)
    store = MemoryStore()
    array = zarr.create_array(
        store,
        shape=rows.shape,
        chunks=rows.shape,
        dtype="float32",
        fill_value=np.nan,
        serializer=serializer,
        compressors=compressors,
    )
    array[:] = rows
    written = store._store_dict["c/0/0"].to_bytes()
    payload = UniformRows("asymmetric", 4).encode_rows(rows, None, len(rows), element="float32")
    assert bytes(Unpacker.of(compressors).unpack(written, 1 << 20)) == payload
    replaced = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(encoded(codec, rows))
    store._store_dict["c/0/0"] = replaced
    decoded = np.empty_like(rows)
    cnr_codecs.decode_into(cnr_codecs.parse(payload), decoded, np.ones(len(rows), np.uint8))
    np.testing.assert_array_equal(zarr.open_array(store)[:], decoded)


def test_configurations_round_trip() -> None:
    config = {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd", "level": 3}]}
    codec = row_codec(config)
    assert codec == Followed(UniformRows(bits=4), [{"id": "zstd", "level": 3}])
    assert hash(codec) == hash(row_codec(config))
    full = json.loads(json.dumps(codec.get_config()))
    assert full["then"] == [{"id": "zstd", "level": 3, "checksum": False}]
    assert row_codec(full) == codec
    assert codec != row_codec({**config, "then": [{"id": "zstd", "level": 4}]})
    assert zarr_codecs(codec)[1] == {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    assert zarr_codecs(LosslessRows()) == [{"name": "cnr.rows", "configuration": {}}]
    assert codec.bytes_per_row(64, "float32") == UniformRows(bits=4).bytes_per_row(64, "float32")


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ([], "1 to 4"),
        ([{"id": "zstd"}] * 5, "1 to 4"),
        ({"id": "zstd"}, "list"),
        ("zstd", "list"),
        (["zstd"], "give a configuration"),
        ([{"level": 3}], "None can't follow"),
        ([{"id": ["zstd"]}], "can't follow"),
        # It takes numbers of 16 bits and more; packed codes are bytes.
        ([{"id": "pcodec"}], "'pcodec' can't follow.*zstd, gzip"),
        ([{"id": "pickle"}], "'pickle' can't follow"),
        ([{"id": "cnr_rows"}], "can't follow"),
        ([{"id": "zstd", "strength": 3}], "zstd doesn't take"),
        ([{"id": "lzma", "format": 3, "filters": [{"id": 33}]}], "xz or alone"),
    ],
)
def test_what_can_not_follow_is_refused(then: Any, message: str) -> None:
    with pytest.raises(CodecConfigError, match=message):
        row_codec({"id": "cnr_rows", "then": then})


def test_followed_codecs_are_not_followed_again() -> None:
    with pytest.raises(CodecConfigError, match="join"):
        Followed(row_codec({"id": "cnr_rows", "then": [{"id": "zstd"}]}), [{"id": "zstd"}])


@pytest.mark.parametrize("entry", [{"name": "numcodecs.pickle"}, {"name": "crc32c"}, {"name": 3}, {}])
def test_readers_refuse_other_codecs_by_name(entry: dict[str, Any]) -> None:
    with pytest.raises(CodecConfigError, match=repr(entry.get("name"))):
        Unpacker.of([entry])
    with pytest.raises(CodecConfigError, match="at most 4"):
        Unpacker.of([{"name": "zstd"}] * 5)


class TestBombs:
    """Bytes that would take more memory than the limit are refused before they get it."""

    ZEROS = bytes(1 << 26)

    @pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
    def test_more_than_the_limit(self, chain: list[dict[str, Any]]) -> None:
        _, *behind = zarr_codecs(Followed(LosslessRows(), chain))
        data = self.ZEROS[:10_000]
        for config in chain:
            data = bytes(numcodecs.get_codec(config).encode(data))
        assert bytes(Unpacker.of(behind).unpack(data, 20_000)) == self.ZEROS[:10_000]
        with pytest.raises(PayloadLimitError, match="9999"):
            Unpacker.of(behind).unpack(data, 9_999)

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("zstd", bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 1 << 40)),
            ("blosc", bytes([2, 1, 1, 1]) + struct.pack("<III", 0xFFFFFFFF, 0, 16)),
            ("numcodecs.lz4", struct.pack("<I", 0x7FFFFFFF) + bytes(20)),
            ("gzip", gzip.compress(ZEROS)),
            ("numcodecs.bz2", bz2.compress(ZEROS)),
        ],
    )
    def test_declared_or_actual_size(self, name: str, data: bytes) -> None:
        with pytest.raises(PayloadLimitError, match="limit"):
            Unpacker((name,)).unpack(data, 1 << 20)

    def test_a_stage_between(self) -> None:
        inner = numcodecs.Zstd().encode(gzip.compress(self.ZEROS))
        with pytest.raises(PayloadLimitError):
            Unpacker(("gzip", "zstd")).unpack(inner, 1 << 20)


DAMAGED = {
    "zstd of an unknown size": ("zstd", bytes.fromhex("28b52ffd 00 58 430d0078"), "states its size"),
    "zstd of other bytes": ("zstd", b"not a frame", "are no frame"),
    "zstd cut": ("zstd", bytes.fromhex("28b52ffd e0 01"), "damaged"),
    "zstd with a dictionary": ("zstd", bytes.fromhex("28b52ffd 21 07 01 090000 78"), "needs no dictionary"),
    "zstd, two frames": ("zstd", 2 * bytes.fromhex("28b52ffd 20 01 090000 78"), "damaged"),
    "blosc cut": ("blosc", bytes(15), "15 bytes, the header alone takes 16"),
    "blosc that lies of its length": (
        "blosc",
        bytes([2, 1, 1, 1]) + struct.pack("<III", 9, 9, 99),
        "header says 99",
    ),
    "lz4 cut": ("numcodecs.lz4", b"\0", "1 bytes, the header alone takes 4"),
    "gzip cut": ("gzip", gzip.compress(b"abc")[:-1], "truncated"),
    "gzip with a tail": ("gzip", gzip.compress(b"abc") + b"d", "other bytes follow"),
    "gzip of other bytes": ("gzip", b"not gzip at all", "damaged, or not its own"),
    "xz of other bytes": ("numcodecs.lzma", b"not xz", "damaged, or not its own"),
    "bz2 of other bytes": ("numcodecs.bz2", b"not bz2", "damaged, or not its own"),
    "a wrong checksum": ("numcodecs.crc32", b"12345678", "damaged, or not its own"),
    "a checksum cut": ("numcodecs.fletcher32", b"1234", "4 bytes"),
}


@pytest.mark.parametrize(("name", "data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_bytes_are_refused(name: str, data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        Unpacker((name,)).unpack(data, 1 << 20)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_mutated_bytes_are_undone_or_refused(chain: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(11)
    codec = Followed(UniformRows(bits=4), chain)
    data = encoded(codec, some_rows(40))
    _, *behind = zarr_codecs(codec)
    unpacker = Unpacker.of(behind)
    refused = 0
    for _ in range(300):
        mutated = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            mutated[at if rng.random() < 0.5 else at % 24] = rng.integers(0, 256)
        try:
            unpacked = unpacker.unpack(
                bytes(mutated[: rng.integers(len(data) // 2, len(data) + 60)]), 1 << 20
            )
        except PayloadError:
            refused += 1
        else:
            assert len(unpacked) <= 1 << 20
    assert refused > 100


class _Wasteful:
    """A row codec whose payloads are far larger than their rows."""

    def get_config(self) -> dict[str, Any]:
        return {"id": "wasteful"}

    def zarr_codec(self) -> dict[str, Any]:
        return LosslessRows().zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        return 1.0

    def encode_rows(
        self, values: Rows, offsets: Offsets | None, rows: int, *, element: str, seal: int = 0
    ) -> bytes:
        return bytes(2 << 20)


def test_payloads_that_no_reader_would_undo_are_not_written() -> None:
    with pytest.raises(RowsError, match="fewer rows a chunk"):
        encoded(Followed(_Wasteful(), [{"id": "zstd"}]), some_rows(10))


def test_zarr_says_which_codecs_are_its_own() -> None:
    """The names given to native codecs need no warning of an unspecified format."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in "zstd", "gzip", "blosc":
            serializer, *compressors = zarr_codecs(Followed(UniformRows(), CHAINS[name]))
            zarr.create_array(
                MemoryStore(), shape=(4, 4), dtype="f4", serializer=serializer, compressors=compressors
            )
