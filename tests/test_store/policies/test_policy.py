"""Policies: pure decisions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import OptionError
from cnr_store.policies.policy import (
    POLICIES,
    Costs,
    Delta,
    Offer,
    check_policy,
    decide,
    deltas_after,
    full_is_due,
)

sizes = st.lists(st.integers(1, 10**12), min_size=1, max_size=30)


def test_paper_example_takes_a_full_version_at_the_eighth_interval() -> None:
    """With S_i = 0.25 * i**0.3 of the full size, the predictor asks for a full version after seven differentials."""
    written = [10**9]
    while not full_is_due(written):
        written.append(int(0.25 * len(written) ** 0.3 * 10**9))
    assert len(written) == 8


@given(sizes)
def test_predictor_is_the_papers_inequality(written: list[int]) -> None:
    differentials = [size / written[0] for size in written[1:]]
    if not differentials:
        return
    full_cost, delta_cost = 1 + sum(differentials), (len(differentials) + 1) * differentials[-1]
    if abs(full_cost - delta_cost) > 1e-9 * full_cost:
        assert full_is_due(written) == (full_cost <= delta_cost)


@given(st.sampled_from(POLICIES), sizes)
def test_decisions(policy: str, written: list[int]) -> None:
    decision = decide(check_policy(policy), written)
    assert decision.sizes_bytes == tuple(written)
    assert decision.since == ("previous" if policy == "consecutive" else "baseline")
    expected = {"full": True, "one-shot": False, "consecutive": False}
    assert decision.full is expected.get(policy, full_is_due(written))
    assert decide(check_policy(policy), written, full=True).full
    assert decide(check_policy(policy), []).full


def test_auto_without_an_offer_does_what_intermittent_does() -> None:
    for written in ([100, 30], [100, 30, 40, 90]):
        auto, intermittent = decide("auto", written), decide("intermittent", written)
        assert (auto.full, auto.since, auto.reason) == (
            intermittent.full,
            intermittent.since,
            intermittent.reason,
        )


def test_auto_takes_a_full_version_when_intermittent_would_have() -> None:
    """The deltas it wrote are small; those that intermittent would have written are what counts."""
    deltas = [Delta("baseline", 300), Delta("previous", 500), Delta("previous", 900)]
    assert full_is_due([1000, 300, 500, 900])
    assert not full_is_due([1000, 300, 250, 260])
    assert decide("auto", [1000, 300, 250, 260], deltas=deltas, offer=Offer(950, 200)).full


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
    decision = decide("auto", [1000, 310], deltas=[Delta("baseline", 310)], offer=offer, costs=costs)
    assert (decision.full, decision.since) == (False, since), decision.reason
    assert (decision.offer, decision.costs) == (offer, costs)


def test_auto_keeps_chains_short_where_restores_are_expected() -> None:
    sinces = {
        rate: decide("auto", [1000, 300, 300], offer=Offer(450, 290), costs=Costs(None, rate)).since
        for rate in (0, 0.01, 100)
    }
    assert sinces == {0: "previous", 0.01: "previous", 100: "baseline"}


def test_auto_keeps_to_the_longest_chain() -> None:
    sizes, deltas = [1000, 300, 10, 10], [Delta("baseline", 300), *[Delta("previous", 301)] * 2]
    for longest, since in ((4, "baseline"), (5, "previous")):
        costs = Costs(longest_chain=longest)
        assert decide("auto", sizes, deltas=deltas, offer=Offer(302, 10), costs=costs).since == since


def test_what_auto_saw_goes_through_the_record() -> None:
    sizes, deltas = [1000, 300], [Delta("baseline", 300)]
    decision = decide("auto", sizes, deltas=deltas, offer=Offer(450, 290), costs=Costs())
    stored = json.loads(json.dumps(asdict(decision)))
    assert deltas_after(stored, 295) == (*deltas, Delta("previous", 455))
    assert deltas_after(stored | {"since": "baseline"}, 451) == (*deltas, Delta("baseline", 451))


@pytest.mark.parametrize(("policy", "since"), [("consecutive", "previous"), ("intermittent", "baseline")])
def test_auto_goes_on_from_another_policy(policy: str, since: str) -> None:
    decision = decide(check_policy(policy), [1000, 300, 310])
    assert deltas_after(asdict(decision), 320) == tuple(Delta(since, size) for size in (300, 310, 320))  # type: ignore[arg-type]  # one of the two


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
