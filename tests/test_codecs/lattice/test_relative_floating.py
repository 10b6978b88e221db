"""Rows relative to older ones on a floating grid: composed, moved, and refused where they do not fit."""

from __future__ import annotations

import struct
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
    PayloadError,
    Pending,
    Scheme,
    UnsupportedPayloadError,
    build_payload,
    decode_into,
    merge_segments,
    parse,
    row_codec,
    take_rows,
)
from cnr_codecs.elements import element_named
from cnr_codecs.lattice.floating import floating_codes
from cnr_codecs.lattice.segments import encode_segments
from cnr_codecs.payload.coded import Grid
from cnr_codecs.protocol import Rows
from tests.nightly import histories
from tests.test_codecs.hard_rows import decode
from tests.test_codecs.lattice.test_lattice import FLOATS, as_element
from tests.test_codecs.lattice.test_relative import compose
from tests.test_codecs.payload_bytes import header, segment
from tests.test_codecs.references import coded as reference
from tests.test_codecs.references.floating import floating_values


class Sums:
    """Rows of sums that grow, the codes that a writer knows of them, and the payloads that it wrote, oldest first."""

    def __init__(self, seed: int, rows: int, dim: int, mantissa: int = 3, element: str = "float32") -> None:
        self.rng = np.random.default_rng(seed)
        self.element, self.codec = element, FloatingRows(mantissa, relative=True)
        self.values = self._as_stored(
            self.rng.lognormal(0, 2, (rows, dim)) * self.rng.choice([1, -1], (rows, 1))
        )
        self.codes = np.zeros((rows, dim), Grid(mantissa=mantissa).dtype)
        self.known = np.zeros(rows, bool)
        self.payloads: list[bytes] = []

    def _as_stored(self, values: Any) -> Rows:
        return as_element(values.astype(np.float32), self.element)

    def write(self, ids: Any) -> None:
        """Write these rows, relative where their codes are known."""
        payload, codes, coded, _ = self.codec.encode_over(
            *(self.values[ids], ids, len(self.values), self.codes[ids], self.known[ids]), element=self.element
        )
        held, raw = floating_codes(self.values[ids], self.codec.grid, self.element)
        np.testing.assert_array_equal(coded, ~raw)
        np.testing.assert_array_equal(codes[coded], held)
        self.codes[ids], self.known[ids] = codes, coded
        self.payloads.append(payload)

    def change(self, share: float) -> Any:
        ids = np.flatnonzero(self.rng.random(len(self.values)) < share)
        grown = self.values[ids].astype(np.float32) * self.rng.uniform(1, 1.2, self.values[ids].shape)
        self.values[ids] = self._as_stored(grown)
        return ids

    def expected(self) -> Rows:
        """What readers find once all rows were written."""
        stored = floating_values(self.codes, self.codec.mantissa_bits, self.element)
        return np.where(self.known[:, None], stored, self.values)


@given(
    seed=st.integers(0, 1 << 32),
    rows=st.sampled_from([1, 7, 300, 5000]),
    dim=st.sampled_from([1, 2, 5, 17, 64]),
    mantissa=st.sampled_from([*range(1, 8), 23]),
    element=FLOATS,
)
@settings(deadline=None, max_examples=histories(40))
def test_chains_give_the_codes_of_the_writer(
    seed: int, rows: int, dim: int, mantissa: int, element: str
) -> None:
    table = Sums(seed, rows, dim, mantissa, element)
    table.write(np.arange(rows))
    for _ in range(3):
        ids = table.change(0.5)
        odd = ids[table.rng.random(len(ids)) < 0.1]
        table.values[odd, 0] = table.rng.choice([np.nan, 0.0, -1.0], len(odd))
        if len(ids):
            table.write(ids)
    expected = table.expected()
    for in_values in {False, element == "float32"}:
        found = compose(table.payloads, np.arange(rows), dim, element, in_values=in_values)
        assert found.tobytes() == expected.tobytes()
    need, pending, taken = np.ones(rows, np.uint8), Pending(rows, dim), []
    for payload in reversed(table.payloads):
        taken += take_rows(parse(payload), need, 0, pending)
    pending.prove()
    merged = merge_segments(taken)
    assert Scheme.RELATIVE not in {each.scheme for each in merged}
    folded = build_payload(rows, dim, element_named(element), merged)
    assert decode(parse(folded)).tobytes() == expected.tobytes()


def test_bytes_of_a_relative_payload() -> None:
    values = np.array([[1.0, -1.25, 0.0]], np.float32)
    parent = np.array([[(127 << 3) - 1, -((127 << 3) + 2), 0]], np.int16)
    data, codes, *_ = FloatingRows(3).encode_over(
        values, np.array([2]), 8, parent, np.ones(1, bool), element="float32"
    )
    assert codes.tolist() == [[127 << 3, -((127 << 3) + 2), 0]]
    body = reference.on_step(codes.reshape(-1).tolist(), 3, 0, [1, 0, 0], 3)
    assert data == (header(1, 8, 3) + segment(7, 3, 2, 1, 1, bytes([4]), body)).encode()
    # Differences need no signs of their own.
    newer = body[:10] + b"\2" + body[11:]
    with pytest.raises(UnsupportedPayloadError, match="flags 2, 0 of a grid are unknown"):
        parse((header(1, 8, 3) + segment(7, 3, 2, 1, 1, bytes([4]), newer)).encode())


def test_rows_that_would_take_more_are_not_relative() -> None:
    """Such as those that had not been trained."""
    table = Sums(4, 400, 8)
    grown, table.values = table.values, table.values * (np.arange(400) % 2)[:, None].astype(np.float32)
    table.write(np.arange(400))
    table.values = grown
    table.write(np.arange(400))
    counts = {each.scheme: each.row_set.count for each in parse(table.payloads[1]).segments}
    assert counts == {Scheme.LATTICE: 200, Scheme.RELATIVE: 200}


def test_fewer_bytes_for_sums_that_grew_little() -> None:
    table = Sums(3, 4000, 32)
    table.write(np.arange(4000))
    ids = table.change(0.2)
    absolute = table.codec.encode_rows(table.values[ids], ids, 4000, element="float32")
    table.write(ids)
    assert len(table.payloads[1]) < 0.6 * len(absolute)


@pytest.mark.parametrize(
    ("older", "message"),
    [
        (LosslessRows(), "row 10 of it is not on a lattice"),
        (LatticeRows(step=0.5), "another grid than the step 0.5"),
        (FloatingRows(4), "another grid than the floating grid of 4 bits"),
    ],
)
def test_relative_rows_over_others_are_refused(older: Any, message: str) -> None:
    table = Sums(5, 50, 3)
    table.write(np.arange(50))
    table.write(np.arange(10, 20))
    beneath = older.encode_rows(table.values, None, 50, element="float32")
    for read in (decode_into, lambda payload, _, need, *rest: take_rows(payload, need, *rest)):
        need, out, pending = np.ones(50, np.uint8), np.empty((50, 3), np.float32), Pending(50, 3)
        read(parse(table.payloads[1]), out, need, 0, pending)
        with pytest.raises(PayloadError, match=message):
            read(parse(beneath), out, need, 0, pending)


@pytest.mark.parametrize("code", [3, -7, 254 << 3, 2047])
def test_sums_that_are_no_codes_are_refused(code: int) -> None:
    """A divisor must not become a subnormal number, nor an infinity."""
    held = np.full((4, 2), 1000, np.int16)
    values = floating_values(held, 3, "float32")
    base = FloatingRows(3).encode_rows(values, None, 4, element="float32")
    parent, known, kind = 2 * held.astype(np.int32) - code, np.ones(4, bool), element_named("float32")
    grid, of_rows = Grid(mantissa=3), (values, np.arange(4), 4, parent, known)
    delta = encode_segments(*of_rows, held, ~known, kind, grid, 0).payload
    for read in (decode_into, lambda payload, _, need, *rest: take_rows(payload, need, *rest)):
        need, out, pending = np.ones(4, np.uint8), np.empty((4, 2), np.float32), Pending(4, 2)
        read(parse(delta), out, need, 0, pending)
        with pytest.raises(PayloadError, match="a code is none of the floating grid of 3 bits"):
            read(parse(base), out, need, 0, pending)


@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=histories(40))
def test_damaged_payloads_end_in_an_error_or_in_rows(seed: int) -> None:
    table = Sums(seed % 50, 80, 5)
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


def test_options_of_relative_rows() -> None:
    codec = FloatingRows(relative=True)
    assert codec.get_config() == {"id": "cnr_floating", "mantissa_bits": 3, "relative": True}
    assert row_codec(codec.get_config()) == codec
    assert codec.zarr_codec() == FloatingRows().zarr_codec()
    with pytest.raises(cnr_codecs.CodecConfigError, match="relative must be true or false"):
        FloatingRows(relative=1)  # type: ignore[arg-type]
