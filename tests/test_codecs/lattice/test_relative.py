"""Rows relative to those of older payloads: composed, moved, and refused where they do not fit."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import (
    FloatingRows,
    LatticeRows,
    LosslessRows,
    ParentError,
    PayloadError,
    Pending,
    RowsError,
    Scheme,
    UniformRows,
    build_payload,
    decode_into,
    merge_segments,
    parse,
    split_segments,
    take_rows,
)
from cnr_codecs.elements import element_named
from cnr_codecs.lattice.lattice import most_code
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import decode, encode
from tests.test_codecs.lattice.test_lattice import FLOATS, as_element
from tests.test_codecs.payload_bytes import header, segment
from tests.test_codecs.references import coded as reference
from tests.test_codecs.references.lattice import codes_of, values_of

STEP = 0.125
CODEC = LatticeRows(step=STEP)
GOLDEN = Path(__file__).with_name("golden_relative.npz")


class Table:
    """Rows that change, the codes that a writer knows of them, and the payloads that it wrote, oldest first."""

    def __init__(self, seed: int, rows: int, dim: int, element: str = "float32", step: float = STEP) -> None:
        self.rng = np.random.default_rng(seed)
        self.element, self.codec = element, LatticeRows(step=step)
        self.limit = most_code(step, element_named(element))
        self.values = self._as_stored(self.rng.normal(0, 0.5, (rows, dim)))
        self.codes, self.known = np.zeros((rows, dim), np.int16), np.zeros(rows, bool)
        self.payloads: list[bytes] = []

    def _as_stored(self, values: Any) -> Rows:
        return as_element(values.astype(np.float32), self.element)

    def write(self, ids: Any) -> None:
        """Write these rows, relative where their codes are known."""
        values = self.values[ids]
        payload, codes, coded, _ = self.codec.encode_over(
            *(values, ids, len(self.values), self.codes[ids], self.known[ids]), element=self.element
        )
        expected, raw = codes_of(values, float(self.codec.step or 0), self.limit)
        np.testing.assert_array_equal(coded, ~raw)
        np.testing.assert_array_equal(codes, expected)
        self.codes[ids], self.known[ids] = codes, coded
        self.payloads.append(payload)

    def change(self, share: float, size: float = 0.2) -> Any:
        ids = np.flatnonzero(self.rng.random(len(self.values)) < share)
        moved = self.values[ids].astype(np.float32) + self.rng.normal(0, size, self.values[ids].shape)
        self.values[ids] = self._as_stored(moved)
        return ids

    def expected(self) -> Rows:
        """What readers find once all rows were written."""
        found = values_of(self.codes.astype(np.int32), float(self.codec.step or 0), self.element)
        others = self.values[~self.known]  # raw, or on finer steps
        found[~self.known] = decode(encode(self.codec, others, self.element))[: len(others)]
        return found


class Reading:
    """A window of rows that payloads fill, newest first. Sums have memory of their own, or are `in_values`."""

    def __init__(
        self, rows: int, dim: int, element: str = "float32", wanted: Any = None, *, in_values: bool = False
    ) -> None:
        self.out = np.full((rows, dim), 7, cnr_codecs.array_dtype(element))
        self.need = np.ones(rows, np.uint8) if wanted is None else wanted.copy()
        self.pending = Pending(rows, dim, self.out if in_values else None)

    def take(
        self, payload: bytes, begin: int = 0, end: int | None = None, first_row: int = 0, what: str = ""
    ) -> None:
        """Decode rows from `first_row` of a payload on into these of the window."""
        pending = self.pending.part(begin, 0, what)
        decode_into(parse(payload), self.out[begin:end], self.need[begin:end], first_row, pending)

    def end(self) -> Rows:
        assert not self.need.any()
        self.pending.prove()
        return self.out


def compose(
    payloads: list[bytes], rows: Any, dim: int, element: str, wanted: Any = None, *, in_values: bool = False
) -> Rows:
    """The rows of a window, from the newest payload to the oldest."""
    reading = Reading(len(rows), dim, element, wanted, in_values=in_values)
    for number, payload in reversed(list(enumerate(payloads))):
        reading.take(payload, first_row=int(rows[0]), what=f"payload {number}")
    return reading.end()


READS: tuple[Callable[..., Any], ...] = (
    decode_into,
    lambda payload, _, need, *rest: take_rows(payload, need, *rest),
)


@pytest.mark.slow
@given(
    seed=st.integers(0, 1 << 32),
    rows=st.sampled_from([1, 7, 300, 5000]),
    dim=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 17, 64]),
    element=FLOATS,
    step=st.sampled_from([STEP, 2.0**-12, 2.0]),
)
@settings(deadline=None, max_examples=histories(60))
def test_chains_give_the_codes_of_the_writer(
    seed: int, rows: int, dim: int, element: str, step: float
) -> None:
    table = Table(seed, rows, dim, element, step)
    table.write(np.arange(rows))
    for _ in range(4):
        ids = table.change(0.5)
        table.values[ids[table.rng.random(len(ids)) < 0.05]] = np.nan
        if len(ids):
            table.write(ids)
    expected = table.expected()
    found = compose(table.payloads, np.arange(rows), dim, element)
    assert found.tobytes() == expected.tobytes()
    if element == "float32":
        found = compose(table.payloads, np.arange(rows), dim, element, in_values=True)
        assert found.tobytes() == expected.tobytes()
    first = int(table.rng.integers(rows))
    window = np.arange(first, min(rows, first + 100))
    wanted = (table.rng.random(len(window)) < 0.4).astype(np.uint8)
    part = compose(table.payloads, window, dim, element, wanted, in_values=element == "float32")
    assert part[wanted != 0].tobytes() == expected[window][wanted != 0].tobytes()
    assert (part[wanted == 0] == 7).all()
    need, pending, taken = np.ones(rows, np.uint8), Pending(rows, dim), []
    for payload in reversed(table.payloads):
        taken += take_rows(parse(payload), need, 0, pending)
    pending.prove()
    assert not need.any()
    merged = merge_segments(taken)
    assert Scheme.RELATIVE not in {each.scheme for each in merged}
    for number, segments in enumerate(split_segments(merged, 64)):
        chunk = expected[64 * number : 64 * number + 64]
        payload = build_payload(len(chunk), dim, element_named(element), segments)
        assert decode(parse(payload)).tobytes() == chunk.tobytes()


def test_drift_of_many_payloads() -> None:
    table = Table(1, 500, 8)
    table.write(np.arange(500))
    for _ in range(40):
        table.write(table.change(0.3, size=0.02))
    found = compose(table.payloads, np.arange(500), 8, "float32")
    np.testing.assert_array_equal(found, table.expected())
    assert np.abs(found - table.values).max() <= STEP / 2


@pytest.mark.parametrize("in_values", [False, True])
@pytest.mark.parametrize("codec", [LatticeRows(step=0.125), FloatingRows(3)], ids=repr)
def test_rows_that_do_not_come_out_as_written_are_found(
    codec: LatticeRows | FloatingRows, in_values: bool
) -> None:
    base = np.array([[1, -2, 0.5, 0]] * 40, np.float32)
    _, parent, known, _ = codec.encode_over(
        base, None, 40, np.zeros((40, 4), np.int16), np.zeros(40, bool), element="float32"
    )
    newer, *_ = codec.encode_over(base * 1.25, None, 40, parent, known, element="float32")
    base[17, 1] = -4
    other = codec.encode_rows(base, None, 40, element="float32")
    with pytest.raises(ParentError, match=r"payload 1: .*do not come out as they were written"):
        compose([other, newer], np.arange(40), 4, "float32", in_values=in_values)


@given(seed=st.integers(0, 1 << 32), in_values=st.booleans(), dim=st.sampled_from([1, 3, 9]))
@settings(deadline=None, max_examples=histories(20))
def test_links_of_chunks_of_their_own_that_are_read_in_any_order(
    seed: int, in_values: bool, dim: int
) -> None:
    """Three deltas over a whole table, each cut into chunks of other sizes, the newest first."""
    table, rows = Table(seed, 300, dim), np.arange(300)
    links: list[list[tuple[int, int, bytes]]] = []
    for chunk in (100, 64, 77, 300):
        ids, cuts = (table.change(0.6) if links else rows), range(0, 300, chunk)
        links.append([(first, *_chunk_of(table, ids, first, chunk)) for first in cuts])
    reading = Reading(300, dim, in_values=in_values)
    for link in reversed(links):
        for number in table.rng.permutation(len(link)).tolist():
            first, last, payload = link[number]
            reading.take(payload, first, last)
    assert reading.end().tobytes() == table.expected().tobytes()


def _chunk_of(table: Table, ids: Any, first: int, rows: int) -> tuple[int, bytes]:
    """The row behind a chunk, and the chunk."""
    last = min(first + rows, len(table.values))
    held = ids[(ids >= first) & (ids < last)]
    payload, table.codes[held], table.known[held], _ = table.codec.encode_over(
        *(table.values[held], held - first, last - first, table.codes[held], table.known[held]),
        element=table.element,
    )
    return last, payload


@given(seed=st.integers(0, 1 << 32), in_values=st.booleans(), link=st.integers(0, 2))
@settings(deadline=None, max_examples=histories(30))
def test_one_wrong_code_of_any_link_is_found(seed: int, in_values: bool, link: int) -> None:
    """Whose payload is sound as such: the rows are what is wrong."""
    rng = np.random.default_rng(seed)
    rows, dim = int(rng.integers(1, 60)), int(rng.integers(1, 9))
    codes = [rng.integers(-99, 100, (rows, dim)) for _ in range(3)]
    stored = [codes[0], codes[1] - codes[0], codes[2] - codes[1]]
    payloads = []
    for wrong in (False, True):
        if wrong:
            stored[link][rng.integers(rows), rng.integers(dim)] += rng.choice([-1, 1])
        bodies = [
            reference.on_step(each.reshape(-1).tolist(), dim, STEP, held.reshape(-1).tolist())
            for each, held in zip(codes, stored, strict=True)
        ]
        schemes = (Scheme.LATTICE, Scheme.RELATIVE, Scheme.RELATIVE)
        parts = zip(schemes, bodies, strict=True)
        payloads.append(
            [
                (header(1, rows, dim) + segment(int(scheme), 0, 2, 0, rows, body)).encode()
                for scheme, body in parts
            ]
        )
    right, wrong_ones = payloads
    found = compose(right, np.arange(rows), dim, "float32", in_values=in_values)
    np.testing.assert_array_equal(found, codes[2] * np.float32(STEP))
    with pytest.raises(
        PayloadError, match="do not come out as they were written" if link else "crc32c differs"
    ):
        compose(wrong_ones, np.arange(rows), dim, "float32", in_values=in_values)


def test_bytes_of_a_relative_payload() -> None:
    values = np.array([[0, 0.5, -1], [0, 0, 0]], np.float32)
    parent = np.array([[1, 1, -1], [9, 9, 9]], np.int8)
    data, codes, coded, _ = LatticeRows(step=0.5).encode_over(
        *(values, np.array([2, 5]), 8, parent, np.array([True, False])), element="float32"
    )
    assert codes.tolist() == [[0, 1, -2], [0, 0, 0]]
    assert coded.all()
    parts = []
    for scheme, row, stored, held in (
        (6, 0b100000, [0, 0, 0], [0, 0, 0]),
        (7, 0b000100, [-1, 0, -1], [0, 1, -2]),
    ):
        body = reference.on_step(held, 3, 0.5, stored)
        parts.append(segment(scheme, 0, 2, 1, 1, bytes([row]), body))
    assert data == (header(2, 8, 3) + parts[0] + parts[1]).encode()


def test_fewer_bytes_for_rows_that_moved_little() -> None:
    table = Table(3, 4000, 32)
    table.write(np.arange(4000))
    ids = table.change(0.2, size=0.03)
    absolute = CODEC.encode_rows(table.values[ids], ids, 4000, element="float32")
    table.write(ids)
    assert len(table.payloads[1]) < 0.4 * len(absolute)


def test_one_payload_alone_names_the_way_to_read_it() -> None:
    table = Table(4, 50, 3)
    table.write(np.arange(50))
    table.write(np.arange(10, 20))
    payload = parse(table.payloads[1])
    assert cnr_codecs.rows_written(table.payloads[1]).tolist() == [*range(10, 20)]
    need, out = np.ones(50, np.uint8), np.empty((50, 3), np.float32)
    with pytest.raises(PayloadError, match=r"cnr_store\.view"):
        decode_into(payload, out, need)
    assert (need == 1).all()
    with pytest.raises(PayloadError, match=r"cnr_store\.view"):
        take_rows(payload, need)
    with pytest.raises(PayloadError, match=r"cnr_store\.view"):
        decode(payload)
    assert decode_into(payload, out[:10], np.ones(10, np.uint8)) == 0
    with pytest.raises(RowsError, match="without these"):
        list(split_segments(payload.segments, 25))


@pytest.mark.parametrize(
    ("older", "message"),
    [
        (LosslessRows(), "row 10 of it is not on a lattice"),
        (UniformRows(bits=4), "row 10 of it is not on a lattice"),
        (LatticeRows(step=2 * STEP), "another grid than the step 0.25"),
        (LatticeRows(), "newer payload has rows relative to it on another grid"),
        (FloatingRows(4), "another grid than the floating grid of 4 bits"),
    ],
)
def test_relative_rows_over_others_are_refused(older: Any, message: str) -> None:
    table = Table(5, 50, 3)
    table.write(np.arange(50))
    table.write(np.arange(10, 20))
    beneath = older.encode_rows(table.values, None, 50, element="float32")
    for read in READS:
        into = Reading(50, 3)
        read(parse(table.payloads[1]), into.out, into.need, 0, into.pending)
        assert np.flatnonzero(into.need == 2).tolist() == [*range(10, 20)]
        with pytest.raises(ParentError, match=message):
            read(parse(beneath), into.out, into.need, 0, into.pending)


def test_relative_rows_over_relative_ones_of_another_grid_are_refused() -> None:
    newer, older = Table(5, 50, 3), Table(5, 50, 3, step=2 * STEP)
    for table in (newer, older):
        table.write(np.arange(50))
        table.write(np.arange(10, 20))
    for read in READS:
        into = Reading(50, 3)
        read(parse(newer.payloads[1]), into.out, into.need, 0, into.pending)
        with pytest.raises(PayloadError, match=r"another grid than the step 0\.25"):
            read(parse(older.payloads[1]), into.out, into.need, 0, into.pending)


def test_rows_on_any_number_of_steps_are_read_where_relative_ones_may_be() -> None:
    """Only grids of relative rows are counted."""
    rows, steps = 300, [math.ldexp(128 + i % 128, i // 128 - 9) for i in range(300)]
    segments = [
        segment
        for row, step in enumerate(steps)
        for segment in parse(
            LatticeRows(step=step).encode_rows(
                np.full((1, 3), 5 * step, np.float32), np.array([row]), rows, element="float32"
            )
        ).segments
    ]
    payload = parse(build_payload(rows, 3, element_named("float32"), segments))
    found = [Reading(rows, 3) for _ in READS]
    for read, into in zip(READS, found, strict=True):
        read(payload, into.out, into.need, 0, into.pending)
        assert not into.need.any()
    np.testing.assert_array_equal(found[0].out[:, 0], 5 * np.array(steps))


def test_absent_rows_and_chunks_of_columns_are_refused() -> None:
    table = Table(6, 50, 4)
    table.write(np.arange(50))
    table.write(np.arange(10, 20))
    absent = build_payload(50, 4, element_named("float32"), [_absent(50)])
    reading = Reading(50, 4)
    reading.take(table.payloads[1])
    with pytest.raises(PayloadError, match="not on a lattice"):
        reading.take(absent)
    reading = Reading(50, 4)
    reading.pending = Pending(50, 8)
    with pytest.raises(PayloadError, match="not all of their columns"):
        reading.take(table.payloads[1])


def _absent(rows: int) -> cnr_codecs.Segment:
    none = np.empty((0, rows), "<f4")
    kinds = Scheme.ABSENT, 0, cnr_codecs.ParameterType.NONE
    return cnr_codecs.Segment(
        *kinds, cnr_codecs.RowSet.first(rows, rows), none, np.empty((rows, 0), np.uint8)
    )


def test_columns_beneath_may_be_split() -> None:
    table = Table(7, 50, 6)
    table.values += np.float32(3)  # no part of a row would be zero
    beneath = table.values.copy()
    table.write(np.arange(50))
    table.values[10:30] += table.rng.normal(0, 0.2, (20, 6)).astype(np.float32)
    table.write(np.arange(10, 30))
    reading = Reading(50, 6)
    reading.take(table.payloads[1])
    for column in (0, 3):
        part = CODEC.encode_rows(beneath[:, column : column + 3], None, 50, element="float32")
        out, need = reading.out[:, column : column + 3], reading.need.copy()
        decode_into(parse(part), out, need, 0, reading.pending.part(0, column))
    np.testing.assert_array_equal(reading.out, table.expected())
    reading.pending.prove()


def test_another_parent_is_found_by_the_check() -> None:
    table = Table(8, 50, 3)
    table.write(np.arange(50))
    other = Table(9, 50, 3)
    other.write(np.arange(50))
    table.write(np.arange(10, 20))
    with pytest.raises(PayloadError, match=r"payload 1: the rows .* do not come out as they were written"):
        compose([other.payloads[0], table.payloads[1]], np.arange(50), 3, "float32")


def test_sums_beyond_a_code_are_refused() -> None:
    values = np.full((4, 2), 30000 * STEP, np.float32)
    base = CODEC.encode_rows(values, None, 4, element="float32")
    known = np.ones(4, bool)
    delta, *_ = CODEC.encode_over(values, None, 4, np.zeros((4, 2), np.int8), known, element="float32")
    with pytest.raises(PayloadError, match="beyond 32767"):
        compose([base, delta], np.arange(4), 2, "float32")
    delta, *_ = CODEC.encode_over(
        -values, None, 4, np.full((4, 2), 30000, np.int16), known, element="float32"
    )
    np.testing.assert_array_equal(compose([base, delta], np.arange(4), 2, "float32"), -values)


def test_options_of_relative_rows() -> None:
    codec = LatticeRows(relative=True)
    assert codec.get_config() == {"id": "cnr_lattice", "rms_step": 0.35, "relative": True}
    assert cnr_codecs.row_codec(codec.get_config()) == codec
    assert codec.zarr_codec() == LatticeRows().zarr_codec()
    assert codec.with_step(0.5).relative
    with pytest.raises(cnr_codecs.CodecConfigError, match="relative must be true or false"):
        LatticeRows(relative=1)  # type: ignore[arg-type]
    with pytest.raises(RowsError, match="known step"):
        codec.encode_over(
            *(np.zeros((2, 2), np.float32), None, 2, np.zeros((2, 2), np.int8), np.ones(2, bool)),
            element="float32",
        )
    with pytest.raises(RowsError, match="parent and known must be"):
        CODEC.encode_over(
            *(np.zeros((2, 2), np.float32), None, 2, np.zeros((2, 3), np.int8), np.ones(2, bool)),
            element="float32",
        )


@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=histories(60))
def test_damaged_payloads_end_in_an_error_or_in_rows(seed: int) -> None:
    """Whatever a damaged relative payload adds, the rows are those written or an error where all were read."""
    table = Table(seed % 50, 80, 5)
    table.write(np.arange(80))
    table.write(np.sort(table.rng.choice(80, 40, replace=False)))
    rng, data = np.random.default_rng(seed), bytearray(table.payloads[1])
    head = struct.unpack_from("<I", data, 24)[0]
    data[int(rng.integers(head + 4, len(data)))] ^= int(rng.integers(1, 256))
    try:
        found = compose([table.payloads[0], bytes(data)], np.arange(80), 5, "float32")
    except PayloadError:
        return
    np.testing.assert_array_equal(found, table.expected())


def test_golden_payloads_are_read_and_written_as_ever() -> None:
    """The payload of a whole table, and that of rows relative to it."""
    with np.load(GOLDEN) as golden:
        base, delta, values, ids, parent, known, expected = (
            golden[name] for name in ("base", "delta", "values", "ids", "parent", "known", "expected")
        )
    rows, dim = expected.shape
    written, *_ = CODEC.encode_over(values, ids, rows, parent, known, element="float32", seal=7)
    assert written == delta.tobytes()
    found = compose([base.tobytes(), delta.tobytes()], np.arange(rows), dim, "float32")
    assert found.tobytes() == expected.tobytes()


def _make_golden() -> None:
    """`python -m tests.test_codecs.lattice.test_relative` writes the file, if there is none."""
    rng = np.random.default_rng(20261122)
    older = rng.normal(0, 0.5, (70, 17)).astype(np.float32)
    ids = np.flatnonzero(rng.random(70) < 0.6)
    values = older[ids] + rng.normal(0, 0.1, (len(ids), 17)).astype(np.float32)
    values[2, 1], values[5] = np.nan, 40
    parent, known = codes_of(older[ids], STEP, 127)[0].astype(np.int8), rng.random(len(ids)) < 0.8
    base = CODEC.encode_rows(older, None, 70, element="float32", seal=7)
    delta, *_ = CODEC.encode_over(values, ids, 70, parent, known, element="float32", seal=7)
    found = compose([base, delta], np.arange(70), 17, "float32")
    written = np.frombuffer(base, np.uint8), np.frombuffer(delta, np.uint8)
    with GOLDEN.open("xb") as file:
        np.savez_compressed(
            *(file,),
            base=written[0],
            delta=written[1],
            values=values,
            ids=ids,
            parent=parent,
            known=known,
            expected=found,
        )


if __name__ == "__main__":
    _make_golden()
