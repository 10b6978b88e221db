"""Policies: pure decisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store import OptionError
from cnr_store.policies.past import WINDOW, Delta, Past, Since, past_after
from cnr_store.policies.policy import POLICIES, Costs, Offer, check_policy, decide, full_is_due
from tests.test_store.policies.unbounded_policy import Epoch, weigh

sizes = st.lists(st.integers(1, 10**12), min_size=1, max_size=30)


def past_of(sizes_bytes: Sequence[int], deltas: Sequence[Delta] = (), since: Since = "baseline") -> Past:
    """The past of a full version and deltas of these sizes. The deltas beyond `deltas` count as ``intermittent``'s."""
    past = Past.of(sizes_bytes[0])
    told = [*deltas, *(Delta(since, nbytes) for nbytes in sizes_bytes[len(deltas) + 1 :])]
    for nbytes, delta in zip(sizes_bytes[1:], told, strict=True):
        past = past.with_delta(nbytes, delta)
    return past


def test_paper_example_takes_a_full_version_at_the_eighth_interval() -> None:
    """With S_i = 0.25 * i**0.3 of the full size, the predictor asks for a full version after seven differentials."""
    written = [10**9]
    while not full_is_due(past_of(written).written):
        written.append(int(0.25 * len(written) ** 0.3 * 10**9))
    assert len(written) == 8


@given(sizes)
def test_predictor_is_the_papers_inequality(written: list[int]) -> None:
    differentials = [size / written[0] for size in written[1:]]
    if not differentials:
        return
    full_cost, delta_cost = 1 + sum(differentials), (len(differentials) + 1) * differentials[-1]
    if abs(full_cost - delta_cost) > 1e-9 * full_cost:
        assert full_is_due(past_of(written).written) == (full_cost <= delta_cost)


@given(st.sampled_from(POLICIES), sizes)
def test_decisions(policy: str, written: list[int]) -> None:
    past = past_of(written)
    decision = decide(check_policy(policy), past)
    assert decision.past == past
    assert (past.written.total_bytes, past.written.deltas) == (sum(written), len(written) - 1)
    assert decision.since == ("previous" if policy == "consecutive" else "baseline")
    expected = {"full": True, "one-shot": False, "consecutive": False}
    assert decision.full is expected.get(policy, full_is_due(past.written))
    assert decide(check_policy(policy), past, full=True).full
    assert decide(check_policy(policy), None).full


def test_auto_without_an_offer_does_what_intermittent_does() -> None:
    for written in ([100, 30], [100, 30, 40, 90]):
        auto, intermittent = decide("auto", past_of(written)), decide("intermittent", past_of(written))
        assert (auto.full, auto.since, auto.reason) == (
            intermittent.full,
            intermittent.since,
            intermittent.reason,
        )


def test_auto_takes_a_full_version_when_intermittent_would_have() -> None:
    """The deltas it wrote are small; those that intermittent would have written are what counts."""
    deltas = [Delta("baseline", 300), Delta("previous", 500), Delta("previous", 900)]
    past = past_of([1000, 300, 250, 260], deltas)
    assert full_is_due(past.intermittent)
    assert not full_is_due(past.written)
    assert decide("auto", past, offer=Offer(950, 200)).full


@pytest.mark.parametrize(
    ("keep_last", "offer", "since"),
    [
        (None, Offer(500, 300), "previous"),
        (None, Offer(500, 500), "baseline"),
        (1, Offer(500, 400), "baseline"),  # 310 more to keep, and only 200 less written and kept
        (1, Offer(900, 100), "previous"),
        (3, Offer(500, 300), "previous"),
    ],
)
def test_auto_chains_where_that_writes_and_keeps_less(
    keep_last: int | None, offer: Offer, since: str
) -> None:
    costs = Costs(keep_last, restores_per_save=0)
    decision = decide("auto", past_of([1000, 310]), offer=offer, costs=costs)
    assert (decision.full, decision.since) == (False, since), decision.reason
    assert (decision.offer, decision.costs) == (offer, costs)


def test_auto_keeps_chains_short_where_restores_are_expected() -> None:
    sinces = {
        rate: decide("auto", past_of([1000, 300, 300]), offer=Offer(450, 290), costs=Costs(None, rate)).since
        for rate in (0, 0.01, 100)
    }
    assert sinces == {0: "previous", 0.01: "previous", 100: "baseline"}


def test_auto_keeps_to_the_longest_chain() -> None:
    past = past_of([1000, 300, 10, 10], [Delta("baseline", 300), *[Delta("previous", 301)] * 2])
    for longest, since in ((4, "baseline"), (5, "previous")):
        costs = Costs(longest_chain=longest)
        assert decide("auto", past, offer=Offer(302, 10), costs=costs).since == since


def test_what_auto_saw_goes_through_the_record() -> None:
    past = past_of([1000, 300])
    decision = decide("auto", past, offer=Offer(450, 290), costs=Costs())
    stored = json.loads(json.dumps(asdict(decision)))
    assert past_after(stored, 295) == past.with_delta(295, Delta("previous", 455))
    assert past_after(stored | {"since": "baseline"}, 451) == past.with_delta(451, Delta("baseline", 451))


@pytest.mark.parametrize(("policy", "since"), [("consecutive", "previous"), ("intermittent", "baseline")])
def test_auto_goes_on_from_another_policy(policy: str, since: Since) -> None:
    decision = decide(check_policy(policy), past_of([1000, 300, 310], since=since))
    found = past_after(asdict(decision), 320)
    assert found == past_of([1000, 300, 310, 320], [Delta(since, size) for size in (300, 310, 320)])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Offer, Since | None]]:
    """What each save may choose from, and what another policy chooses where one is in use."""
    numbers = draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=60))
    others = draw(st.sampled_from([(None,), (None, None, "previous"), (None, "previous", "baseline")]))
    return [(Offer(cheap + more, cheap), draw(st.sampled_from(others))) for cheap, more in numbers]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    histories(),
    st.lists(st.one_of(st.none(), st.integers(1, WINDOW)), min_size=1, max_size=3),
    st.sampled_from([0, 0.125, 4]),
    st.integers(300, 20_000),
)
def test_auto_decides_from_sums_as_from_all_sizes(
    history: list[tuple[Offer, Since | None]], kept: list[int | None], reads: float, full_bytes: int
) -> None:
    """Also where other policies wrote some of the versions, and where fewer or more are kept than before."""
    past, epoch = Past.of(full_bytes), Epoch((full_bytes,), ())
    for save, (offer, other) in enumerate(history):
        costs = Costs(kept[save % len(kept)], reads, longest_chain=6)
        decision = decide("auto", past, offer=offer, costs=costs)
        assert (decision.full, decision.since) == weigh(epoch, offer, costs)
        if decision.full and other is None:
            past, epoch = Past.of(full_bytes), Epoch((full_bytes,), ())
            continue
        since = other or decision.since
        nbytes = offer.previous_bytes if since == "previous" else offer.baseline_bytes
        # Another policy makes no offer, so that nothing is known of what intermittent would have written.
        dear = offer.baseline_bytes if other is None else nbytes
        past, epoch = past.with_delta(nbytes, Delta(since, dear)), epoch.with_delta(since, nbytes, dear)


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(WINDOW + 1, 70), st.sampled_from([0, 0.125, 4]))
def test_auto_with_many_versions_kept(
    history: list[tuple[Offer, Since | None]], keep_last: int, reads: float
) -> None:
    """More are kept than are known one by one: it decides alike on its own versions, else never more boldly."""
    full_bytes, alike, costs = 20_000, True, Costs(keep_last, reads)
    past, epoch = Past.of(full_bytes), Epoch((full_bytes,), ())
    for offer, other in history:
        decision = decide("auto", past, offer=offer, costs=costs)
        full, since = weigh(epoch, offer, costs)
        alike = alike and other is None
        assert decision.full == full
        assert decision.since == since if alike else (since == "previous" or decision.since == "baseline")
        chosen = other or decision.since
        nbytes = offer.previous_bytes if chosen == "previous" else offer.baseline_bytes
        dear = offer.baseline_bytes if other is None else nbytes
        past, epoch = past.with_delta(nbytes, Delta(chosen, dear)), epoch.with_delta(chosen, nbytes, dear)


def test_auto_counts_what_deltas_older_than_its_window_keep() -> None:
    """Where retention keeps them, it goes by the versions beneath them, though no later one needs these."""
    full_bytes, nbytes, offer = 100_000, 100, Offer(100, 20)
    past, epoch = Past.of(full_bytes), Epoch((full_bytes,), ())
    chained: list[Since] = ["previous"] * 20
    others: list[Since] = ["baseline"] * (WINDOW + 1)
    for since in chained + others:
        past, epoch = past.with_delta(nbytes, Delta(since, nbytes)), epoch.with_delta(since, nbytes, nbytes)
    for keep_last, chosen in ((60, "baseline"), (WINDOW // 2, "previous")):
        costs = Costs(keep_last, 0)
        assert weigh(epoch, offer, costs) == (False, chosen)
        assert decide("auto", past, offer=offer, costs=costs).since == chosen


@pytest.mark.parametrize("restores", [0.0, 0.05, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("cheap", range(200, 450, 50))
def test_keeping_more_versions_than_there_are_is_keeping_all(restores: float, cheap: int) -> None:
    """Costs included, which stand in the reason."""
    # Enough was saved before that any chain may be kept, so that the costs decide.
    past, offer = past_of([1000, 100, 100], [Delta("previous", 400)] * 2), Offer(450, cheap)
    kept_all, *others = (
        decide("auto", past, offer=offer, costs=Costs(keep_last, restores)) for keep_last in (None, 3, 4, 99)
    )
    for one in others:
        assert (one.full, one.since, one.reason) == (kept_all.full, kept_all.since, kept_all.reason)
    if not restores:  # what is written is kept, too
        assert kept_all.reason == f"costs {2 * cheap}, since the baseline {2 * 450}"


def test_records_do_not_grow_with_the_deltas() -> None:
    past = past_of([10**9])
    for _ in range(1000):
        decision = decide("auto", past, offer=Offer(10**7, 10**6))
        past = past_after(asdict(decision), 10**6)
    assert len(json.dumps(asdict(decision))) < 1200


def test_a_fold_counts_as_bytes_written_and_kept() -> None:
    """What it cost must be saved before there are chains again, which keep more than intermittent does."""
    past, costs, offer = past_of([1000, 310]), Costs(1), Offer(900, 100)
    assert decide("auto", past, offer=offer, costs=costs).since == "previous"
    for newest in (False, True):
        folded = past.with_fold(990, newest=newest)
        assert folded.folds_bytes == 990
        assert decide("auto", folded, offer=offer, costs=costs).since == "baseline"
        assert decide("auto", folded, offer=offer, costs=Costs(None)).since == "baseline"
        assert past_after(asdict(decide("consecutive", folded)), 100).folds_bytes == 990
    rich = past_of([1000, 310, 100, 100, 100], [Delta("previous", size) for size in (800, 810, 820, 830)])
    assert (
        decide("auto", rich.with_fold(990, newest=True), offer=offer, costs=Costs(None)).since == "previous"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"restores_per_save": -1},
        {"restores_per_save": 10**400},
        {"restores_per_save": "1"},
        {"restores_per_save": float("nan")},
        {"longest_chain": 1},
    ],
)
def test_weights_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Costs(**wrong)


def test_unknown_policy_lists_those_there_are() -> None:
    with pytest.raises(
        OptionError, match=r"'daily' is not one of full, one-shot, consecutive, intermittent, auto"
    ):
        check_policy("daily")


def test_relative_rows_go_on_from_the_previous_version() -> None:
    """A delta since the baseline would hold them absolute, whatever the estimates say."""
    past = past_of([1000, 300])
    for offer in (Offer(450, 290), Offer(450, 449)):
        for costs in (Costs(), Costs(1, 10)):
            decision = decide("auto", past, offer=offer, costs=costs, is_relative=True)
            assert (decision.full, decision.since) == (False, "previous")
    assert decide("auto", past, offer=Offer(300, 300), is_relative=True).since == "baseline"  # the same
    assert (
        decide("auto", past, offer=Offer(450, 290), costs=Costs(None, 0.1, 2), is_relative=True).since
        == "baseline"
    )
    assert decide("auto", past_of([1000, 310, 950]), offer=Offer(950, 200), is_relative=True).full
