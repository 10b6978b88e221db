"""Widths: by table, and by the restores to be expected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import ExpectedRestores, OptionError
from cnr_store.policies.widths import auto_bits, check_bits, choose_bits


@pytest.mark.parametrize("bits", [0, 1, 5, 16, 33, -8, "4", None, 8.0, True, {"user*": 7}])
def test_width_out_of_range(bits: object) -> None:
    with pytest.raises(OptionError, match="use 2, 3, 4, 8, 32"):
        check_bits(bits)  # type: ignore[arg-type]  # that is what is tested


def test_widths_by_pattern_and_size() -> None:
    large, small = 1 << 20, 1 << 10
    assert choose_bits("auto", "user", large) == 8
    assert choose_bits(4, "user", large) == 4
    assert choose_bits(4, "user", small) == 32
    patterns: dict[str, int | str] = {"user*": 2, "item": "auto"}
    assert choose_bits(patterns, "user.hash", small) == 2
    assert choose_bits(patterns, "item", large) == 8
    assert choose_bits(patterns, "other", large) == 8
    assert choose_bits(patterns, "other", small) == 32


def test_what_auto_stands_for_serves_tables_and_patterns() -> None:
    large, small = 1 << 20, 1 << 10
    patterns: dict[str, int | str] = {"user*": "auto", "item": 8}
    widths = [choose_bits(patterns, name, large, 3) for name in ("user", "item", "other")]
    assert widths == [3, 8, 3]
    assert choose_bits("auto", "other", small, 3) == 32
    assert choose_bits(4, "other", large, 3) == 4


@pytest.mark.parametrize(
    ("restores", "bits"),
    [(0, 2), (0.3, 2), (1, 2), (1.001, 3), (3, 3), (3.5, 4), (20, 4), (20.1, 8), (1000, 8)],
)
def test_the_papers_table(restores: float, bits: int) -> None:
    chosen, why = auto_bits(ExpectedRestores(restores, 1, 1), 0)
    assert chosen == bits
    assert f"{restores:.3g} restores are expected" in why


def test_restores_are_expected_by_node_and_hour() -> None:
    expected = ExpectedRestores(failures_per_node_hour=0.001, nodes=16, hours=24 * 7)
    assert expected.restores == pytest.approx(2.688)
    assert auto_bits(expected, 0)[0] == 3


def test_no_expectation_is_too_large() -> None:
    assert auto_bits(ExpectedRestores(1e200, 1e200, 1), 5)[0] == 8


def test_without_anything_to_go_by_it_is_8() -> None:
    assert auto_bits(None, 0) == auto_bits(None, 100) == (8, "no number of restores is expected")


@pytest.mark.parametrize(
    ("restores", "so_far", "bits"),
    [(2.5, 3, 3), (2.5, 4, 8), (0.2, 1, 2), (0.2, 2, 8), (0, 1, 8), (20, 21, 8)],
)
def test_more_restores_than_expected_fall_back(restores: float, so_far: int, bits: int) -> None:
    chosen, why = auto_bits(ExpectedRestores(restores, 1, 1), so_far)
    assert chosen == bits
    assert (f"{so_far} restores are more than the {restores:.3g} expected" == why) == (bits == 8)


@given(st.floats(0, 50), st.integers(0, 60))
def test_a_width_never_stands_fewer_restores_than_there_were(restores: float, so_far: int) -> None:
    chosen, _ = auto_bits(ExpectedRestores(restores, 1, 1), so_far)
    assert max(restores, so_far) <= {2: 1, 3: 3, 4: 20, 8: 1000}[chosen]


def test_expectations_by_name() -> None:
    given = {"failures_per_node_hour": 0.01, "nodes": 2, "hours": 30}
    assert ExpectedRestores.of(given) == ExpectedRestores(0.01, 2, 30)
    assert ExpectedRestores.of(ExpectedRestores(0.01, 2, 30)) == ExpectedRestores(0.01, 2, 30)
    assert ExpectedRestores.of(None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"nodes": 2, "hours": 30},
        {"failures_per_node_hour": -1, "nodes": 2, "hours": 30},
        {"failures_per_node_hour": 1, "nodes": float("inf"), "hours": 30},
        {"failures_per_node_hour": 1, "nodes": 2, "hours": "30"},
        {"failures_per_node_hour": 1, "nodes": 2, "hours": True},
        {"failures_per_node_hour": 10**400, "nodes": 2, "hours": 30},
        {"failures_per_node_hour": 1, "nodes": 2, "hours": 3, "days": 1},
        3,
    ],
)
def test_wrong_expectations(wrong: object) -> None:
    with pytest.raises(OptionError, match="expected restores"):
        ExpectedRestores.of(wrong)  # type: ignore[arg-type]  # that is what is tested


def test_expectations_of_numpy_are_numbers() -> None:
    given = {"failures_per_node_hour": np.float32(0.5), "nodes": np.int64(2), "hours": np.float64(3)}
    expected = ExpectedRestores.of(given)
    assert expected == ExpectedRestores(0.5, 2, 3)
    assert expected is not None
    assert type(expected.restores) is float
    assert ExpectedRestores(1e308, 1e308, 0).restores == 0
