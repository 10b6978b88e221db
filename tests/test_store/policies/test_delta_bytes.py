"""The share of the codecs' estimates that deltas took, by which the next are estimated."""

from __future__ import annotations

from typing import Any

from cnr_store.policies.past import DeltaBytes


def policy(since: str, baseline: int, previous: int, full: bool = False) -> dict[str, Any]:
    offer = {"baseline_bytes": baseline, "previous_bytes": previous}
    return {"since": since, "full": full, "offer": offer}


def test_codecs_estimate_where_nothing_was_written() -> None:
    assert DeltaBytes().share("baseline") == DeltaBytes().share("previous") == 1


def test_newest_delta_of_the_same_kind_counts() -> None:
    taken = DeltaBytes()
    taken.note("1", policy("previous", 400_000, 100_000), 50_000)
    assert taken.share("previous") == taken.share("baseline") == 0.5
    taken.note("1", policy("previous", 400_000, 100_000), 50_000)  # as after an interrupt
    taken.note(
        "2", policy("baseline", 200_000, 100_000), 160_000
    )  # offered by half of the estimate: of 400,000
    assert (taken.share("previous"), taken.share("baseline")) == (0.5, 0.4)
    taken.note("3", policy("previous", 160_000, 50_000), 50_000)
    assert taken.share("previous") == 0.5


def test_versions_that_tell_nothing_do_not_count() -> None:
    taken = DeltaBytes()
    taken.note("4", policy("baseline", 400_000, 100_000, full=True), 50_000)
    taken.note("5", {"since": "previous", "full": False}, 50_000)
    taken.note("6", policy("previous", 400_000, 1_000), 50_000)
    assert taken.share("previous") == 1


def test_deltas_without_relative_rows_tell_nothing_of_those_that_have_them() -> None:
    taken = DeltaBytes()
    taken.is_relative = True
    taken.note("1", policy("baseline", 400_000, 400_000), 100_000)  # the first one, over the baseline
    taken.note("2", policy("baseline", 200_000, 100_000), 190_000)
    assert taken.share("previous") == taken.share("baseline") == 0.25
    taken.note("3", policy("previous", 200_000, 100_000), 120_000)
    assert taken.share("previous") == 0.3
