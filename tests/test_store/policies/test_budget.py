"""The rule of a budget: how coarse the next version is, and when it has to be whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_codecs import CodecError, LatticeRows
from cnr_store import OptionError
from cnr_store.policies.budget import MIN_STEP, check_budget, next_step, restore_cost

LEFT = st.floats(0, 100)


def test_the_first_step_spends_a_tenth() -> None:
    step, why = next_step(0.01, ())
    assert step == pytest.approx(0.005**0.5)
    assert not why
    assert restore_cost(0.1) == pytest.approx(0.002)


@given(LEFT)
def test_a_whole_version_spends_a_tenth_of_what_is_left_or_less(left: float) -> None:
    step, why = next_step(left, ())
    assert not why
    assert 0 <= step <= 0.2
    if step == 0:
        assert left < 1.001 * 10 * restore_cost(MIN_STEP)
    elif step < 0.2:
        assert restore_cost(step) == pytest.approx(left / 10)


@given(LEFT, st.floats(MIN_STEP, 16))
def test_a_step_stays_while_a_restore_spends_up_to_a_fifth(left: float, stored: float) -> None:
    step, why = next_step(left, {stored})
    assert (
        (step == stored and not why) if restore_cost(stored) <= 0.2 * left else (step < stored and bool(why))
    )


@given(st.floats(0.0001, 100), st.integers(0, 30))
def test_restores_never_spend_it_all(budget: float, saves_between_wholes: int) -> None:
    spent, stored = 0.0, set[float | None]()
    for restore in range(200):
        step, why = next_step(budget - spent, stored)
        if not saves_between_wholes or restore % saves_between_wholes == 0:
            step, why = next_step(budget - spent, ())
        if why:
            assert step < max(each or 0 for each in stored)
        stored = {step or None}
        assert restore_cost(step) <= 0.2 * (budget - spent) + 1e-12
        spent += restore_cost(step)
        assert spent < budget


@pytest.mark.parametrize(
    ("left", "stored", "whole"),
    [
        (0.01, {None}, True),  # from uniform codes or none to a lattice
        (0.01, {0.1, None}, True),
        (0.01, {0.1, 0.05}, True),
        (0.0, {None}, False),  # lossless rows over others, which were restored as they are
        (0.0, {0.1}, True),
        (-1.0, {0.1}, True),  # a smaller budget than what was spent
        (-1.0, {0.1, None}, True),
    ],
)
def test_other_steps_beneath_make_a_version_whole(
    left: float, stored: set[float | None], whole: bool
) -> None:
    step, why = next_step(left, stored)
    assert bool(why) is whole
    assert step == (pytest.approx(0.005**0.5) if left > 0 else 0)


@pytest.mark.parametrize("wrong", [-0.01, float("nan"), float("inf"), 100.5, "0.01", True, [0.01]])
def test_what_is_no_budget(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"budget=.*give a number of at least 0 and at most 100"):
        check_budget(wrong)


def test_the_finest_step_is_the_lattices() -> None:
    LatticeRows(MIN_STEP)
    with pytest.raises(CodecError):
        LatticeRows(0.999 * MIN_STEP)
