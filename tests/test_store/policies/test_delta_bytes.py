"""Bytes a row of deltas that were written, by which the next are estimated."""

from __future__ import annotations

from cnr_store.policies.delta_bytes import DeltaBytes
from cnr_store.policies.past import Since

ROWS: dict[Since, int] = {"baseline": 1000, "previous": 100}


def test_codecs_estimate_where_nothing_was_written() -> None:
    assert DeltaBytes().estimate("a", 20.0, ROWS) == {"baseline": 20_000, "previous": 2_000}


def test_newest_delta_of_the_same_kind_counts() -> None:
    taken = DeltaBytes()
    taken.note("a", "previous", 5_000, 1_000)
    taken.note("a", "baseline", 8_000, 1_000)
    taken.note("a", "previous", 4_000, 1_000)
    assert taken.estimate("a", 20.0, ROWS) == {"baseline": 8_000, "previous": 400}
    assert taken.estimate("b", 20.0, ROWS) == {"baseline": 20_000, "previous": 2_000}


def test_kinds_differ_by_their_rows_alone_where_one_was_written() -> None:
    taken = DeltaBytes()
    taken.note("a", "previous", 5_000, 1_000)
    assert taken.estimate("a", 20.0, ROWS) == {"baseline": 5_000, "previous": 500}


def test_few_rows_do_not_count() -> None:
    taken = DeltaBytes()
    taken.note("a", "previous", 5_000, 10)
    assert taken.estimate("a", 20.0, ROWS)["previous"] == 2_000
