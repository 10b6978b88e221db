"""Rows that are decoded into a table on a device equal those that the host decodes, bit for bit."""

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
    KMeansRows,
    LatticeRows,
    RowCodec,
    Scheme,
    Segment,
    UniformRows,
    parse,
    take_rows,
)
from cnr_codecs.payload.coded import MAX_CODE, code_range
from cnr_codecs.payload.payload import ParameterType
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.uniform.uniform import SchemeName
from cnr_store.training.devices import arithmetic
from cnr_store.training.devices.encode import can_encode, on_host
from cnr_store.training.devices.staging import DeviceRows
from tests.test_codecs import hard_rows
from tests.test_codecs.references.floating import floating_values
from tests.test_codecs.references.lattice import values_of
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.devices.test_encode import DTYPES, ELEMENTS, SEEDS, table_of


def check(codec: RowCodec, table: torch.Tensor, element: str, seed: int) -> None:
    """Some rows of a chunk are written into a part of a wider table, whose other values stay."""
    (rows, dim), rng = table.shape, np.random.default_rng(seed)
    offsets = np.flatnonzero(rng.random(rows) < 0.7) if seed % 2 else np.arange(rows)
    payload = parse(codec.encode_rows(on_host(table)[offsets], offsets, rows, element=element))
    wanted, need = hard_rows.decode(payload), np.zeros(rows, np.uint8)
    need[offsets] = 1
    wide = torch.full((rows + 5, dim + 3), 5, dtype=table.dtype, device=DEVICE)
    target = wide[:, 2 : 2 + dim]
    assert DeviceRows(target).write(take_rows(payload, need), 3)
    found = on_host(target)
    assert found[3 + offsets].tobytes() == wanted[offsets].tobytes()
    found[3 + offsets] = 5
    assert (found == 5).all()
    assert (wide[:, :2] == 5).all()
    assert (wide[:, 2 + dim :] == 5).all()


@pytest.mark.slow
@given(
    dim=st.sampled_from([1, 2, 3, 17, 70]),
    scheme=st.sampled_from(["symmetric", "asymmetric", "adaptive"]),
    bits=st.integers(1, 8),
    element=ELEMENTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=30)
def test_decoded_rows(dim: int, scheme: SchemeName, bits: int, element: str, seed: int) -> None:
    check(UniformRows(scheme, bits), table_of(40, dim, seed, element), element, seed)


def test_rows_are_decoded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "WORK_BYTES", 7 * (9 * 28 + 256))
    codecs: list[RowCodec] = [
        UniformRows("asymmetric", 4),
        UniformRows("symmetric", 3),
        LatticeRows(step=0.5),
    ]
    for seed, codec in enumerate(codecs):
        check(codec, table_of(60, 9, seed, "bfloat16"), "bfloat16", seed)


def test_rows_on_a_grid_that_has_moved_are_left_to_the_host() -> None:
    table, need = torch.rand((9, 3), device=DEVICE), np.ones(9, np.uint8)
    for codec, is_own in ((FloatingRows(3), True), (FloatingRows(3, scale=1.5), False)):
        payload = parse(codec.encode_rows(on_host(table), None, 9, element="float32"))
        before = table.clone()
        assert can_encode(codec, table, True) == is_own
        assert DeviceRows(table).write(take_rows(payload, need.copy()), 0) == is_own
        assert torch.equal(table, before) != is_own


@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("mantissa", range(1, 8))
def test_each_code_of_a_floating_grid(mantissa: int, element: str) -> None:
    least, most = code_range(mantissa)  # those beyond float16, too
    sizes = np.arange(least, most + 1)
    codes = np.concatenate([-sizes[::-1], [0], sizes]).astype(np.int16)
    wanted = floating_values(codes, mantissa, element)
    np.testing.assert_array_equal(_bits(_decoded(codes, mantissa, 0.0, element)), _bits(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("step", [2.0**-100, 2.0**-38, 3 * 2.0**-24, 0.115234375, 1.0, 255.0, 2.0**100])
def test_each_code_of_a_lattice(step: float, element: str) -> None:
    codes = np.arange(-MAX_CODE, MAX_CODE + 1).astype(np.int16)
    with np.errstate(all="ignore"):
        wanted = values_of(codes.astype(np.int32), step, element)
    np.testing.assert_array_equal(_bits(_decoded(codes, 0, step, element)), _bits(wanted))


def _segment(codes: npt.NDArray[np.int16], bits: int, step: float) -> Segment:
    row_set, parameters = RowSet.first(len(codes), len(codes)), np.array([[step, 1, 0]], np.float32)
    packed = np.ascontiguousarray(codes).view(np.uint8)
    return Segment(Scheme.LATTICE, bits, ParameterType.FLOAT32, row_set, parameters, packed)


def _decoded(codes: npt.NDArray[np.int16], bits: int, step: float, element: str) -> npt.NDArray[Any]:
    """Decode codes as rows of 3."""
    held = np.resize(codes, (-(-len(codes) // 3), 3))
    target = torch.full(held.shape, 5, dtype=DTYPES[element], device=DEVICE)
    assert DeviceRows(target).write([_segment(held, bits, step)], 0)
    return on_host(target).reshape(-1)[: len(codes)]


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


@pytest.mark.slow
def test_segments_that_the_host_has_to_decode() -> None:
    """Coded integers, codebooks, and codes of element types that no device quantizes: then nothing is written."""
    values = np.eye(4, 8, dtype="f4")
    target = torch.full((4, 8), 5.0, device=DEVICE)
    for codec in (LatticeRows(step=0.5), KMeansRows(bits=1)):
        payload = hard_rows.encode(codec, values)
        raw = hard_rows.encode(UniformRows(), values * np.nan).segments
        assert not DeviceRows(target).write([*raw, *payload.segments], 0)
        assert (target == 5).all()
    (exact,) = take_rows(hard_rows.encode(FloatingRows(23), values), np.ones(4, np.uint8))
    assert not DeviceRows(target).write([exact], 0)
    (segment,) = take_rows(hard_rows.encode(LatticeRows(step=0.5), values), np.ones(4, np.uint8))
    assert not DeviceRows(target.double()).write([segment], 0)
    assert DeviceRows(target).write([segment], 0)
    np.testing.assert_array_equal(target.cpu().numpy(), values)


@pytest.mark.parametrize(("first", "shape"), [(1, (4, 8)), (0, (4, 9)), (0, (3, 8))])
def test_codes_that_do_not_fit_are_refused(first: int, shape: tuple[int, int]) -> None:
    (segment,) = hard_rows.encode(UniformRows("asymmetric", 4), np.eye(4, 8, dtype="f4")).segments
    target = torch.zeros(shape, device=DEVICE)
    with pytest.raises(RuntimeError, match="can't be written"):
        DeviceRows(target).write([segment], first)
    assert not target.any()
