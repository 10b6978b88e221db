"""Payloads of rows that a device quantized equal those that the host encodes, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import (
    FloatingRows,
    LatticeRows,
    RowCodec,
    RowsError,
    UniformRows,
    lattice_step,
    parse,
    row_codec,
)
from cnr_codecs.lattice import steps
from cnr_codecs.lattice.floating import floating_codes
from cnr_codecs.payload.coded import Grid
from cnr_codecs.protocol import Rows, encode_chunks
from cnr_codecs.uniform.uniform import QuantizedRows, SchemeName
from cnr_store.training.devices import arithmetic
from cnr_store.training.devices import encode as encoding
from cnr_store.training.devices.encode import can_encode, encode, on_host
from cnr_store.writing.row_codes import RowCodes, encode_block
from tests.nightly import at_night
from tests.test_codecs.hard_rows import ROW_MAKERS
from tests.test_store.training.devices.device import DEVICE

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ELEMENTS = st.sampled_from(sorted(DTYPES))
SEEDS = st.integers(0, 1 << 32)


def table_of(rows: int, dim: int, seed: int, element: str) -> torch.Tensor:
    """A table of rows that break quantizers."""
    rng = np.random.default_rng(seed)
    makers = [ROW_MAKERS[kind] for kind in rng.choice(sorted(ROW_MAKERS), rows)]
    values = np.stack([np.asarray(maker(rng, dim)).astype(np.float32) for maker in makers])
    return torch.from_numpy(values).to(DTYPES[element]).to(DEVICE)


def check(codec: RowCodec, table: torch.Tensor, element: str, seed: int) -> None:
    """Some rows of the table, or all of them, in chunks."""
    rng, chunk_rows = np.random.default_rng(seed), 16
    rows = len(table)
    ids = np.flatnonzero(rng.random(rows) < rng.choice([0.3, 0.9])) if seed % 3 else None
    numbers = np.arange(rows) if ids is None else ids
    edges = np.searchsorted(numbers, np.arange(0, rows + chunk_rows, chunk_rows))
    edges = np.unique(edges)
    seals = rng.integers(0, 1 << 63, len(edges) - 1).tolist()
    values = on_host(table)[numbers]
    offsets = numbers % chunk_rows
    wanted = encode_chunks(codec, values, offsets, edges.tolist(), chunk_rows, element=element, seals=seals)

    assert can_encode(codec, table, False)
    encoded = encode(codec, table, None if ids is None else torch.from_numpy(ids).to(DEVICE))
    table.zero_()  # training goes on
    begin = edges[len(edges) // 2] if len(edges) > 2 else 0
    found: list[bytes] = []
    for first, last in ((0, begin), (begin, len(numbers))):
        own = edges[(edges >= first) & (edges <= last)]
        own_seals = seals[len(found) : len(found) + len(own) - 1]
        found += encode_block(
            *(codec, encoded.block(first, last), offsets[first:last], (own - first).tolist(), chunk_rows),
            element=element,
            seals=own_seals,
        )
    assert found == wanted


@pytest.mark.slow
@given(
    dim=st.sampled_from([1, 2, 3, 17, 32, 70]),
    scheme=st.sampled_from(["symmetric", "asymmetric"]),
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    element=ELEMENTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=30)
def test_rows_over_their_ranges(dim: int, scheme: SchemeName, bits: int, element: str, seed: int) -> None:
    codec, table = UniformRows(scheme, bits), table_of(40, dim, seed, element)
    if codec.is_worthwhile(dim, element):
        check(codec, table, element, seed)
    else:
        assert not can_encode(codec, table, False)


@pytest.mark.slow
@given(dim=st.sampled_from([3, 9, 17]), bits=st.sampled_from([2, 3, 4, 8]), element=ELEMENTS, seed=SEEDS)
@settings(deadline=None, max_examples=12)
def test_rows_that_are_searched(dim: int, bits: int, element: str, seed: int) -> None:
    codec, table = UniformRows("adaptive", bits), table_of(150, dim, seed, element)
    assert can_encode(codec, table, False) == codec.is_worthwhile(dim, element)
    if codec.is_worthwhile(dim, element):
        check(codec, table, element, seed)


@pytest.mark.slow
@given(dim=st.sampled_from([1, 3, 17, 70]), element=ELEMENTS, scale=st.floats(-20, 20), seed=SEEDS)
@settings(deadline=None, max_examples=20)
def test_rows_on_a_lattice(dim: int, element: str, scale: float, seed: int) -> None:
    check(LatticeRows(step=lattice_step(2.0**scale)), table_of(40, dim, seed, element), element, seed)


@pytest.mark.slow
@given(dim=st.sampled_from([1, 3, 17, 70]), mantissa=st.integers(1, 7), element=ELEMENTS, seed=SEEDS)
@settings(deadline=None, max_examples=30)
def test_rows_on_a_floating_grid(dim: int, mantissa: int, element: str, seed: int) -> None:
    check(FloatingRows(mantissa), table_of(40, dim, seed, element), element, seed)


def edges_of(mantissa: int) -> Rows:
    """Bits of float32 at which a code, or whether there is any, changes: of both signs, and of each exponent."""
    half = 1 << (22 - mantissa)
    codes = np.unique(np.r_[np.arange(256) << mantissa, (np.arange(256) << mantissa) + 1, 0 : 2 << mantissa])
    near = (codes[:, None] * 2 * half + np.r_[-half, 0, half][:, None, None] + np.arange(-2, 3)).reshape(-1)
    bits = near[(near >= 0) & (near < 1 << 31)]
    bits = np.r_[bits, bits | 1 << 31, 1, 0x007FFFFF, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    return np.unique(bits).astype(np.uint32).view(np.float32)[:, None]


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("mantissa", [1, 3, 7])
def test_numbers_where_codes_change(mantissa: int, element: str) -> None:
    """Ties, the least normal number and those below, the largest with a code, infinities and NaN."""
    if element == "float16":
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, None]
        rows = torch.from_numpy(values).to(DEVICE)
    else:
        rows = torch.from_numpy(edges_of(mantissa)).to(DTYPES[element]).to(DEVICE)
    raw, codes = arithmetic.quantize(FloatingRows(mantissa), rows)
    values = on_host(rows)
    wanted, none = floating_codes(values, Grid(mantissa=mantissa), element)
    np.testing.assert_array_equal(raw.cpu().numpy().view(np.bool_), none)
    np.testing.assert_array_equal(codes.cpu().numpy()[~none], wanted)


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(
    ("codec", "dim"),
    [
        (UniformRows("asymmetric", 8), 1024),
        (UniformRows("symmetric", 3), 1024),
        (UniformRows("adaptive", 4), 2049),  # not searched
        (LatticeRows(step=0.25), 1500),
        (FloatingRows(), 1500),
        (UniformRows("adaptive", 4), 64),
        at_night(UniformRows("adaptive", 3), 1024),
        at_night(UniformRows("adaptive", 7), 2048),
        (UniformRows("adaptive", 7), 1100),  # sums of squares of its codes are not exact
    ],
)
def test_wide_rows(codec: RowCodec, dim: int) -> None:
    check(codec, table_of(20, dim, 1, "float32"), "float32", 1)


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize(
    "codec",
    [
        UniformRows("asymmetric", 4),
        UniformRows("symmetric", 3),
        UniformRows("adaptive", 2),
        LatticeRows(step=0.25),
        FloatingRows(),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_give_the_payloads_of_the_whole(
    codec: RowCodec, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks begin and end within pieces, of which only some need float32 parameters."""
    monkeypatch.setattr(arithmetic, "WORK_BYTES", 7 * (9 * 28 + 256))
    table = table_of(70, 9, seed, "float32")
    table[:30] = torch.randn(30, 9)
    check(codec, table, "float32", seed)


@pytest.mark.parametrize(
    "codec", [UniformRows("asymmetric", 4), LatticeRows(step=0.25), FloatingRows()], ids=str
)
def test_rows_that_are_not_next_to_each_other(codec: RowCodec) -> None:
    """As where ranks share a table by columns, and in a transposed one."""
    check(codec, table_of(40, 24, 5, "float32")[:, 8:17], "float32", 5)
    check(codec, table_of(17, 40, 5, "float32").T, "float32", 6)


def test_exact_codes_are_left_to_the_host() -> None:
    assert can_encode(FloatingRows(7), table_of(4, 3, 0, "float32"), True)
    assert not can_encode(FloatingRows(23), table_of(4, 3, 0, "float32"), True)


@pytest.mark.parametrize("element", sorted(DTYPES))
def test_step_of_a_whole_table_is_the_one_that_the_host_finds(
    element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "COUNTED_ROWS", 30)
    monkeypatch.setattr(steps, "COUNTED_ROWS", 30)
    table = table_of(70, 9, 3, element)[:, 1:7]
    codec = LatticeRows(rms_step=0.25)
    assert can_encode(codec, table, True)
    assert not can_encode(codec, table, False)
    wanted = codec.with_step(codec.step_of(steps.median_scale(steps.scale_counts(on_host(table)))))
    assert encode(codec, table, None).codec == wanted


def relative_rows(
    table: torch.Tensor, element: str, scale: float, mantissa: int | None, random: np.random.Generator
) -> tuple[LatticeRows | FloatingRows, npt.NDArray[Any]]:
    """A codec, and codes that rows had before; on a floating grid some that are near those of now."""
    shape = table.shape
    if mantissa is None:
        codec = LatticeRows(step=lattice_step(2.0**scale), relative=True)
        return codec, random.integers(-9, 9, shape, np.int8)
    values = on_host(table)
    held, raw = floating_codes(values, Grid(mantissa=mantissa), element)
    parent = np.full(shape, 127 << mantissa, np.int16)
    parent[~raw] = held
    is_near = random.random(len(parent)) < 0.7
    parent += np.where(is_near[:, None], random.integers(-2, 3, shape), random.integers(-99, 99, shape))
    return FloatingRows(mantissa, relative=True), parent


@pytest.mark.slow
@given(
    dim=st.sampled_from([1, 3, 17, 70]),
    element=ELEMENTS,
    scale=st.floats(-20, 20),
    mantissa=st.sampled_from([None, 1, 3, 7]),
    is_first=st.booleans(),
    seed=SEEDS,
)
@settings(deadline=None, max_examples=30)
def test_relative_rows_have_the_payloads_of_the_host(
    dim: int, element: str, scale: float, mantissa: int | None, is_first: bool, seed: int
) -> None:
    """Of known parents, unknown ones and none; and what is noted of their codes is the same."""
    random = np.random.default_rng(seed)
    table = table_of(40, dim, seed, element)
    codec, parent = relative_rows(table, element, scale, mantissa, random)
    written = np.flatnonzero(random.random(40) < 0.7)
    parent[random.random(40) < 0.3, 0] = np.iinfo(parent.dtype).min
    known = (None, None) if is_first else (parent, written)
    ours, theirs = (RowCodes(np.zeros((len(written), dim), parent.dtype), *known) for _ in range(2))
    rows = on_host(table)[written]
    encoded = encode(codec, table, torch.from_numpy(written).to(DEVICE))
    edges = np.unique(np.searchsorted(written, [0, 16, 32, 40])).tolist()
    begin, end = edges[0], edges[-1]
    seals = list(range(len(edges) - 1))
    found = encode_block(
        *(codec, encoded.block(begin, end), written % 16, [each - begin for each in edges], 16),
        element=element,
        seals=seals,
        begin=begin,
        codes=ours,
    )
    wanted = [
        theirs.encode(codec, rows[first:last], first, written[first:last] % 16, 16, element, seal)[0]
        for first, last, seal in zip(edges, edges[1:], seals, strict=False)
    ]
    assert found == wanted
    assert ours.made is not None
    assert theirs.made is not None
    np.testing.assert_array_equal(ours.made, theirs.made)


@pytest.mark.slow
def test_one_row_and_none() -> None:
    codec, table = UniformRows("adaptive", 4), torch.randn(1, 8, device=DEVICE)
    of_one = codec, encode(codec, table, None).block(0, 1), None, [0, 1], 4
    (payload,) = encode_block(*of_one, element="float32", seals=[7])
    assert payload == codec.encode_rows(table.cpu().numpy(), None, 4, element="float32", seal=7)
    none = encode(codec, table, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert encode_block(codec, none.block(0, 0), None, [0], 4, element="float32", seals=[]) == []


@pytest.mark.parametrize(
    ("codec", "table"),
    [
        (row_codec("cnr_rows"), torch.ones(4, 8)),
        (row_codec("cnr_kmeans"), torch.ones(4, 8)),
        (LatticeRows(), torch.ones(4, 8)),  # without a step
        (UniformRows("adaptive", 2, 25, 0.99), torch.ones(4, 8)),  # the paper's walk
        (UniformRows(), torch.ones(4, 8, dtype=torch.float64)),
        (FloatingRows(), torch.ones(4, 8, dtype=torch.float64)),
        (UniformRows(), torch.ones(4)),
        (FloatingRows(), torch.ones(4, 0)),
        (UniformRows("asymmetric", 8), torch.ones(4, 1)),  # smaller as they are
    ],
)
def test_other_rows_are_left_to_the_host(codec: RowCodec, table: torch.Tensor) -> None:
    assert not can_encode(codec, table.to(DEVICE), False)


def test_codes_that_do_not_fit_are_refused() -> None:
    codec = UniformRows("asymmetric", 4)
    made = QuantizedRows.for_codes(np.zeros((2, 4), np.uint8))
    made.kind[:] = 1, 0
    raw: Rows = np.zeros((1, 8), np.float32)
    made.halves[:] = 0
    (payload,) = codec.encode_codes(made, raw, None, [0, 2], 2, element="float32", seals=[0])
    assert [segment.row_set.count for segment in parse(payload).segments] == [1, 1]
    for values in (raw[:0], np.zeros((1, 9), np.float32)):
        with pytest.raises(RowsError, match="quantized rows"):
            codec.encode_codes(made, values, None, [0, 2], 2, element="float32", seals=[0])
