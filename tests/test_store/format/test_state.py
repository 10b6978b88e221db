"""State as tagged JSON: exact round trips, and an error with a path for all else."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import FormatError, StateError
from cnr_store.format.state import MAX_DEPTH, decode_state, dumps, encode_state, loads
from cnr_store.format.state_arrays import ArrayLeaf

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
        st.builds(deque, st.lists(inner, max_size=4), st.sampled_from([None, 0, 2, 4])),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "$tuple", "$x", ""]), inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(Counter),
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
    if isinstance(left, list | tuple | deque):
        lengths = (len(left), getattr(left, "maxlen", 0)), (len(right), getattr(right, "maxlen", 0))
        return lengths[0] == lengths[1] and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, np.generic):
        return bool(left.tobytes() == right.tobytes())
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


@pytest.mark.slow
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
    assert all(values.dtype.str[0] in "<|" for values in beside.values())


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
        ([np.ma.masked_array([1.0], [True])], r"state\[0\]: a numpy.ma.MaskedArray"),
        ({"a": np.arange(2000.0).view(np.recarray)}, r"state\['a'\]: a numpy.rec.recarray"),
        ({"a": np.zeros(3, np.longdouble)}, r"state\['a'\]: an array of dtype"),
        ({"a": np.longdouble(1)}, r"state\['a'\]: a numpy.longdouble"),
        ({"a": defaultdict(int)}, r"state\['a'\]: a collections.defaultdict"),
        ({"a": [1 << 20_000]}, r"state\['a'\]\[0\]: an integer of 20001 bits"),
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


def no_array(path: str) -> np.ndarray:
    raise KeyError(path)


def nested(levels: int, kind: type) -> object:
    value: object = None
    for _ in range(levels):
        value = {1: value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_the_deepest_state_comes_back_and_a_deeper_one_is_refused_both_ways(kind: type) -> None:
    assert same(round_trip(nested(MAX_DEPTH, kind))[0], nested(MAX_DEPTH, kind))
    with pytest.raises(StateError, match="deeper than 200 levels"):
        round_trip(nested(MAX_DEPTH + 1, kind))
    for levels in (MAX_DEPTH + 1, 2000):
        doc: object = 0
        for _ in range(levels):
            doc = {"$dict": [[1, doc]]} if kind is dict else {"$tuple": [doc]} if kind is tuple else [doc]
        with pytest.raises(FormatError, match="deeper than 200 levels"):
            decode_state(doc, read=no_array)


def test_no_stack_is_too_short_for_an_error() -> None:
    def within(frames: int) -> None:
        if frames:
            within(frames - 1)
            return
        with pytest.raises(StateError, match="stack"):
            encode_state(nested(MAX_DEPTH, tuple), beside=lambda *_: "")
        with pytest.raises(FormatError, match="stack"):
            decode_state(doc, read=no_array)

    doc = json.loads(MAX_DEPTH * '{"$tuple":[' + MAX_DEPTH * "]}")
    within(sys.getrecursionlimit() - len(inspect.stack(0)) - 250)


@pytest.mark.parametrize(
    "text",
    [
        '{"$pickle": "gASV"}',
        '{"$tuple": 3}',
        '{"$tuple": [1], "b": 2}',
        '{"a": 1, "$tuple": []}',
        '{"$float": "1e5"}',
        '{"$float": {}}',
        '{"$ordered": 5}',
        '{"$counter": [[1, 2], [1, 3]]}',
        '{"$dict": [[{"$x": 1}, 1]]}',
        '{"$deque": 5}',
        '{"$deque": [null, {"$tuple": [1]}]}',
        '{"$deque": [1, [1, 2]]}',
        '{"$deque": [-1, []]}',
        '{"$deque": [1.5, []]}',
        '{"$deque": [99999999999999999999, []]}',
        '{"$class": 5}',
        '{"$class": ["torch.dtype"]}',
        '{"$class": [5, 5]}',
        '{"$bytes": 5}',
        '{"$scalar": 1}',
        '{"$scalar": ["<f8", ""]}',
        '{"$scalar": [[], ""]}',
        '{"$array": 5}',
        '{"$array": {}}',
        '{"$array": {"kind": [], "path": "a"}}',
        '{"$array": {"kind": "numpy", "path": []}}',
        '{"$array": {"kind": "numpy", "torch_dtype": "bfloat16", "path": "a"}}',
        '{"$array": {"kind": "torch", "torch_dtype": 5, "path": "a"}}',
        '{"$array": {"kind": "numpy", "dtype": "i4,i4", "shape": [], "data": ""}}',
        '{"$array": {"kind": "numpy", "dtype": "<f16", "shape": [0], "data": ""}}',
        '{"$array": {"kind": "numpy", "dtype": "<f4", "shape": 5, "data": ""}}',
        '{"$array": {"kind": "numpy", "dtype": "<f4", "shape": [-1], "data": "AAAA"}}',
        '{"$array": {"kind": "numpy", "dtype": "<f4", "shape": [1e400, 0], "data": ""}}',
        '{"$array": {"kind": "numpy", "dtype": "<f4", "shape": [1180591620717411303424, 0], "data": ""}}',
        *(
            '{"$array": {"kind": "numpy", "dtype": "<i2", "shape": [2, 2], "data": "AAAAAAAAAAA=", "strides": '
            + strides
            + "}}"
            for strides in (
                "[1, -1]",
                "[1]",
                "[1, 1, 1]",
                "[1, true]",
                "[1.0, 1]",
                "[63, 1]",
                '"11"',
                "5",
                '{"1": 1}',
            )
        ),
        '{"$array": {"kind": "numpy", "dtype": "<i2", "shape": [0, 2], "data": "", "strides": [0, 1]}}',
        '{"$array": {"kind": "numpy", "dtype": "|u1", "shape": [1], "data": "AA==", "strides": [9999999999999999999]}}',
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
        decode_state(loads(text.encode(), "state"), read=no_array)


@pytest.mark.parametrize(
    "text", ["{", "NaN", '"\\udc00"', "9" * 5000, '{"a":1,"a":2}', "[" * 100_000, "\xff", "1 2"]
)
def test_strict_json(text: str) -> None:
    with pytest.raises(FormatError, match="the thing: not sound JSON"):
        loads(text.encode("latin-1"), "the thing")


def test_a_document_larger_than_allowed() -> None:
    with pytest.raises(FormatError, match="the thing: 2097154 bytes, at most 1 MiB"):
        loads(b'"' + b"a" * (2 << 20) + b'"', "the thing", 1 << 20)
