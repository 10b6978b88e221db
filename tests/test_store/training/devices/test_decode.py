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
    LatticeRows,
    Scheme,
    Segment,
    UniformRows,
    array_dtype,
    decode_into,
    parse,
    take_rows,
)
from cnr_codecs.lattice.steps import values_of
from cnr_codecs.payload.coded import MAX_CODE, code_range, floating_values
from cnr_codecs.payload.payload import ParameterType
from cnr_codecs.payload.rowset import RowSet
from cnr_codecs.uniform.uniform import SchemeName
from cnr_store.training.devices.decode import can_decode, decode
from tests.test_codecs.hard_rows import rows_of
from tests.test_store.training.devices.device import DEVICE, kernels
from tests.test_store.training.devices.test_encode import DTYPES, ELEMENTS, SEEDS, table_of


@given(
    dim=st.sampled_from([2, 3, 17, 70]),
    scheme=st.sampled_from(["symmetric", "asymmetric", "adaptive"]),
    bits=st.integers(1, 8),
    element=ELEMENTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=60)
def test_decoded_rows(dim: int, scheme: SchemeName, bits: int, element: str, seed: int) -> None:
    kernels()
    rows, rng = 40, np.random.default_rng(seed)
    values = table_of(rows, dim, seed, element).float().cpu().numpy().astype(array_dtype(element))
    payload = parse(UniformRows(scheme, bits).encode_rows(values, None, rows, element=element))
    wanted = np.zeros((rows, dim), array_dtype(element))
    need = np.ones(rows, np.uint8)
    decode_into(payload, wanted, need)

    wide = torch.full((2 * rows, dim + 3), 5, dtype=DTYPES[element], device=DEVICE)
    target = wide[:, 2 : 2 + dim]
    to = rng.permutation(2 * rows)[:rows]
    to[rng.random(rows) < 0.2] = -1
    for segment in payload.segments:
        if segment.scheme is not Scheme.RAW:
            assert can_decode(segment, target)
            chosen = rows_of(segment)
            decode(segment, to[chosen], target)
            kept = chosen[to[chosen] >= 0]
            found = target[torch.from_numpy(to[kept]).to(DEVICE)].float().cpu().numpy()
            np.testing.assert_array_equal(
                found.view(np.uint32), wanted[kept].astype(np.float32).view(np.uint32)
            )
            to[chosen] = -1
        else:
            assert not can_decode(segment, target)
            to[rows_of(segment)] = -1
    assert (wide[:, :2] == 5).all()
    assert (wide[:, 2 + dim :] == 5).all()


@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("mantissa", range(1, 8))
def test_each_code_of_a_floating_grid(mantissa: int, element: str) -> None:
    kernels()
    least, most = code_range(mantissa)  # those beyond float16, too
    sizes = np.arange(least, most + 1)
    codes = np.concatenate([-sizes[::-1], [0], sizes]).astype(np.int16)
    wanted = floating_values(codes, mantissa, element)
    np.testing.assert_array_equal(_bits(_decoded(codes, mantissa, 0.0, element)), _bits(wanted))


@pytest.mark.some_by_day(6)
@pytest.mark.parametrize("element", sorted(DTYPES))
@pytest.mark.parametrize("step", [2.0**-100, 2.0**-38, 3 * 2.0**-24, 0.115234375, 1.0, 255.0, 2.0**100])
def test_each_code_of_a_lattice(step: float, element: str) -> None:
    kernels()
    codes = np.arange(-MAX_CODE, MAX_CODE + 1).astype(np.int16)
    with np.errstate(all="ignore"):
        wanted = values_of(codes.astype(np.int32), step, element)
    np.testing.assert_array_equal(_bits(_decoded(codes, 0, step, element)), _bits(wanted))


def _decoded(codes: npt.NDArray[np.int16], bits: int, step: float, element: str) -> npt.NDArray[Any]:
    """Decode codes as rows of 3, some of them not wanted, into rows of a wider table."""
    held = np.resize(codes, (-(-len(codes) // 3), 3))
    parameters = np.full((1, 1), step, np.float32)
    row_set = RowSet.first(len(held), len(held))
    packed = np.ascontiguousarray(held).view(np.uint8)
    segment = Segment(Scheme.LATTICE, bits, ParameterType.FLOAT32, row_set, parameters, packed)
    wide = torch.full((len(held) + 2, 5), 5, dtype=DTYPES[element], device=DEVICE)
    target, places = wide[:, 1:4], np.arange(len(held))[::-1] + 2
    is_left_out = np.arange(len(held)) % 5 == 4
    assert can_decode(segment, target)
    decode(segment, np.where(is_left_out, -1, places), target)
    assert (wide[:, [0, 4]] == 5).all()
    assert (wide[places[is_left_out]] == 5).all()
    decode(segment, np.where(is_left_out, places, -1), target)
    found = target[2:].flip(0).cpu()
    return (found.float() if element == "bfloat16" else found).numpy().reshape(-1)[: len(codes)]


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def test_coded_integers_are_left_to_the_host() -> None:
    kernels()
    values = np.eye(4, 8, dtype="f4")
    payload = parse(LatticeRows(step=0.5).encode_rows(values, None, 4, element="float32"))
    target = torch.zeros(4, 8, device=DEVICE)
    assert not can_decode(payload.segments[0], target)
    (segment,) = take_rows(payload, np.ones(4, np.uint8))
    decode(segment, np.arange(4), target)
    np.testing.assert_array_equal(target.cpu().numpy(), values)


def test_codes_that_do_not_fit_are_refused() -> None:
    kernels()
    payload = parse(
        UniformRows("asymmetric", 4).encode_rows(np.eye(4, 8, dtype="f4"), None, 4, element="float32")
    )
    (segment,) = payload.segments
    for places, shape in (([0, 1, 2, 4], (4, 8)), ([0, 1, 2], (4, 8)), ([0, 1, 2, 3], (4, 9))):
        with pytest.raises(ValueError, match="can't be written"):
            decode(segment, np.array(places), torch.zeros(shape, device=DEVICE))
    assert not can_decode(segment, torch.zeros(8, 4, device=DEVICE).t())
    assert not can_decode(segment, torch.zeros(4, 8, dtype=torch.float64, device=DEVICE))
