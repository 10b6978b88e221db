"""The bytes of payloads, laid out as docs/format.md says, sound or not."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, replace

import google_crc32c

HEADER_BYTES, ENTRY_BYTES = 24, 16
VERSION = 3


@dataclass(frozen=True)
class Part:
    """A segment: the numbers that its entry begins with, its row set, and its body."""

    numbers: tuple[int, int, int, int, int]
    row_set: bytes = b""
    body: bytes = b""


@dataclass(frozen=True)
class Layout:
    """A payload: its header without the version, its segments, and what follows the last one."""

    magic: bytes
    element: int
    segments: int
    rows: int
    dim: int
    seal: int
    parts: tuple[Part, ...] = ()
    tail: bytes = b""

    def __add__(self, more: Part | bytes) -> Layout:
        if isinstance(more, Part):
            return replace(self, parts=(*self.parts, more))
        return replace(self, tail=self.tail + more)

    def encode(self, version: int = VERSION) -> bytes:
        fields = (self.magic, version, self.element, self.segments, self.rows, self.dim, self.seal)
        header = struct.pack("<4sBBHIIQ", *fields)
        row_sets = b"".join(each.row_set for each in self.parts)
        head_bytes = HEADER_BYTES + 4 + ENTRY_BYTES * len(self.parts) + len(row_sets) + 4
        entries = (
            struct.pack("<BBBBIII", *each.numbers, len(each.row_set), len(each.body)) for each in self.parts
        )
        head = b"".join([header, struct.pack("<I", head_bytes), *entries, row_sets])
        return head + crc32c(head) + b"".join(each.body for each in self.parts) + self.tail


def header(
    segments: int = 1,
    rows: int = 10,
    dim: int = 2,
    *,
    magic: bytes = b"CNRP",
    element: int = 1,
    seal: int = 0,
) -> Layout:
    return Layout(magic, element, segments, rows, dim, seal)


def segment(scheme: int, bits: int, parameter_type: int, kind: int, count: int, *stored: bytes) -> Part:
    """A segment; what is stored begins with its row set, but for a prefix."""
    split = 1 if kind else 0
    numbers = (scheme, bits, parameter_type, kind, count)
    return Part(numbers, b"".join(stored[:split]), b"".join(stored[split:]))


def crc32c(data: bytes) -> bytes:
    return struct.pack("<I", google_crc32c.value(data))


def head_bytes(data: bytes) -> int:
    """Bytes of the head of a payload."""
    return int(struct.unpack_from("<I", data, HEADER_BYTES)[0])


def proved(data: bytes) -> bytes:
    """The payload with the checksum that its head now has, if there is room for one."""
    end = head_bytes(data) if len(data) >= HEADER_BYTES + 4 else 0
    if not HEADER_BYTES + 8 <= end <= len(data):
        return data
    return data[: end - 4] + crc32c(data[: end - 4]) + data[end:]


def layout_of(data: bytes) -> Layout:
    """The parts of a sound payload."""
    magic, _, element, count, rows, dim, seal = struct.unpack_from("<4sBBHIIQ", data)
    entries = [struct.unpack_from("<BBBBIII", data, HEADER_BYTES + 4 + ENTRY_BYTES * i) for i in range(count)]
    first = HEADER_BYTES + 4 + ENTRY_BYTES * count
    sets = list(itertools.accumulate((each[5] for each in entries), initial=first))
    bodies = list(itertools.accumulate((each[6] for each in entries), initial=head_bytes(data)))
    parts = tuple(
        Part(each[:5], data[sets[i] : sets[i + 1]], data[bodies[i] : bodies[i + 1]])
        for i, each in enumerate(entries)
    )
    return Layout(magic, element, count, rows, dim, seal, parts, data[bodies[-1] :])


def f4(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def f2(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def u2(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def u4(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


# One row, raw: the fifth of ten.
RAW_ROW = segment(1, 32, 0, 2, 1, u2(4), f4(1.5, -2))
