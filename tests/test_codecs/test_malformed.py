"""Payloads: every way in which they can be wrong."""

import struct
from typing import Any

import numpy as np
import pytest
from numcodecs import zstd

from cnr_codecs import (
    PayloadError,
    PayloadLimitError,
    UnsupportedPayloadError,
    parse,
    reseal,
    rows_written,
)
from cnr_codecs.protocol import Rows
from tests.test_codecs.payload_bytes import (
    RAW_ROW,
    Layout,
    Part,
    f2,
    f4,
    header,
    proved,
    segment,
    u2,
    u4,
)

MALFORMED = {
    "other magic": (header(magic=b"CNRQ") + RAW_ROW, "CNRQ"),
    "element type 0": (header(element=0) + RAW_ROW, "element type 0"),
    "element type 14": (header(element=14) + RAW_ROW, "element type 14"),
    "no rows": (header(rows=0) + RAW_ROW, "empty"),
    "no columns": (header(dim=0) + RAW_ROW, "empty"),
    "segment missing": (header(segments=2) + RAW_ROW, "2 segments don't fit"),
    "bytes after the end": (header() + RAW_ROW + b"\0", "1 bytes follow"),
    "undeclared segment": (header(segments=0) + RAW_ROW, "follow"),
    "1,025 segments": (header(segments=1025) + RAW_ROW, "1025 segments, the limit is 1024"),
    "unknown scheme": (header() + segment(8, 4, 1, 0, 1, f2(1, 0), bytes(1)), "scheme 8"),
    "unknown parameter type": (header() + segment(2, 4, 3, 0, 1, f2(1, 0), bytes(1)), "parameter type 3"),
    "unknown row-set kind": (header() + segment(1, 32, 0, 5, 1, b"", bytes(8)), "row-set kind 5"),
    "raw with parameters": (header() + segment(1, 32, 1, 0, 1, f2(1, 0), bytes(8)), "FLOAT16.*RAW"),
    "absent with parameters": (header() + segment(0, 0, 2, 0, 1, f4(1, 0)), "FLOAT32.*ABSENT"),
    "codes without parameters": (header() + segment(2, 4, 0, 0, 1, bytes(1)), "NONE.*ASYMMETRIC"),
    "no bits": (header() + segment(2, 0, 1, 0, 1, f2(1, 0)), "0 bits"),
    "nine bits": (header() + segment(3, 9, 1, 0, 1, f2(1), bytes(3)), "9 bits"),
    "raw of other bits": (header() + segment(1, 16, 0, 0, 1, bytes(4)), "16 bits"),
    "absent with bits": (header() + segment(0, 1, 0, 0, 1), "1 bits"),
    "quantized integers": (header(element=7) + segment(2, 4, 1, 0, 1, f2(1, 0), bytes(1)), "int32"),
    "quantized float64": (header(element=4) + segment(2, 4, 1, 0, 1, f2(1, 0), bytes(1)), "float64"),
    "a bool of 2": (header(element=13) + segment(1, 8, 0, 0, 1, b"\1\2"), "stored as 2"),
    "segment without rows": (header() + segment(1, 32, 0, 0, 0), "0 rows"),
    "more rows than the chunk": (header() + segment(1, 32, 0, 0, 11, bytes(88)), "11 rows"),
    "row set cut": (
        header() + segment(1, 32, 0, 3, 2, bytes(7)),
        "row set has 7 .* takes 8",
    ),
    "parameters cut": (header() + segment(2, 4, 2, 0, 2, f4(1, 1, 0)), "parameters.*truncated"),
    "codes cut": (header() + segment(1, 32, 0, 0, 2, bytes(15)), "codes.*truncated"),
    "count of 2**32 - 1": (
        header(rows=(1 << 22), dim=1) + segment(1, 32, 0, 0, (1 << 32) - 1),
        "4294967295 rows",
    ),
    "offsets equal": (header() + segment(1, 32, 0, 2, 2, u2(3, 3), bytes(16)), "increasing"),
    "offsets falling": (
        header() + segment(1, 32, 0, 3, 2, struct.pack("<2I", 3, 2), bytes(16)),
        "increasing",
    ),
    "offset beyond the rows": (header() + segment(1, 32, 0, 2, 2, u2(3, 10), bytes(16)), "offset 10"),
    "wide offset beyond the rows": (
        header() + segment(1, 32, 0, 3, 1, struct.pack("<I", 1 << 31), bytes(8)),
        "offset 2147483648",
    ),
    "bitmap of fewer rows": (header() + segment(1, 32, 0, 1, 2, b"\1\0", bytes(16)), "has 1 rows"),
    "bitmap of more rows": (header() + segment(1, 32, 0, 1, 2, b"\7\0", bytes(16)), "has 3 rows"),
    "bitmap with unused bits": (header() + segment(1, 32, 0, 1, 2, b"\1\4", bytes(16)), "beyond row 9"),
    "a row twice": (header(segments=2) + RAW_ROW + RAW_ROW, "row 4 is in an earlier"),
    "a row twice, in a prefix": (header(segments=2) + RAW_ROW + segment(0, 0, 0, 0, 5), "row 4"),
    "a scale of NaN": (header() + segment(2, 4, 1, 0, 1, f2(np.nan, 0), bytes(1)), "not finite"),
    "an infinite offset": (header() + segment(2, 4, 2, 0, 1, f4(1, np.inf), bytes(1)), "not finite"),
    "a negative scale": (header() + segment(2, 4, 2, 0, 1, f4(-1, 0), bytes(1)), "negative"),
    "a scale of minus zero": (header() + segment(3, 4, 1, 0, 1, f2(-0.0), bytes(1)), "negative"),
    "a scale of 17 bits": (header() + segment(2, 4, 2, 0, 1, f4(1 + 2**-16, 0), bytes(1)), "16 significant"),
    "a scale that overflows": (header() + segment(2, 4, 2, 0, 1, f4(2.0**127, 0), bytes(1)), "overflows"),
    "a codebook without parameters": (header() + segment(4, 1, 0, 0, 1, bytes(5)), "NONE.*CODEBOOK"),
    "codebooks of integers": (header(element=7) + segment(4, 1, 1, 0, 1, f2(1, 2), bytes(1)), "int32"),
    "a codebook of nine bits": (header() + segment(4, 9, 1, 0, 1, bytes(1027)), "9 bits"),
    "a codebook cut": (header() + segment(4, 1, 2, 0, 2, f4(1, 2, 3)), "parameters.*truncated"),
    "a centroid of NaN": (header() + segment(4, 1, 1, 0, 1, f2(1, np.nan), bytes(1)), "not finite"),
    "a centroid of infinity": (header() + segment(4, 1, 1, 0, 1, f2(1, np.inf), bytes(1)), "not finite"),
    "centroids falling": (header() + segment(4, 1, 1, 0, 1, f2(2, 1), bytes(1)), "not ascending"),
    "shared centroids falling": (
        header() + segment(5, 1, 1, 0, 1, u4(1), f2(2, 1), bytes(2)),
        "not ascending",
    ),
    "no shared codebooks": (header() + segment(5, 1, 1, 0, 1, u4(0), bytes(2)), "0 codebooks for 1"),
    "more codebooks than rows": (header() + segment(5, 1, 1, 0, 1, u4(2), bytes(10)), "2 codebooks for 1"),
    "a codebook beyond the last": (
        header() + segment(5, 1, 1, 0, 2, u4(2), f2(1, 2, 1, 2), b"\1\2", bytes(2)),
        "codebook 2 of 2",
    ),
    "number of codebooks cut": (header() + segment(5, 1, 1, 0, 1, bytes(3)), "codebooks.*truncated"),
    "2**32 - 1 codebooks": (header() + segment(5, 8, 2, 0, 1, u4((1 << 32) - 1)), "4294967295 codebooks"),
    "codebook numbers cut": (header() + segment(5, 1, 1, 0, 2, u4(1), f2(1, 2), b"\0"), "numbers.*truncated"),
    "a half step that overflows": (header() + segment(3, 1, 2, 0, 1, f4(2.0**127), bytes(1)), "overflows"),
}


@pytest.mark.parametrize(("layout", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_payloads_are_refused(layout: Layout, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        parse(layout.encode())


SOUND = (header() + RAW_ROW).encode()
# Segments 0 and 1 of four rows each, whose bodies have other sizes.
TWO = header(2) + segment(1, 32, 0, 1, 4, b"\xf0\0", bytes(32)) + segment(2, 4, 1, 0, 4, bytes(16), bytes(4))


def with_u32(data: bytes, at: int, value: int) -> bytes:
    return proved(data[:at] + u4(value) + data[at + 4 :])


MALFORMED_BYTES = {
    "empty": (b"", ": 0 bytes, the header alone"),
    "shorter than a header": (SOUND[:23], "23 bytes, the header alone"),
    "shorter than a head": (SOUND[:31], "31 bytes, the head takes at least 32"),
    "a head of 31 bytes": (with_u32(SOUND, 24, 31), "said to take 31 of 58 bytes"),
    "a head beyond the end": (with_u32(SOUND, 24, 59), "said to take 59 of 58 bytes"),
    "a head of 4 GiB": (with_u32(SOUND, 24, (1 << 32) - 1), "said to take 4294967295 of 58 bytes"),
    "a head without its row set": (with_u32(SOUND, 24, 48), "row set has 2 of 0 bytes left"),
    "a head that reaches into the body": (with_u32(SOUND, 24, 54), "4 bytes of the head follow"),
    "a head without its entry": (with_u32(SOUND, 24, 36), "1 segments don't fit"),
    "another checksum": (SOUND[:46] + bytes(4) + SOUND[50:], "head is damaged"),
    "a shorter row set": (with_u32(SOUND, 36, 1), "row set has 1 of 2 bytes left, it takes 2"),
    "a longer row set": (with_u32(SOUND, 36, 1 << 31), "row set has 2147483648 of 2 bytes left"),
    "a row set of no bytes": (with_u32(SOUND, 36, 0), "row set has 0 of 2"),
    "a shorter body": (with_u32(SOUND, 40, 7), "said to take 7 bytes, it takes 8"),
    "a longer body": (with_u32(SOUND, 40, 1 << 31), "said to take 2147483648 bytes, it takes 8"),
    "a body that takes of the next": (
        with_u32(with_u32(TWO.encode(), 40, 33), 56, 19),
        "segment 0: the body is said to take 33 bytes, it takes 32",
    ),
    "cut in its last body": (SOUND[:-1], "codes truncated"),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED_BYTES.values(), ids=MALFORMED_BYTES)
def test_malformed_bytes_are_refused(data: bytes, message: str) -> None:
    parse(SOUND)
    parse(TWO.encode())
    with pytest.raises(PayloadError, match=message):
        parse(data)


NEWER = {
    "unknown": (header() + segment(8, 3, 9, 9, 1, bytes(3), bytes(9)), r"scheme 8 is unknown.*newer"),
    "scheme 9": (header() + segment(9, 0, 0, 0, 1), "scheme 9 is unknown.*newer"),
    "row-set kind 5": (
        header() + segment(1, 32, 0, 5, 1, bytes(3), bytes(8)),
        "row-set kind 5 is unknown.*newer",
    ),
}


@pytest.mark.parametrize(("layout", "message"), NEWER.values(), ids=NEWER)
def test_what_newer_releases_write_is_refused_by_name(layout: Layout, message: str) -> None:
    data = layout.encode()
    for read in parse, rows_written:
        with pytest.raises(UnsupportedPayloadError, match=message):
            read(data)
    # A damaged one is damage, whatever it seems to hold.
    damaged = data[:30] + bytes([data[30] ^ 1]) + data[31:]
    with pytest.raises(PayloadError, match="head is damaged") as caught:
        parse(damaged)
    assert not isinstance(caught.value, UnsupportedPayloadError)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, "version 0 is not 3: a development version wrote it"),
        (1, "version 1 is not 3: a development version wrote it"),
        (2, "version 2 is not 3: a development version wrote it"),
        (4, "version 4 is not 3: a newer release wrote it; upgrade"),
    ],
)
def test_other_versions_are_refused_by_name(version: int, message: str) -> None:
    data = (header() + RAW_ROW).encode(version)
    for read in parse, rows_written, lambda data: reseal(data, 1):
        with pytest.raises(UnsupportedPayloadError, match=message):
            read(data)


def test_segments_have_no_more_rows_than_the_chunk() -> None:
    """Such that nothing is allocated for what must have a row twice."""
    zeros = zstd.compress(bytes(1000), 1)
    parts = header(2, 1500, 1) + segment(0, 0, 0, 4, 1000, zeros) + segment(0, 0, 0, 4, 501, b"")
    with pytest.raises(PayloadError, match="segment 1: 1501 rows so far, the chunk has 1500"):
        parse(parts.encode())


@pytest.mark.parametrize("data", ["text", 3, np.zeros((4, 4))[:, ::2]])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(PayloadError, match="contiguous bytes"):
        parse(data)


def test_the_decoded_size_is_limited() -> None:
    small = header(0, 1 << 16, 257).encode()
    with pytest.raises(PayloadLimitError, match=r"67371008 bytes.*67108864"):
        parse(small)
    assert parse(small, max_decoded_bytes=1 << 27).dim == 257
    assert parse(header(0, 1 << 16, 256).encode()).rows == 1 << 16
    with pytest.raises(OverflowError):
        parse(header(65535, (1 << 32) - 1, (1 << 32) - 1).encode())


@pytest.mark.parametrize("data", [np.zeros(4, "M8[s]"), np.zeros(40, ">u2")[::2]])
def test_arrays_that_are_not_bytes_are_refused(data: Rows) -> None:
    with pytest.raises(PayloadError, match="contiguous bytes"):
        parse(data)


@pytest.mark.parametrize(
    "body",
    [segment(2, 4, 1, 0, 1, b"\1\x7c\0\0", bytes(1)), segment(4, 1, 1, 0, 1, b"\1\x7c\1\x7c", bytes(1))],
)
def test_signalling_nans_are_refused_where_numpy_is_told_to_raise(body: Part) -> None:
    with np.errstate(all="raise"), pytest.raises(PayloadError, match="not finite"):
        parse((header() + body).encode())
