"""Sound payloads to spoil: made from the specification, and by encoders of hard rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import zstd

import cnr_codecs
from cnr_codecs import FloatingRows, LatticeRows, Scheme
from cnr_codecs.payload.coded import code_range
from tests.test_codecs.hard_rows import ROW_MAKERS
from tests.test_codecs.references import coded

Rng = np.random.Generator
ITEM_BYTES = {1: 4, 2: 2, 3: 2, 4: 8, 5: 1, 6: 2, 7: 4, 8: 8, 9: 1, 10: 2, 11: 4, 12: 8, 13: 1}
LIMITS = (127, 128, 255, 256, 16383, 16384, 32767)
"""Codes about the limits of int8 and int16, of their zigzag codes too."""
WIDE_DIM = 1 << 20
CODEBOOKS = {4, 5} & set(Scheme)
LATTICE, RELATIVE, GAPS, EXACT = 6, 7, 4, 23
CODED = (LATTICE, RELATIVE)


@dataclass(frozen=True)
class Segment:
    """The fields of a segment's entry, then what is stored for it; `more_bytes` are added to the sizes stated."""

    scheme: int
    bits: int
    parameter_type: int
    kind: int
    count: int
    row_set: bytes = b""
    parameters: bytes = b""
    codes: bytes = b""
    more_bytes: tuple[int, int] = (0, 0)

    def entry(self) -> bytes:
        small = (field & 255 for field in (self.scheme, self.bits, self.parameter_type, self.kind))
        entry = struct.pack("<BBBBI", *small, self.count & 0xFFFFFFFF)
        sizes = len(self.row_set), len(self.parameters) + len(self.codes)
        stated = ((size + more) & 0xFFFFFFFF for size, more in zip(sizes, self.more_bytes, strict=True))
        return entry + struct.pack("<II", *stated)


@dataclass(frozen=True)
class Payload:
    """The fields of the header, and the segments; `declared` of them."""

    element: int
    declared: int
    rows: int
    dim: int
    segments: tuple[Segment, ...]
    version: int = 3

    def encode(self) -> bytes:
        counts = self.declared & 0xFFFF, self.rows & 0xFFFFFFFF, self.dim & 0xFFFFFFFF
        header = struct.pack("<4sBBHIIQ", b"CNRP", self.version, self.element, *counts, 7)
        entries = [each.entry() for each in self.segments]
        bodies = [each.parameters + each.codes for each in self.segments]
        row_sets = [each.row_set for each in self.segments]
        rest = b"".join([*entries, *row_sets])
        head_bytes = struct.pack("<I", len(header) + 8 + len(rest))
        return proved(header + head_bytes + rest + bytes(4) + b"".join(bodies))


def proved(data: bytes) -> bytes:
    """The payload with the checksum that its head now has, if there is room for one."""
    end = struct.unpack_from("<I", data, 24)[0] if len(data) >= 28 else 0
    if not 32 <= end <= len(data):
        return data
    return data[: end - 4] + struct.pack("<I", google_crc32c.value(data[: end - 4])) + data[end:]


def row_set(kind: int, offsets: Any, rows: int) -> bytes:
    if kind == 0:
        return b""
    if kind == 1:
        flags = np.zeros(max(rows, 1), np.uint8)
        flags[offsets[offsets < rows]] = 1
        return np.packbits(flags, bitorder="little").tobytes()
    if kind == GAPS:
        return gaps(offsets)
    return np.asarray(offsets).astype("<u2" if kind == 2 else "<u4").tobytes()


def gaps(offsets: Any) -> bytes:
    """The frame of gaps: 255 as often as a gap has it, then the rest."""
    left_out = (np.diff(offsets, prepend=-1) - 1).tolist()
    return frame(b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in left_out))


def frame(data: bytes) -> bytes:
    made: bytes = zstd.compress(data, 1)
    return made


def lattice(rng: Rng, scheme: int, count: int, dim: int, mantissa: int = 0) -> tuple[bytes, bytes]:
    """The grid, and what follows it, of `count` rows of `dim` codes on a step; of differences on one or on floats."""
    scales = rng.choice([0, 0.2, 2, 300], count) if rng.random() < 0.7 else np.array([9e3])
    codes = np.rint(rng.normal(0, 1, (count, dim)) * scales[:, None])
    most = 32767 if scheme == LATTICE or rng.random() < 0.9 else 65534
    if codes.size and rng.random() < 0.3:  # the width of a line hangs on one place
        at = int(rng.integers(codes.size))
        codes.flat[at] = int(rng.choice([*LIMITS, most])) * int(rng.choice([1, -1]))
    held = np.clip(codes, -most, most).astype(int).reshape(-1).tolist()
    step = 0.0 if mantissa else float(np.ldexp(float(rng.integers(128, 256)), int(rng.integers(-20, 3))))
    body = coded.on_step(held, dim, step, mantissa=mantissa) if held else bytes(16)
    return body[:16], body[16:]


def floating(rng: Rng, mantissa: int, count: int, dim: int) -> tuple[bytes, bytes]:
    """The same of absolute codes on a floating grid."""
    least, most = code_range(mantissa, "float16")
    codes = np.clip(np.rint(rng.normal(120, 4, count * dim) * 2**mantissa), least, most).astype(int)
    codes[rng.random(codes.size) < 0.3] = 0
    if rng.random() < 0.5:
        codes *= rng.choice([1, -1], codes.size)
    body = coded.on_floats(codes.tolist(), dim, mantissa) if codes.size else bytes(16)
    return body[:16], body[16:]


def exact(rng: Rng, element: int, scheme: int, count: int, dim: int) -> tuple[bytes, bytes]:
    """The same on a floating grid of 23 bits: all bits of numbers, or differences of these."""
    values = rng.normal(0, 1, (count, dim)).astype("<f2" if element == 2 else "<f4").astype("<f4")
    bits = values.view("<i4") & (0xFFFF0000 - (1 << 32) if element == 3 else -1)
    if element == 1 and bits.size and rng.random() < 0.5:
        bits.flat[int(rng.integers(bits.size))] = rng.integers(-(1 << 31), 1 << 31)
    codes = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(int)
    if scheme == RELATIVE:
        codes = np.rint(rng.normal(0, 1, codes.shape) * rng.choice([0, 1, 1e3, 1e6, 2e8])).astype(int)
    body = coded.on_step(codes.reshape(-1).tolist(), dim, 0, mantissa=EXACT) if codes.size else bytes(16)
    return body[:16], body[16:]


def floats(rng: Rng, count: int, parameter_type: int) -> npt.NDArray[np.floating[Any]]:
    """Finite numbers of at most 11 significant bits, which is what float16 has."""
    values = rng.normal(0, 3, count).astype("<f2")
    return values if parameter_type == 1 else values.astype("<f4")


def parameters(rng: Rng, segment: Segment) -> bytes:
    kind, count = segment.parameter_type, min(segment.count, 512)
    if segment.scheme in (2, 3):
        scales: bytes = np.abs(floats(rng, count, kind)).tobytes()
        return scales + (floats(rng, count, kind).tobytes() if segment.scheme == 2 else b"")
    if segment.scheme not in CODEBOOKS:
        return b""
    books = count if segment.scheme == 4 else int(rng.integers(1, max(count, 1) + 1))
    centroids = np.sort(
        floats(rng, books << segment.bits, kind).reshape(books, 1 << segment.bits), axis=1
    ).tobytes()
    if segment.scheme == 4:
        return centroids
    numbers = rng.integers(0, books, count).astype("<u1" if books <= 256 else "<u2")
    return struct.pack("<I", books) + centroids + numbers.tobytes()


def fitted(rng: Rng, segment: Segment, payload: Payload, offsets: Any = None) -> Segment:
    """The segment with a row set, parameters and codes of the sizes that its head and the header ask for."""
    count = min(segment.count, 512)
    if offsets is None:
        offsets = (
            np.sort(rng.choice(max(payload.rows, count), count, replace=False))
            if payload.rows < 1 << 17
            else np.arange(count)
        )
    if segment.scheme in CODED:
        size = count, min(payload.dim, 256)
        if segment.bits == EXACT:
            grid, codes = exact(rng, payload.element, segment.scheme, *size)
            rows = row_set(segment.kind, offsets, min(payload.rows, 1 << 17))
            return replace(segment, row_set=rows, parameters=grid, codes=codes)
        on_floats = 1 <= segment.bits <= 7
        is_centered = on_floats and segment.scheme == LATTICE
        mantissa = segment.bits if on_floats else 0
        grid, codes = (
            floating(rng, mantissa, *size) if is_centered else lattice(rng, segment.scheme, *size, mantissa)
        )
        rows = row_set(segment.kind, offsets, min(payload.rows, 1 << 17))
        return replace(segment, row_set=rows, parameters=grid, codes=codes)
    width = (min(payload.dim, 256) * (segment.bits & 255) + 7) // 8
    codes = rng.bytes(width * count) if payload.element != 13 else bytes(width * count)
    return replace(
        segment,
        row_set=row_set(segment.kind, offsets, min(payload.rows, 1 << 17)),
        parameters=parameters(rng, segment) if 0 <= segment.bits <= 8 else b"",
        codes=codes if segment.scheme else b"",
    )


def sound(rng: Rng) -> Payload:
    """A payload as the specification has it."""
    element = int(rng.choice([1, 1, 1, 2, 2, 3, 3, *ITEM_BYTES]))
    rows, dim = int(rng.integers(1, 70)), int(rng.integers(1, 20))
    payload = Payload(element, 0, rows, dim, ())
    order, segments = rng.permutation(rows), []
    for part in np.array_split(order, int(rng.integers(1, 4))):
        if len(part) == 0:
            continue
        offsets = np.sort(part)
        prefix = offsets[-1] == len(offsets) - 1
        # Most spoiled ones of the last two are refused: their codes have a checksum.
        quantized = [0, 1, *2 * (2, 3, 4, 5), *3 * CODED]
        doubles = [0, 1, *CODED] if element == 4 else [0, 1]
        scheme = int(rng.choice(quantized if element <= 3 else doubles))
        bits = 8 * ITEM_BYTES[element] if scheme == 1 else int(rng.integers(1, 9))
        if scheme in (0, *CODED):
            bits = 0
        if scheme in CODED and (element == 4 or rng.random() < 0.7):
            bits = int(rng.integers(1, 8)) if element == 4 or rng.random() < 0.6 else EXACT
        kind = int(rng.integers(0 if prefix else 1, 5))
        parameter_type = 0 if scheme < 2 else 2 if scheme in CODED else int(rng.integers(1, 3))
        head = Segment(scheme, bits, parameter_type, kind, len(part))
        segments.append(fitted(rng, head, payload, offsets))
    return replace(payload, declared=len(segments), segments=tuple(segments))


def plain(rng: Rng) -> Payload:
    """A payload that is decoded at once, as nearly every chunk is."""
    rows, dim = int(rng.integers(1, 70)), int(rng.integers(1, 20))
    payload = Payload(1, 1, rows, dim, ())
    head = Segment(2, int(rng.integers(1, 9)), 1, 0, rows)
    return replace(payload, segments=(fitted(rng, head, payload, np.arange(rows)),))


def hostile(rng: Rng) -> Payload:
    """A payload that an encoder of lattices made of hard rows: huge, tiny, not finite, constant, of few columns."""
    rows = int(rng.choice([1, int(rng.integers(2, 70))]))
    dim = int(rng.choice([*range(1, 8), int(rng.integers(8, 40))]))
    names = rng.choice([*ROW_MAKERS, "normal", "normal", "huge", "zeros"], rows)
    with np.errstate(all="ignore"):
        values = np.stack([hard_row(rng, str(name), dim) for name in names])
    return encoded(rng, values)


def hard_row(rng: Rng, name: str, dim: int) -> npt.NDArray[np.float32]:
    if name == "huge":
        return np.full(dim, 1e30, np.float32)
    made = np.zeros(dim) if name == "zeros" else ROW_MAKERS[name](rng, dim)
    return np.asarray(made).astype(np.float32)


def wide(rng: Rng) -> Payload:
    """A row of more columns than a block has codes."""
    return encoded(rng, rng.normal(0, 0.1, (1, WIDE_DIM)).astype(np.float32))


def encoded(rng: Rng, values: npt.NDArray[np.float32]) -> Payload:
    """Rows on a grid; half of them are relative to what `beneath` gives."""
    step, mantissa = cnr_codecs.lattice_step(float(10 ** rng.uniform(-3, 0))), int(rng.integers(1, 10))
    mantissa = mantissa if mantissa < 8 else EXACT
    is_on_step = rng.random() < 0.5
    codec: Any = LatticeRows(step=step) if is_on_step else FloatingRows(mantissa)
    parent = np.full(values.shape, 0 if is_on_step else 127 << mantissa, np.int32)
    known = np.full(len(values), rng.random() < 0.5)
    data, *_ = codec.encode_over(values, None, len(values), parent, known, element="float32", seal=7)
    return opened(data)


def opened(data: bytes) -> Payload:
    """The fields of a payload whose segments are raw or on a lattice."""
    _, version, element, declared, rows, dim, _, end = struct.unpack_from("<4sBBHIIQI", data)
    heads = [struct.unpack_from("<BBBBIII", data, 28 + 16 * number) for number in range(declared)]
    at, segments = 28 + 16 * declared, []
    for scheme, bits, parameter_type, kind, count, row_set_bytes, body_bytes in heads:
        row_set, body = data[at : at + row_set_bytes], data[end : end + body_bytes]
        at, end = at + row_set_bytes, end + body_bytes
        grid_bytes = 16 if scheme in CODED else 0
        fields = scheme, bits, parameter_type, kind, count
        segments.append(Segment(*fields, row_set, body[:grid_bytes], body[grid_bytes:]))
    payload = Payload(element, declared, rows, dim, tuple(segments), version)
    assert payload.encode() == data
    return payload
