"""The search for a row's scale and offset: kernel against reference, its errors against the paper's walk."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import ParameterType, RowCodec, UniformRows
from cnr_codecs.elements import element_named
from cnr_codecs.kernels import search as kernels
from cnr_codecs.kernels.building.compiled import kernel
from cnr_codecs.kernels.search import MAX_DIM, NORMAL_STEPS
from cnr_codecs.protocol import Rows
from cnr_codecs.uniform.uniform import SchemeName, default_walk
from tests.test_codecs.hard_rows import BITS, ROW_MAKERS, SCHEMES, adversarial_rows, decode, encode, quantized
from tests.test_codecs.references import uniform as reference

ShapedMaker: TypeAlias = Callable[[np.random.Generator, tuple[int, int]], Rows]
DISTRIBUTIONS: dict[str, ShapedMaker] = {
    "normal": lambda rng, shape: rng.normal(0, 0.1, shape),
    "laplace": lambda rng, shape: rng.laplace(0, 0.1, shape),
    "uniform": lambda rng, shape: rng.uniform(-0.1, 0.1, shape),
    "student t": lambda rng, shape: 0.05 * rng.standard_t(3, shape),
    "lognormal": lambda rng, shape: 0.05 * rng.lognormal(0, 1, shape),
    "low rank": lambda rng, shape: rng.normal(size=(shape[0], 8)) @ rng.normal(0, 0.1, (8, shape[1])),
}


@kernel
def search(values: Any, low: Any, factor: Any, levels: int, normal_step: Any, work: Any) -> None:
    count, dim = values.shape
    kernels.put_columns(values.reshape(-1), 0, count, dim, work)
    kernels.search_columns(dim, low, factor, levels, normal_step, work)


def in_element(values: Rows, element: str) -> Rows:
    """Rows of an element type, as arrays hold them."""
    with np.errstate(over="ignore"):
        if element == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        return values.astype(np.float16 if element == "float16" else np.float32)


@pytest.mark.slow
@given(
    values=adversarial_rows(),
    scheme=SCHEMES,
    bits=BITS,
    walk=st.none() | st.tuples(st.integers(2, 50), st.floats(0, 1)),
    element=st.sampled_from(["float32", "float16", "bfloat16"]),
)
@settings(deadline=None, max_examples=400)
def test_parameters_equal_the_reference(
    values: Rows, scheme: SchemeName, bits: int, walk: tuple[int, float] | None, element: str
) -> None:
    walk = walk if scheme == "adaptive" else None
    values = in_element(values, element)
    payload = encode(UniformRows(scheme, bits, *(walk or ())), values, element)
    expected = reference.parameters(values.astype(np.float32), scheme, bits, element_named(element), walk)
    seen = np.zeros(len(values), bool)
    for rows, scale, offset, segment in quantized(payload):
        np.testing.assert_array_equal(scale.view(np.uint32), expected.scale[rows].view(np.uint32))
        np.testing.assert_array_equal(offset + 0.0, expected.offset[rows] + 0.0)
        assert (expected.float16[rows] == (segment.parameter_type is ParameterType.FLOAT16)).all()
        seen[rows] = True
    assert not (seen & expected.raw).any()


@pytest.mark.slow
@given(
    count=st.integers(1, kernels.LANES),
    dim=st.integers(1, 40),
    bits=st.integers(1, 7),
    kind=st.sampled_from(sorted(set(ROW_MAKERS) - {"any bits"})),
    seed=st.integers(0, 1 << 32),
)
@settings(deadline=None, max_examples=200)
def test_lines_equal_the_reference(count: int, dim: int, bits: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        values = np.stack([np.asarray(ROW_MAKERS[kind](rng, dim)).astype(np.float32) for _ in range(count)])
        low = values.min(axis=1)
        factor = np.nan_to_num(np.float32((1 << bits) - 1) / (values.max(axis=1) - low), nan=0, posinf=0)
    lanes = np.zeros((2, kernels.LANES), np.float32)
    lanes[:, :count] = low, factor
    work = np.empty(kernels.work_size(dim), np.float32)
    values.flags.writeable = False
    search(values, lanes[0], lanes[1], (1 << bits) - 1, NORMAL_STEPS[bits], work)
    expected = reference.search(values, low, factor, (1 << bits) - 1, NORMAL_STEPS[bits])
    for at, line in zip((kernels.EXPLAINED, kernels.CENTRE, kernels.BEST_STEP), expected, strict=True):
        np.testing.assert_array_equal(work[at : at + count].view(np.uint32), line.view(np.uint32))


def mean_l2(values: Rows, codec: RowCodec, element: str = "float32") -> float:
    decoded = decode(encode(codec, values, element)).astype(np.float64)
    return float(np.linalg.norm(values.astype(np.float64) - decoded, axis=1).mean())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize(
    ("dim", "rows"), [(3, 1000), (8, 1000), (16, 500), (64, 200), (200, 100), (1024, 100)]
)
def test_errors_are_no_larger_than_those_of_the_walk(
    distribution: str, bits: int, dim: int, rows: int
) -> None:
    rng = np.random.default_rng(dim)
    values = DISTRIBUTIONS[distribution](rng, (rows, dim)).astype(np.float32)
    searched = mean_l2(values, UniformRows("adaptive", bits))
    assert searched <= mean_l2(values, UniformRows("adaptive", bits, *default_walk(bits)))
    assert searched <= mean_l2(values, UniformRows("asymmetric", bits))


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4])
def test_errors_of_sixteen_bit_floats_are_no_larger_than_those_of_the_walk(element: str, bits: int) -> None:
    values = in_element(np.random.default_rng(3).normal(0, 0.1, (500, 32)), element)
    walked = UniformRows("adaptive", bits, *default_walk(bits))
    assert mean_l2(values, UniformRows("adaptive", bits), element) <= mean_l2(values, walked, element)


HARD: dict[str, ShapedMaker] = {
    "one outlier": lambda rng, shape: np.where(
        np.arange(shape[1]) == shape[1] - 1, 100, rng.normal(0, 1, shape)
    ),
    "exponential": lambda rng, shape: rng.exponential(1, shape),
    "mostly zero": lambda rng, shape: np.where(rng.random(shape) < 2e-3, rng.random(shape), 0),
    "large offset": lambda rng, shape: 1 + rng.uniform(0, 0.07, shape),
}


def l2(values: Rows, codec: RowCodec) -> npt.NDArray[np.float64]:
    decoded = decode(encode(codec, values)).astype(np.float64)
    errors: npt.NDArray[np.float64] = np.linalg.norm(values - decoded, axis=1)
    return errors


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("dim", [16, 512, MAX_DIM, 8192])
def test_no_row_fares_worse_than_by_its_whole_range(kind: str, bits: int, dim: int) -> None:
    values = HARD[kind](np.random.default_rng(4), (max(20, 2000 // dim), dim)).astype(np.float32)
    searched, whole = l2(values, UniformRows("adaptive", bits)), l2(values, UniformRows("asymmetric", bits))
    # The search sums errors in float32.
    assert (searched <= whole * 1.001 + 1e-12).all()


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("bits", [2, 7])
def test_parameters_of_long_rows_equal_the_reference(kind: str, bits: int) -> None:
    values = HARD[kind](np.random.default_rng(5), (3, 700)).astype(np.float32)
    expected = reference.parameters(values, "adaptive", bits, element_named("float32"))
    for rows, scale, offset, _ in quantized(encode(UniformRows("adaptive", bits), values)):
        np.testing.assert_array_equal(scale, expected.scale[rows])
        np.testing.assert_array_equal(offset, expected.offset[rows])


@pytest.mark.parametrize("walk", [None, (25, 0.5)])
def test_wide_rows_are_not_searched(walk: tuple[int, float] | None) -> None:
    values = np.random.default_rng(6).normal(0, 1, (2, MAX_DIM + 1)).astype(np.float32)
    whole, searched = UniformRows("asymmetric", 2), UniformRows("adaptive", 2, *(walk or ()))
    encoded = [codec.encode_rows(values, None, 2, element="float32") for codec in (whole, searched)]
    assert encoded[0] == encoded[1]
    expected = reference.parameters(values, "adaptive", 2, element_named("float32"), walk)
    ((_, scale, offset, _),) = quantized(encode(searched, values))
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(offset, expected.offset)
    narrower = values[:, :MAX_DIM]
    encoded = [codec.encode_rows(narrower, None, 2, element="float32") for codec in (whole, searched)]
    assert encoded[0] != encoded[1]
