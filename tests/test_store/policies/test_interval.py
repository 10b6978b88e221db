"""How often to save."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store.errors import OptionError
from cnr_store.policies.simulation import best_interval


def _time_of_a_step(seconds: float, failure: float, stall: float) -> float:
    """Expected time for each second of training, with failures at random times, up to a common factor."""
    return math.expm1(seconds / failure) / (seconds - stall)


@pytest.mark.slow
@given(failure=st.floats(60, 1e7), share=st.floats(1e-7, 0.3), factor=st.sampled_from([0.7, 0.85, 1.2, 1.5]))
def test_no_other_interval_is_better(failure: float, share: float, factor: float) -> None:
    stall = failure * share
    best = best_interval(failure, stall).seconds
    other = max(best * factor, 1.0001 * stall)
    assert _time_of_a_step(best, failure, stall) <= 1.001 * _time_of_a_step(other, failure, stall)


def test_no_save_begins_before_the_last_is_written() -> None:
    assert best_interval(3600, 0.001, write_seconds=60).seconds == 60
    assert best_interval(3600, 30, write_seconds=60).seconds > 400


def test_what_is_lost_adds_up() -> None:
    found = best_interval(8 * 3600, 0.05, restore_seconds=120, write_seconds=10)
    assert found.seconds == pytest.approx(math.sqrt(2 * 0.05 * 8 * 3600), rel=0.01)
    assert found.lost == pytest.approx(0.05 / 53.7 + (53.7 / 2 + 10 + 120) / 28800, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1), "failure"), ((9, -1), "stall"), ((math.nan, 1), "failure")],
)
def test_numbers_out_of_range_are_refused(arguments: tuple[float, float], name: str) -> None:
    with pytest.raises(OptionError, match=name):
        best_interval(*arguments)
