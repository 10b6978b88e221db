"""State as tagged JSON: exact round trips, and an error with a path for all else."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import FormatError, StateError
from cnr_store.format.state import ArrayLeaf, decode_state, dumps, encode_state, loads

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=40),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(255), np.float64("nan")]),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
states = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "$tuple", "$x", ""]), inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and order, NaN and the sign of zero included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b)
            for pair in zip(left.items(), right.items(), strict=True)
            for a, b in zip(*pair, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    return bool(left == right)


def round_trip(value: object) -> tuple[Any, dict[str, np.ndarray]]:
    beside: dict[str, np.ndarray] = {}

    def put(path: str, leaf: ArrayLeaf) -> str:
        beside[f"arrays/{len(beside)}"] = leaf.values
        return f"arrays/{len(beside) - 1}"

    doc = loads(dumps(encode_state(value, beside=put)), "state")
    return decode_state(doc, read=beside.__getitem__), beside


@settings(deadline=None)
@given(states)
def test_round_trip_is_exact(value: object) -> None:
    assert same(round_trip(value)[0], value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64", ">i4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (50, 60)])
def test_arrays_small_and_large(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    restored, beside = round_trip({"a": [array]})
    assert np.array_equal(restored["a"][0], array)
    assert bool(beside) == (array.nbytes > 8192)


class Custom:
    pass


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"reader": {"file": Custom()}}, r"state\['reader'\]\['file'\]: a .*Custom"),
        ([1, {2, 3}], r"state\[1\]: a builtins.set"),
        ((Number(3),), r"state\[0\]: a .*Number"),
        ({"a": np.array(["x"])}, r"state\['a'\]: an array of dtype"),
        ({"a": np.array([object()])}, r"state\['a'\]: an array of dtype"),
        ({"a": np.datetime64("2020-01-01")}, r"state\['a'\]: a numpy.datetime64"),
        ({"a": "\ud800"}, r"state\['a'\]: a string that is not valid Unicode"),
    ],
)
def test_what_cannot_be_exact_is_an_error_with_its_path(value: object, where: str) -> None:
    with pytest.raises(StateError, match=where):
        round_trip(value)


def test_a_state_that_contains_itself() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(StateError, match="contains itself"):
        round_trip(endless)


@pytest.mark.parametrize(
    "text",
    [
        '{"$pickle": "gASV"}',
        '{"$tuple": 3}',
        '{"$tuple": [1], "b": 2}',
        '{"$float": "1e5"}',
        '{"$bytes": "???"}',
        '{"$scalar": ["O", "AAAA"]}',
        '{"$array": {"kind": "numpy", "dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$array": {"kind": "numpy", "dtype": "<f4", "shape": [9], "data": "AAAA"}}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[1], 2]]}',
    ],
)
def test_malformed_tags_are_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"^state: "):
        decode_state(loads(text.encode(), "state"), read={}.__getitem__)


@pytest.mark.parametrize("text", ["{", "NaN", '{"a":1,"a":2}', "[" * 100_000, "\xff", "1 2"])
def test_strict_json(text: str) -> None:
    with pytest.raises(FormatError, match="the thing: not sound JSON"):
        loads(text.encode("latin-1"), "the thing")
