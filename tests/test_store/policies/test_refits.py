"""When an array on a lattice gets a new step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cnr_store.policies.refits import Fit, Sampled

ROWS = 1000
VALUES = 8000


@st.composite
def versions(draw: st.DrawFn) -> tuple[int, Sampled]:
    """The raw rows of a version, and its sample."""
    nonzero = draw(st.integers(0, VALUES))
    large = draw(st.integers(0, nonzero))
    return draw(st.integers(0, ROWS)), Sampled(VALUES, nonzero, large, draw(st.integers(0, nonzero - large)))


@given(versions())
def test_what_is_as_it_was_at_the_whole_asks_for_no_other(at_whole: tuple[int, Sampled]) -> None:
    fit = Fit.of(ROWS, *at_whole, None)
    for _ in range(3):
        fit = Fit.of(ROWS, *at_whole, fit)
        assert not fit.why_whole


@given(st.lists(st.integers(0, ROWS), max_size=60))
def test_raw_rows_ask_for_few_wholes(shares: list[int]) -> None:
    """Each time for twice as many rows as before, whatever comes between."""
    fit, wholes = Fit.of(ROWS, 0, Sampled(), None), 0
    for raw in sorted(shares):
        if fit.why_whole:
            fit, wholes = Fit.of(ROWS, raw, Sampled(), None), wholes + 1
        else:
            fit = Fit.of(ROWS, raw, Sampled(), fit)
    assert wholes <= 7


@given(versions())
def test_the_median_has_left_the_range_where_most_values_did(now: tuple[int, Sampled]) -> None:
    raw, sampled = now
    fit = Fit.of(ROWS, raw, sampled, Fit.of(ROWS, 0, Sampled(VALUES, VALUES, 0, 0), None))
    is_most = 2 * max(sampled.large, sampled.small) > sampled.nonzero > VALUES // 100
    assert bool(fit.why_whole) == is_most
