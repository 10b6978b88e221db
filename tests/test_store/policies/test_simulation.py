"""Simulated policies: what they write and keep on generated traces, and that training decides alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import OptionError, SimulatedSave, Trace, simulate
from cnr_store.policies.policy import POLICIES, PolicyName

ROWS = 60
PAPER = Trace.of_growth(1_000_000, [0.25 * i**0.3 for i in range(1, 30)])

intervals = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=ROWS), min_size=1, max_size=25)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=40).map(sorted)
traces = st.one_of(
    intervals.map(lambda ids: Trace.of_rows(ROWS, ids)),
    st.builds(lambda grown, saves: Trace.of_growth(1000, grown, saves), shares, st.integers(1, 60)),
    st.builds(
        lambda *given: Trace.zipf(200, *given),
        st.integers(2, 40),
        st.integers(1, 300),
        st.floats(0.5, 2),
        st.integers(0, 99),
    ),
)
retentions = st.one_of(st.none(), st.integers(1, 12))


def paid(saves: list[SimulatedSave]) -> list[int]:
    return [save.written_bytes + save.kept_bytes for save in saves]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    traces,
    retentions,
    st.sampled_from([0, 0.1, 5]),
    st.integers(0, 3000),
    st.floats(0, 100),
    st.one_of(st.none(), st.integers(2, 9)),
)
def test_auto_never_writes_and_keeps_more_than_intermittent(
    trace: Trace,
    keep_last: int | None,
    restores: float,
    fixed_bytes: int,
    row_bytes: float,
    max_chain: int | None,
) -> None:
    """After every save, for every retention and weight, folds counted."""
    auto, intermittent = (
        simulate(
            trace,
            policy,
            keep_last=keep_last,
            restores_per_save=restores,
            row_bytes=row_bytes,
            fixed_bytes=fixed_bytes,
            max_chain=max_chain,
        )
        for policy in ("auto", "intermittent")
    )
    for ours, theirs in zip(auto, intermittent, strict=True):
        assert ours.written_bytes <= theirs.written_bytes
        assert ours.written_bytes + ours.kept_bytes <= theirs.written_bytes + theirs.kept_bytes
        assert ours.decision.full == theirs.decision.full


@settings(max_examples=100, deadline=None)
@given(traces, st.sampled_from(POLICIES), retentions, st.one_of(st.none(), st.integers(1, 9)))
def test_what_is_kept_is_what_the_kept_versions_read(
    trace: Trace, policy: PolicyName, keep_last: int | None, max_chain: int | None
) -> None:
    saves = simulate(trace, policy, keep_last=keep_last, max_chain=max_chain)
    for save in saves:
        assert save.restore_bytes <= save.kept_bytes <= save.written_bytes
        assert save.written_bytes == sum(one.bytes + one.fold_bytes for one in saves[: save.save + 1])
        # One more than `max_chain` is folded, and the next one depends on that fold alone.
        assert max_chain is None or save.chain <= max_chain + 1
        if max_chain is None or save.chain <= max_chain:
            assert save.fold_bytes == 0
        if keep_last is None:
            assert save.kept_bytes == save.written_bytes
        if keep_last == 1 and not save.fold_bytes:  # the chain beneath a fold goes after the next save
            assert save.kept_bytes == save.restore_bytes
        assert save.chain <= {"full": 1, "one-shot": 2, "intermittent": 2, "auto": 32}.get(
            policy, save.save + 1
        )


@given(intervals, st.data())
def test_changed_rows_are_counted_as_sets(ids: list[list[int]], data: st.DataObject) -> None:
    trace = Trace.of_rows(ROWS, ids)
    assert (trace.rows, trace.saves) == (ROWS, len(ids) + 1)
    save = data.draw(st.integers(1, len(ids)))
    since = data.draw(st.integers(0, save - 1))
    assert trace.changed[save, since] == len(set().union(*ids[since:save]))


def test_the_paper_curve_takes_its_full_versions_every_eighth_interval() -> None:
    for policy in ("intermittent", "auto"):
        full = [save.save for save in simulate(PAPER, policy) if save.decision.full]
        assert full == [0, 8, 16, 24]


def test_auto_writes_less_than_intermittent_on_the_paper_curve() -> None:
    intermittent, auto = (simulate(PAPER, policy)[-1] for policy in ("intermittent", "auto"))
    assert auto.written_bytes < 0.8 * intermittent.written_bytes
    assert auto.restore_bytes < 2 * intermittent.restore_bytes


@pytest.mark.parametrize("keep_last", [1, 2, 4, None])
def test_auto_pays_less_where_few_rows_are_popular(keep_last: int | None) -> None:
    trace = Trace.zipf(50_000, 30, 15_000)
    intermittent, auto = (
        paid(simulate(trace, policy, keep_last=keep_last)) for policy in ("intermittent", "auto")
    )
    assert auto[-1] < 0.8 * intermittent[-1]


def test_more_restores_make_shorter_chains() -> None:
    longest = [
        max(save.chain for save in simulate(PAPER, "auto", restores_per_save=rate))
        for rate in (0, 0.3, 1, 100)
    ]
    assert all(fewer >= more for fewer, more in pairwise(longest))
    assert longest[0] == 8
    assert longest[-1] == 2


def test_rows_of_deltas_may_take_fewer_bytes() -> None:
    trace = Trace.of_growth(1000, [0.1], saves=4)
    options: dict[str, Any] = {"row_bytes": 10, "fixed_bytes": 500, "max_chain": 2}
    saves = simulate(trace, "consecutive", delta_row_bytes=2, **options)
    assert [save.bytes for save in saves] == [10_500, 700, 700, 700]
    assert [save.fold_bytes for save in saves] == [0, 0, 10_000, 0]
    assert simulate(trace, **options) == simulate(trace, delta_row_bytes=10, **options)
    with pytest.raises(OptionError, match="delta_row_bytes=-1"):
        simulate(trace, delta_row_bytes=-1)


def test_folds_of_consecutive_deltas_are_written_and_kept() -> None:
    trace = Trace.of_growth(1000, [0.1], saves=7)
    saves = simulate(trace, "consecutive", row_bytes=10, fixed_bytes=500, max_chain=3)
    assert [save.chain for save in saves] == [1, 2, 3, 4, 2, 3, 4]
    assert [save.fold_bytes for save in saves] == [0, 0, 0, 10_000, 0, 0, 10_000]
    assert saves[-1].written_bytes == 10_500 + 6 * 1500 + 2 * 10_000
    assert [save.restore_bytes for save in saves[2:5]] == [13_500, 11_500, 13_000]
    kept = simulate(trace, "consecutive", row_bytes=10, fixed_bytes=500, max_chain=3, keep_last=1)
    assert [save.kept_bytes for save in kept[2:5]] == [13_500, 25_000, 13_000]
    unfolded = simulate(trace, "consecutive", row_bytes=10, fixed_bytes=500, max_chain=None)
    assert [save.fold_bytes for save in unfolded] == [0] * 7


def test_consecutive_keeps_what_the_paper_says() -> None:
    """About four times the model after 11 intervals (docs/design-notes/paper.md), with a quarter in each."""
    saves = simulate(Trace.of_growth(10_000, [0.26] * 11), "consecutive")
    assert saves[-1].kept_bytes / saves[0].bytes == pytest.approx(3.86)


@pytest.mark.parametrize(
    ("rows", "changed"),
    [
        (0, [[0]]),
        (10, [[0, 0]]),
        (10, [[1]]),
        (10, [[0, 0], [11, 0]]),
        (10, [[0, 0], [-1, 0]]),
        (10, [[0, 0, 0], [2, 0, 0], [2, 3, 0]]),
        (10, [[0, 0, 0], [3, 0, 0], [2, 1, 0]]),
    ],
)
def test_impossible_traces(rows: int, changed: list[list[int]]) -> None:
    with pytest.raises(OptionError, match="a trace"):
        Trace(rows, np.array(changed))


def test_wrong_options_are_refused() -> None:
    for wrong, message in (
        ({"policy": "daily"}, "policy 'daily'"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"restores_per_save": -1}, "restores_per_save"),
        ({"row_bytes": -1}, "row_bytes"),
        ({"fixed_bytes": -1}, "fixed_bytes"),
        ({"max_chain": 0}, "max_chain=0"),
    ):
        with pytest.raises(OptionError, match=message):
            simulate(PAPER, **wrong)
    with pytest.raises(OptionError, match="interval 2: its ids"):
        Trace.of_rows(10, [[1], [10]])
    with pytest.raises(OptionError, match="needs a share"):
        Trace.of_growth(10, [], saves=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trace.zipf(100, 3, -5), "accesses=-5: give an integer of at least 0"),
        (lambda: Trace.zipf(0, 3, 5), "rows=0: give an integer of at least 1"),
        (lambda: Trace.zipf(100, -1, 5), "saves=-1"),
        (lambda: Trace.zipf(100, 3, 5, seed=-1), "seed=-1"),
        (lambda: Trace.zipf(100, 3, 5, exponent=float("nan")), "exponent=nan; give a number of at least 0"),
        (lambda: Trace.of_rows(-5, []), "rows=-5"),
        (lambda: Trace.of_rows(5, [["a"]]), "interval 1: its ids are <U1; give integers"),
        (lambda: Trace.of_rows(5, [[1], [1.7]]), "interval 2: its ids are float64; give integers"),
        (lambda: Trace.of_rows(5, [[2**70]]), "interval 1: its ids are object"),
        (lambda: Trace.of_rows(5, [[2**63]]), "interval 1: its ids reach from 9223372036854775808"),
        (lambda: Trace.of_rows(5, [[[1], [1, 2]]]), "interval 1: its ids are no array"),
        (lambda: Trace.of_rows(5, [np.ones(5, bool)]), "interval 1: its ids are bool"),
        (lambda: Trace.of_growth(5, [float("nan")]), "a share of the rows=nan; give a number .* at most 1"),
        (lambda: Trace.of_growth(5, [0.1], saves=-1), "saves=-1"),
        (lambda: Trace.of_growth(2**70, [0.1]), r"rows=1180591620717411303424: give .* at most 2\*\*62"),
        (lambda: Trace(5, np.array([[0.0]])), "counts as a numpy array of integers"),
    ],
)
def test_numbers_of_no_trace(make: Callable[[], Trace], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    "wrong",
    [
        {"row_bytes": 1e308},
        {"row_bytes": float("nan")},
        {"row_bytes": 10**5000},
        {"row_bytes": "68"},
        {"fixed_bytes": 1.5},
        {"fixed_bytes": float("nan")},
        {"fixed_bytes": True},
        {"restores_per_save": 10**400},
    ],
)
def test_sizes_and_rates_that_are_none(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=f"{name}=.*[;:] give"):
        simulate(Trace.of_rows(5, [[1], [2]]), **wrong)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_largest_numbers_are_counted_with(policy: PolicyName) -> None:
    most: Any = np.int64(2**62)
    trace = Trace.of_growth(most, [0.3, 0.4, 0.5], 6)
    ran = simulate(trace, policy, row_bytes=2.0**62, fixed_bytes=most, restores_per_save=np.float64(1e308))
    assert ran[0].bytes == 2**124 + 2**62
    assert len(ran) == 6
