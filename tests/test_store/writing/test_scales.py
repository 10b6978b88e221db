"""When an array on a lattice gets a new step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.record import ArrayEntry
from cnr_store.writing.scales import Fit

ROWS, VALUES = 1000, 8000


def entry(raw: int, nonzero: int = 0, large: int = 0, small: int = 0) -> ArrayEntry:
    return ArrayEntry("delta", (ROWS, 8), "float32", raw=raw, nonzero=nonzero, large=large, small=small)


@st.composite
def entries(draw: st.DrawFn) -> ArrayEntry:
    """An array in a version, with its raw rows and its sample."""
    nonzero = draw(st.integers(0, VALUES))
    large = draw(st.integers(0, nonzero))
    return entry(draw(st.integers(0, ROWS)), nonzero, large, draw(st.integers(0, nonzero - large)))


@given(entries())
def test_what_is_as_it_was_at_the_whole_asks_for_no_other(at_whole: ArrayEntry) -> None:
    fit = Fit.of(at_whole, None)
    for _ in range(3):
        fit = Fit.of(at_whole, fit)
        assert not fit.why_whole


@given(st.lists(st.integers(0, ROWS), max_size=60))
def test_raw_rows_ask_for_few_wholes(counts: list[int]) -> None:
    """Each time for twice as many rows as before."""
    fit, wholes = Fit.of(entry(0), None), 0
    for raw in sorted(counts):
        wholes += bool(fit.why_whole)
        fit = Fit.of(entry(raw), None if fit.why_whole else fit)
    assert wholes <= 7


@given(entries())
def test_the_median_has_left_the_range_where_most_values_did(now: ArrayEntry) -> None:
    fit = Fit.of(now, Fit.of(entry(0, VALUES), None))
    is_most = 2 * max(now.large, now.small) > max(now.nonzero, 100)
    assert bool(fit.why_whole) == is_most
