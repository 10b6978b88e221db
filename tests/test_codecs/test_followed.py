"""Row codecs with compressors behind them: what Zarr reads, what is unpacked, and how large it may become."""

import json
import re
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
    Compressors,
    Followed,
    LosslessRows,
    PayloadError,
    PayloadLimitError,
    RowCodec,
    RowsError,
    UniformRows,
    row_codec,
    zarr_codecs,
)
from cnr_codecs.protocol import Offsets, Rows

CHAINS: dict[str, list[dict[str, Any]]] = {
    "zstd": [{"id": "zstd", "level": 3}],
    "blosc": [{"id": "blosc", "cname": "zstd", "clevel": 4, "shuffle": -1}],
    "blosc without shuffle": [{"id": "blosc", "shuffle": 0}],
    "lz4": [{"id": "lz4"}],
    "two": [{"id": "lz4"}, {"id": "zstd"}],
    "four": [{"id": "lz4"}, {"id": "blosc"}, {"id": "lz4"}, {"id": "zstd", "checksum": True}],
}
GONE = ("gzip", "zlib", "bz2", "lzma", "crc32", "adler32", "fletcher32", "pickle")
"""What numcodecs has besides: streams, which tell no size, checksums, and what runs code."""


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
    assert bytes(Compressors.of_zarr(behind).unpack(memoryview(data), len(payload) + 100)) == payload


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
    assert bytes(Compressors.of_zarr(compressors).unpack(written, 1 << 20)) == payload
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
        ([{"id": "zstd"}] * 5, "at most 4"),
        ({"id": "zstd"}, "list"),
        ("zstd", "list"),
        (["zstd"], "give a configuration"),
        *(
            ([{"id": name}], f"'{name}' can't follow a row codec; .* of one of zstd, blosc, lz4$")
            for name in GONE
        ),
        ([{"level": 3}], "None can't follow"),
        ([{"id": ["zstd"]}], "can't follow"),
        # It takes numbers of 16 bits and more; packed codes are bytes.
        ([{"id": "pcodec"}], "'pcodec' can't follow"),
        ([{"id": "cnr_rows"}], "can't follow"),
        ([{"id": "zstd", "strength": 3}], "zstd doesn't take"),
        ([{"id": "zstd", "level": "high"}], "zstd doesn't take"),
        ([{"id": "blosc", "cname": "zip"}], "blosc doesn't take"),
        ([{"id": "blosc", "shuffle": 7}], "blosc doesn't take"),
    ],
)
def test_what_can_not_follow_is_refused(then: Any, message: str) -> None:
    with pytest.raises(CodecConfigError, match=message):
        row_codec({"id": "cnr_rows", "then": then})


def test_followed_codecs_are_not_followed_again() -> None:
    with pytest.raises(CodecConfigError, match="join"):
        Followed(row_codec({"id": "cnr_rows", "then": [{"id": "zstd"}]}), [{"id": "zstd"}])


@pytest.mark.parametrize(
    "entry",
    [
        *({"name": name} for each in GONE for name in (each, f"numcodecs.{each}")),
        {"name": "crc32c"},
        {"name": 3},
        {"name": ["zstd"]},
        {},
    ],
    ids=str,
)
def test_readers_refuse_other_codecs_by_name(entry: dict[str, Any]) -> None:
    said = f"codec {entry.get('name')!r} follows the row codec, .* reads zstd, blosc, numcodecs.lz4"
    with pytest.raises(CodecConfigError, match=re.escape(said).replace(r"\.\*", ".*")):
        Compressors.of_zarr([entry])
    with pytest.raises(CodecConfigError, match="at most 4"):
        Compressors.of_zarr([{"name": "zstd"}] * 5)


class TestBombs:
    """Bytes that would take more memory than the limit are refused before they get it."""

    ZEROS = bytes(1 << 26)

    @pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
    def test_more_than_the_limit(self, chain: list[dict[str, Any]]) -> None:
        _, *behind = zarr_codecs(Followed(LosslessRows(), chain))
        data = self.ZEROS[:10_000]
        for config in chain:
            data = bytes(numcodecs.get_codec(config).encode(data))
        assert bytes(Compressors.of_zarr(behind).unpack(data, 20_000)) == self.ZEROS[:10_000]
        with pytest.raises(PayloadLimitError, match="9999"):
            Compressors.of_zarr(behind).unpack(data, 9_999)

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("zstd", bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 1 << 40)),
            ("blosc", bytes([2, 1, 1, 1]) + struct.pack("<III", 0xFFFFFFFF, 0, 16)),
            ("numcodecs.lz4", struct.pack("<I", 0x7FFFFFFF) + bytes(20)),
        ],
    )
    def test_declared_or_actual_size(self, name: str, data: bytes) -> None:
        with pytest.raises(PayloadLimitError, match="limit"):
            Compressors.of_zarr([{"name": name}]).unpack(data, 1 << 20)

    def test_a_stage_between(self) -> None:
        inner = numcodecs.Zstd().encode(numcodecs.LZ4().encode(self.ZEROS))
        with pytest.raises(PayloadLimitError, match="lz4"):
            Compressors.of_zarr([{"name": "numcodecs.lz4"}, {"name": "zstd"}]).unpack(inner, 1 << 20)


NO_SIZE = "do not tell their decompressed size"
DAMAGED = {
    "zstd of an unknown size": ("zstd", bytes.fromhex("28b52ffd 00 58 430d0078"), NO_SIZE),
    "zstd of other bytes": ("zstd", b"not a frame", NO_SIZE),
    "zstd cut": ("zstd", bytes.fromhex("28b52ffd e0 01"), "damaged"),
    "zstd with a dictionary": ("zstd", bytes.fromhex("28b52ffd 21 07 01 090000 78"), NO_SIZE),
    "zstd, two frames": ("zstd", 2 * bytes.fromhex("28b52ffd 20 01 090000 78"), "damaged"),
    "blosc cut": ("blosc", bytes(15), f"15 bytes are damaged, or {NO_SIZE}"),
    "blosc that lies of its length": (
        "blosc",
        bytes([2, 1, 1, 1]) + struct.pack("<III", 9, 9, 99),
        NO_SIZE,
    ),
    "lz4 cut": ("numcodecs.lz4", b"\0", NO_SIZE),
    "lz4 of other bytes": ("numcodecs.lz4", struct.pack("<I", 99) + b"not lz4", "damaged, or not its own"),
}


@pytest.mark.parametrize(("name", "data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_bytes_are_refused(name: str, data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        Compressors.of_zarr([{"name": name}]).unpack(data, 1 << 20)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_mutated_bytes_are_undone_or_refused(chain: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(11)
    codec = Followed(UniformRows(bits=4), chain)
    data = encoded(codec, some_rows(40))
    _, *behind = zarr_codecs(codec)
    compressors = Compressors.of_zarr(behind)
    refused = 0
    for _ in range(300):
        mutated = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            mutated[at if rng.random() < 0.5 else at % 24] = rng.integers(0, 256)
        try:
            unpacked = compressors.unpack(
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
        for name in "zstd", "blosc":
            serializer, *compressors = zarr_codecs(Followed(UniformRows(), CHAINS[name]))
            zarr.create_array(
                MemoryStore(), shape=(4, 4), dtype="f4", serializer=serializer, compressors=compressors
            )
