"""Helpers merged into kernels: what Python computes stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cnr_codecs import cache_folders
from cnr_codecs.kernels.building.merging import merged

SCALE = 3


class Helper:
    """As a compiled helper is: called, or merged by the function it was made of."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self.py_func = py_func
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.py_func(*arguments)


@Helper
def scaled(value: int) -> int:
    """Changes its parameter, which is its own."""
    value = value * SCALE
    return value + 1


@Helper
def fill(out: list[int], count: int) -> None:
    for k in range(count):
        out[k] = scaled(k)


@Helper
def clipped(value: int) -> int:
    if value > 5:
        return 5
    return value


def two_calls(value: int) -> Any:
    k = 7
    total = scaled(value) + scaled(value + k)
    total += scaled(k) if value else 0
    return total - value


def nested(count: int) -> list[int]:
    k, out = 100, [0] * count
    fill(out, count)
    if count > 2:
        fill(out, 1)
    return [*out, k]


def with_early_return(value: int) -> Any:
    return clipped(scaled(value))


def behind_tests(value: int) -> Any:
    """Calls that Python may not make, or makes more than once."""
    found = value > 1 and element(value - 2)
    found += 0 if value < 1 else element(value - 1)
    chained = 1 < value < element(value - 2)
    while element(value) < 9:
        value += 1
    return found, chained, value


@Helper
def element(place: int) -> int:
    """Fails outside of what it reads, as a kernel would."""
    reached.append(place)
    assert place >= 0
    return place * 3


reached: list[int] = []


def is_helper(value: object) -> bool:
    return isinstance(value, Helper)


@pytest.mark.parametrize(
    ("function", "arguments", "calls"),
    [(two_calls, range(4), 3), (nested, range(5), 0), (with_early_return, range(4), 4)],
)
def test_a_merged_function_computes_the_same(
    function: Callable[[int], Any], arguments: range, calls: int
) -> None:
    expected = [function(each) for each in arguments]
    for each in (scaled, fill, clipped):
        each.calls = 0
    made = merged(function, is_helper)
    assert [made(each) for each in arguments] == expected
    assert sum(each.calls for each in (scaled, fill, clipped)) == calls
    assert (made.__name__, made.__module__) == (function.__name__, function.__module__)


@pytest.mark.parametrize("value", range(5))
def test_a_helper_is_called_where_python_calls_it(value: int) -> None:
    reached.clear()
    expected = behind_tests(value), [*reached]
    reached.clear()
    assert (merged(behind_tests, is_helper)(value), [*reached]) == expected


def test_without_sources_calls_stay_calls() -> None:
    space: dict[str, Any] = {"scaled": scaled}
    exec("def unknown(value):\n    return scaled(value)", space)
    assert merged(space["unknown"], is_helper) is space["unknown"]


def test_folders_of_compiled_kernels_are_known() -> None:
    assert cache_folders()
