"""Decodes spoiled payloads: `python -m tests.test_codecs.fuzz_payloads COUNT SEED [KIND]` prints what became of them.

With a kind of `kind_of`, all rows of each payload are of that kind before it is spoiled.
Payloads of `sound_payloads` are spoiled: bytes are flipped, cut or inserted, or a field is changed and what depends on
its size is made to fit, so that the lie reaches as deep as it can; most heads get the checksum of what they became.
Frames of zstd are made anew around other bytes, cut, joined, or claim other sizes. The checksums of codes count as
right for every second payload, so that what lies behind them is reached. Each must decode to the declared shape or be
refused; anything else ends the process.
"""

from __future__ import annotations

import itertools
import json
import resource
import struct
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from numcodecs import zstd

import cnr_codecs
from cnr_codecs import CodecError, Scheme
from cnr_codecs.payload.coded import CodedRows, Grid
from cnr_codecs.payload.plain import decode_plain
from tests.test_codecs.sound_payloads import (
    CODED,
    EXACT,
    GAPS,
    LATTICE,
    RELATIVE,
    Payload,
    Rng,
    Segment,
    fitted,
    frame,
    hostile,
    plain,
    proved,
    sound,
    wide,
)

MOST_DECODED_BYTES = 1 << 22
MEMORY_BYTES = 256 << 20
TRIES_FOR_A_KIND = 12
INTERESTING = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    32,
    64,
    127,
    128,
    255,
    256,
    65535,
    65536,
    1 << 24,
    (1 << 32) - 1,
)
CLAIMED_BYTES = (*INTERESTING, 1 << 40, 1 << 63, (1 << 64) - 1)
SPECIAL_FLOATS = ("0000", "0080", "007c", "00fc", "007e", "ff7b", "0100", "ffffff7f", "0000807f", "0000c07f")
COMPOSED: Counter[str] = Counter()
"""Payloads whose relative rows were composed, by the kind of their grid."""


def mostly_proved(rng: Rng, data: bytes) -> bytes:
    return proved(data) if rng.random() < 0.9 else data


def flipped(rng: Rng, payload: Payload) -> bytes:
    data = bytearray(payload.encode())
    for _ in range(int(rng.integers(1, 5))):
        # Structure lies in front.
        end = len(data) if rng.random() < 0.5 else min(len(data), 64)
        data[int(rng.integers(0, end))] = (
            int(rng.integers(0, 256)) if rng.random() < 0.6 else int(rng.integers(0, 5))
        )
    return mostly_proved(rng, bytes(data))


def cut(rng: Rng, payload: Payload) -> bytes:
    data = payload.encode()
    return mostly_proved(rng, data[: int(rng.integers(0, len(data)))])


def grown(rng: Rng, payload: Payload) -> bytes:
    data, more = payload.encode(), rng.bytes(int(rng.integers(1, 9)))
    at = int(rng.integers(0, len(data) + 1))
    return mostly_proved(rng, data[:at] + more + data[at + int(rng.integers(0, 2)) * len(more) :])


def header_changed(rng: Rng, payload: Payload) -> bytes:
    """Rows, dim or element type are others; segments follow them half of the time."""
    field = str(rng.choice(["rows", "dim", "element", "declared"]))
    value = (
        int(rng.choice(INTERESTING))
        if rng.random() < 0.3
        else int(getattr(payload, field) + rng.integers(-3, 4))
    )
    if field == "element":
        value = int(rng.integers(0, 15))
    fields: dict[str, Any] = {field: max(0, value)}
    changed = replace(payload, **fields)
    if rng.random() < 0.5 and field != "declared":
        changed = replace(changed, segments=tuple(fitted(rng, each, changed) for each in changed.segments))
    return changed.encode()


def segment_changed(rng: Rng, payload: Payload) -> bytes:
    """One field of one segment is another; what depends on its size is made to fit."""
    at = int(rng.integers(len(payload.segments)))
    segment = payload.segments[at]
    limits = {"count": payload.rows + 3, "bits": 25, "scheme": 9, "parameter_type": 4, "kind": 6}
    field = str(rng.choice([*limits, "more_bytes"]))
    value = int(rng.integers(0, limits.get(field, 9))) if rng.random() < 0.9 else int(rng.choice(INTERESTING))
    sizes = (value - 4, 0) if rng.random() < 0.5 else (0, value - 4)
    fields: dict[str, Any] = {field: sizes if field == "more_bytes" else value}
    changed = replace(segment, **fields)
    if rng.random() < 0.8:
        changed = fitted(rng, changed, payload)
    segments = (*payload.segments[:at], changed, *payload.segments[at + 1 :])
    return replace(payload, segments=segments).encode()


def content_changed(rng: Rng, payload: Payload) -> bytes:
    """Offsets, bitmap, scales, centroids, codebook numbers or codes are others, of the same size."""
    at = int(rng.integers(len(payload.segments)))
    segment = payload.segments[at]
    name = str(rng.choice(["row_set", "parameters", "codes"]))
    data = bytearray(getattr(segment, name))
    if not data:
        return flipped(rng, payload)
    place = int(rng.integers(len(data)))
    if name == "parameters" and rng.random() < 0.5:
        special = bytes.fromhex(str(rng.choice(SPECIAL_FLOATS)))
        place -= place % len(special)
        data[place : place + len(special)] = special[: len(data) - place]
    else:
        data[place] = int(rng.integers(0, 256))
    fields: dict[str, Any] = {name: bytes(data)}
    segments = (*payload.segments[:at], replace(segment, **fields), *payload.segments[at + 1 :])
    return replace(payload, segments=segments).encode()


def frames_of(segment: Segment) -> list[tuple[str, int, int]]:
    """The frames of a sound segment: the field that each stands in, and where."""
    found = [("row_set", 0, len(segment.row_set))] if segment.kind == GAPS else []
    if segment.scheme not in CODED:
        return found
    data, at = segment.codes, 0
    if segment.scheme == LATTICE and 0 < segment.bits < EXACT:
        at = 4 + int.from_bytes(data[:4], "little")
        found += [("codes", 4, at)] if at > 4 else []  # lines of zeros have no centers
    return found + _packed_frames(data, at)


def _packed_frames(data: bytes, at: int) -> list[tuple[str, int, int]]:
    first = at + 4 + int.from_bytes(data[at : at + 4], "little")
    classes = zstd.decompress(data[at + 4 : first])
    widths = sorted({each // 16 for each in classes} - {0})  # of each width one block: these are small
    sizes = struct.unpack_from(f"<{len(widths)}I", data, first)
    found, place = [("codes", at + 4, first)], first + 4 * len(widths)
    for width, size in zip(widths, sizes, strict=True):
        end = place + size
        for _ in range(width - 2 if width > 4 else 0):  # one for each byte
            size = int.from_bytes(data[place : place + 4], "little")
            found.append(("codes", place + 4, place + 4 + size))
            place += 4 + size
        if place < end:
            found.append(("codes", place, end))
            place = end
    assert place == len(data)
    return found


def frame_changed(rng: Rng, payload: Payload) -> bytes:
    """A frame has other bytes, other sizes, or is another; sizes in front of it mostly fit."""
    at = int(rng.integers(len(payload.segments)))
    segment = payload.segments[at]
    frames = frames_of(segment)
    if not frames:
        return grid_changed(rng, payload)
    name, begin, end = frames[int(rng.integers(len(frames)))]
    data = getattr(segment, name)
    changed = data[:begin] + other_frame(rng, data[begin:end]) + data[end:]
    more = len(changed) - len(data)
    if name == "codes" and more and rng.random() < 0.8:
        changed = resized(changed, end - begin, more)
    fields: dict[str, Any] = {name: changed}
    segments = (*payload.segments[:at], replace(segment, **fields), *payload.segments[at + 1 :])
    return replace(payload, segments=segments).encode()


def resized(data: bytes, size: int, more: int) -> bytes:
    """The bytes with the first number that is this size made larger."""
    at = data.find(struct.pack("<I", size))
    return data if at < 0 else data[:at] + struct.pack("<I", max(0, size + more)) + data[at + 4 :]


def other_frame(rng: Rng, held: bytes) -> bytes:
    inside = bytearray(zstd.decompress(held))
    way = int(rng.integers(10))
    if way == 0:  # classes, gaps and packed integers that others stand for
        for _ in range(int(rng.integers(1, 4))):
            inside[int(rng.integers(len(inside)))] = int(rng.integers(0, 256))
        return frame(bytes(inside))
    if way == 1:  # more or fewer of them
        at, count = int(rng.integers(len(inside))), int(rng.integers(1, 5))
        return frame(
            bytes(
                inside[:at] + (rng.bytes(count) if rng.random() < 0.5 else b"") + inside[at + count :] + b"\0"
            )
        )
    if way == 2:
        return held[: int(rng.integers(len(held)))]
    if way == 3:
        return held + (held, frame(b""), struct.pack("<II", 0x184D2A50, 0), b"\0")[int(rng.integers(4))]
    if way == 4:  # the descriptor: dictionaries, reserved bits, how sizes are told
        return held[:4] + bytes([held[4] ^ 1 << int(rng.integers(8))]) + held[5:]
    if way == 5:  # a size that is not that of what follows
        claimed = int(rng.choice(np.array(CLAIMED_BYTES, np.uint64))) if rng.random() < 0.5 else len(inside)
        return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, claimed) + held[6:]
    if way == 6:
        return frame(bytes(int(rng.choice([1, len(inside), 1 << 20]))))
    if way == 7:
        return frame(rng.bytes(len(inside)))
    if way == 8:  # a dictionary, where its number of one byte has its place
        first = 6 - (held[4] >> 5 & 1)
        return held[:4] + bytes([held[4] | 1]) + held[5:first] + rng.bytes(1) + held[first:]
    damaged = bytearray(held)
    damaged[int(rng.integers(len(held)))] ^= int(rng.integers(1, 256))
    return bytes(damaged)


def grid_changed(rng: Rng, payload: Payload) -> bytes:
    """A field of a grid is another: step, scale, shift, flags, what is reserved, checksum."""
    coded_ones = [i for i, each in enumerate(payload.segments) if each.scheme in CODED]
    if not coded_ones:
        return content_changed(rng, payload)
    at = coded_ones[int(rng.integers(len(coded_ones)))]
    segment = payload.segments[at]
    fields = [*struct.unpack("<ffhBBI", segment.parameters)]
    which = int(rng.choice([0, 1, 2, 3, 3, 4, 5]))
    if which < 2:
        fields[which] = (
            float(np.frombuffer(rng.bytes(4), "<f4")[0])
            if rng.random() < 0.3
            else float(rng.choice([0, 1, 2, -1]))
        )
    elif which == 2:
        fields[which] = int(rng.integers(-2, 3))
    else:
        fields[which] = (
            int(rng.integers(0, 5 if which == 3 else 256)) if rng.random() < 0.8 else 2 - fields[which] % 2
        )
    changed = replace(segment, parameters=struct.pack("<ffhBBI", *fields))
    return replace(payload, segments=(*payload.segments[:at], changed, *payload.segments[at + 1 :])).encode()


def segments_moved(rng: Rng, payload: Payload) -> bytes:
    """Segments come in another order, twice, or not at all; the header counts them."""
    chosen = rng.choice(len(payload.segments), int(rng.integers(0, 4)))
    segments = tuple(payload.segments[int(at)] for at in chosen)
    return replace(payload, declared=len(segments), segments=segments).encode()


WAYS = (
    flipped,
    cut,
    grown,
    header_changed,
    segment_changed,
    segment_changed,
    content_changed,
    content_changed,
    segments_moved,
    frame_changed,
    frame_changed,
    grid_changed,
)


def rows_told(data: bytes) -> npt.NDArray[np.int64] | None:
    """What the head alone tells, if it is proven."""
    if len(data) < 16 or int(np.prod(struct.unpack_from("<II", data, 8), dtype=object)) > MOST_DECODED_BYTES:
        return None  # the test would need much memory, as rows of such a chunk may
    try:
        return cnr_codecs.rows_written(data)
    except CodecError:
        return None


def judge(data: bytes) -> tuple[str, frozenset[int]]:
    """How far the bytes got, and the schemes decoded.

    Raises: AssertionError if what decodes is not as declared.
    """
    at_once = decode_plain(np.frombuffer(data, np.uint8), MOST_DECODED_BYTES)
    told = rows_told(data)
    try:
        payload = cnr_codecs.parse(data, max_decoded_bytes=MOST_DECODED_BYTES)
    except CodecError as error:
        assert at_once is None
        return ("segments" if str(error).startswith("payload: segment ") else "header"), frozenset()
    dtype = cnr_codecs.array_dtype(payload.element)
    out = np.empty((payload.rows, payload.dim), dtype)
    need = np.ones(payload.rows, np.uint8)
    present = cnr_codecs.present_rows(payload)
    has_room = payload.element == "float32" and len(data) % 2 == 0
    pending = cnr_codecs.Pending(payload.rows, payload.dim, out if has_room else None)
    taken(payload)
    try:
        written = cnr_codecs.decode_into(payload, out, need, 0, pending)
        written += settled(payload, out, need, pending)
    except CodecError:
        assert {LATTICE, RELATIVE} & {segment.scheme for segment in payload.segments}
        assert need.all()
        return "segments", frozenset()
    assert written == len(present) == payload.rows - np.count_nonzero(need)
    assert not need[present].any()
    np.testing.assert_array_equal(told, present)
    if at_once is not None:
        assert not need.any()
        np.testing.assert_array_equal(at_once.view(np.uint32), out.view(np.uint32))
        return "decoded at once", frozenset({int(payload.segments[0].scheme)})
    return "decoded", frozenset(int(segment.scheme) for segment in payload.segments)


def settled(payload: cnr_codecs.Payload, out: Any, need: Any, pending: cnr_codecs.Pending) -> int:
    """How many rows are relative; these are composed with others on the grid of the first."""
    rows = np.flatnonzero(need == 2)
    if len(rows):
        grid = grid_of(payload, int(rows[0]))
        with suppress(CodecError):
            cnr_codecs.decode_into(beneath(payload, rows, grid), out, need, 0, pending)
            COMPOSED["steps" if grid.step > 0 else "exact" if grid.is_exact else "floating grids"] += 1
            pending.prove()
        need[rows] = 0
    return len(rows)


def grid_of(payload: cnr_codecs.Payload, row: int) -> Grid:
    """The grid of a relative row."""
    relative = [each for each in payload.segments if each.scheme == RELATIVE]
    return next(each.grid for each in relative if row in each.row_set.offsets())


def beneath(payload: cnr_codecs.Payload, rows: Any, grid: Grid) -> cnr_codecs.Payload:
    """Rows for relative ones: of zeros, or on a floating grid of ones, near which differences give other codes."""
    values = np.full((len(rows), payload.dim), grid.mantissa > 0, cnr_codecs.array_dtype(payload.element))
    on_floats = cnr_codecs.FloatingRows(max(grid.mantissa, 1))
    codec = cnr_codecs.LatticeRows(step=grid.step) if grid.step > 0 else on_floats
    return cnr_codecs.parse(codec.encode_rows(values, rows, payload.rows, element=payload.element))


def taken(payload: cnr_codecs.Payload) -> None:
    """Moves the rows as a fold does, which ends in segments without relative ones or in an error."""
    need, pending = np.ones(payload.rows, np.uint8), cnr_codecs.Pending(payload.rows, payload.dim)
    with suppress(CodecError):
        segments = cnr_codecs.take_rows(payload, need, 0, pending)
        rows = np.flatnonzero(need == 2)
        if len(rows):
            older = beneath(payload, rows, grid_of(payload, int(rows[0])))
            segments += cnr_codecs.take_rows(older, need, 0, pending)
        assert all(segment.scheme != RELATIVE for segment in segments)


def memory_bytes(field: str) -> int:
    """A figure of this process's memory. (Its resource usage would begin with that of the process that started it.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the system doesn't tell {field}")


def kind_of(segment: Segment) -> str:
    """How its rows are stored; of a lattice and of relative rows, on which grid if that is not of steps."""
    if segment.scheme in CODED and segment.bits:
        return "exact" if segment.bits == EXACT else "floating"
    return Scheme(segment.scheme).name.lower()


def main(count: int, seed: int, kind: str = "") -> None:
    rng = np.random.default_rng(seed)
    bases: list[Payload] = []
    for make, wanted in ((sound, 600), (plain, 60), (hostile, 300), (wide, 3)):
        made = (make(rng) for _ in range(wanted * (TRIES_FOR_A_KIND if kind else 1)))
        chosen = (each for each in made if not kind or {*map(kind_of, each.segments)} == {kind})
        bases += itertools.islice(chosen, wanted)
    # Loads every kernel, whose code needs address space, before memory is limited.
    assert bases
    assert all(judge(base.encode())[0].startswith("decoded") for base in bases)
    COMPOSED.clear()
    before = memory_bytes("VmHWM")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes("VmSize") + MEMORY_BYTES, resource.RLIM_INFINITY))
    reached: Counter[str] = Counter()
    schemes: Counter[int] = Counter()
    ways = rng.integers(0, len(WAYS), count)
    forged = patch.object(CodedRows, "prove", lambda *_: None)
    numbers = rng.integers(0, len(bases), count).tolist()
    for number, (way, base) in enumerate(zip(ways.tolist(), numbers, strict=True)):
        data = WAYS[way](rng, bases[base])
        try:
            with forged if number % 2 else nullcontext():
                end, decoded = judge(data)
        except BaseException:
            print(f"spoiled by {WAYS[way].__name__}: {data.hex()}", file=sys.stderr)
            raise
        reached[end] += 1
        schemes.update(decoded)
    grown = memory_bytes("VmHWM") - before
    print(json.dumps({"reached": reached, "schemes": schemes, "composed": COMPOSED, "grown_bytes": grown}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
