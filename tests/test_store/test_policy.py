"""Policies and widths: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import OptionError
from cnr_store.bits import check_bits, choose_bits
from cnr_store.policy import POLICIES, check_policy, decide, full_is_due

sizes = st.lists(st.integers(1, 10**12), min_size=1, max_size=30)


def test_paper_example_takes_a_full_version_at_the_eighth_interval() -> None:
    """With S_i = 0.25 * i**0.3 of the full size, the predictor asks for a full version after seven differentials."""
    written = [10**9]
    while not (len(written) > 1 and full_is_due(written)):
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
    if policy in expected:
        assert decision.full is expected[policy]
    else:
        assert decision.full == (len(written) > 1 and full_is_due(written))
    assert decide(check_policy(policy), written, full=True).full
    assert decide(check_policy(policy), []).full


def test_unknown_policy_lists_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"'daily' is not one of full, one-shot, consecutive, intermittent"):
        check_policy("daily")


@pytest.mark.parametrize("bits", [0, 1, 5, 16, 33, -8, "4", None, 8.0, True, {"user*": 7}])
def test_width_out_of_range(bits: object) -> None:
    with pytest.raises(OptionError, match="use 2, 3, 4, 8, 32"):
        check_bits(bits)  # type: ignore[arg-type]  # that is what is tested


def test_widths_by_pattern_and_size() -> None:
    large, small = 1 << 20, 1 << 10
    assert choose_bits("auto", "user", large) == 8
    assert choose_bits(4, "user", large) == 4
    assert choose_bits(4, "user", small) == 32
    patterns = {"user*": 2, "item": "auto"}
    assert choose_bits(patterns, "user.hash", small) == 2
    assert choose_bits(patterns, "item", large) == 8
    assert choose_bits(patterns, "other", large) == 8
    assert choose_bits(patterns, "other", small) == 32
