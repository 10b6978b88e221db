"""The ledger in the docs is the one that the results on record give."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import summary
from benchmarks.cold_bench import main as cold
from benchmarks.gpu_bench import aims
from benchmarks.relative_bench import budget, targets


def test_page_and_summary_hold_what_is_on_record() -> None:
    found = list(summary.entries())
    assert found
    text = summary.PAGE.read_text(encoding="utf-8")
    assert summary.page(text, found) == text, "run `python benchmarks/summary.py --write`"
    document = json.loads((summary.RESULTS / summary.SUMMARY).read_text(encoding="utf-8"))
    assert document == [asdict(entry) for entry in found]


def test_every_verdict_follows_from_its_figures() -> None:
    for entry in summary.entries():
        reached = entry.measured <= entry.aim if entry.at_most else entry.measured >= entry.aim
        assert reached or not entry.met, entry


def test_page_without_a_place_for_the_ledger_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the two lines"):
        summary.page("# Pace\n", [])


def test_results_are_read_from_the_folder_given(tmp_path: Path) -> None:
    target = {"name": "seconds", "where": "here", "measured": 2, "wanted": 1, "at_most": True, "met": False}
    (tmp_path / "b.json").write_text(json.dumps({"targets": [target]}))
    (tmp_path / "a.json").write_text(json.dumps({"lines": []}))
    (tmp_path / summary.SUMMARY).write_text("[]")
    [entry] = summary.entries(tmp_path)
    assert entry.cells == ("b", "seconds", "here", "2", "≤ 1", "**no**")


def test_cold_start_has_its_aims_in_the_ledger(tmp_path: Path) -> None:
    lines = [
        cold.Line("first save: stall, at once", cold_seconds=0.03, warm_seconds=0.02, peer_seconds=1),
        cold.Line("load: first row", cold_seconds=2.5, warm_seconds=0.1, peer_seconds=1),
    ]
    targets = [target.to_json() for target in cold.targets(lines, compiling=3.5)]
    (tmp_path / "cold.json").write_text(json.dumps({"targets": targets}))
    found = [(each.aim, each.at_most, each.met) for each in summary.entries(tmp_path)]
    assert found == [(1.5, True, True), (2, True, False), (4, True, True)]


@pytest.mark.parametrize(
    ("lost", "figure"),
    [
        pytest.param([0.004, 0.006], 0.005, id="within the aim"),
        pytest.param([-0.04, 0.07], 0.0, id="beyond it, but lossless runs are in the interval"),
        pytest.param([0.019, 0.021], 0.02, id="beyond both"),
        pytest.param([0.02], 0.02, id="one seed has no interval"),
    ],
)
def test_a_budget_is_kept_within_its_aim_or_the_noise(lost: list[float], figure: float) -> None:
    def line(seed: int, percent: float) -> dict[str, object]:
        lines = [
            {"setting": budget.BUDGET, "restores": 5, "cost_factor": 0.2, "lost_percent": percent},
            {"setting": budget.LOSSLESS, "restores": 20, "cost_factor": 0.2, "lost_percent": 0.0},
        ]
        return {"part": "budget", "where": "here", "seed": seed, "lines": lines}

    [found] = targets.targets([line(*each) for each in enumerate(lost)])
    assert found.measured == pytest.approx(figure)
    assert found.met == (figure <= 0.01)
    assert "lossless, 20 restores: 0.0000" in found.where


def test_aims_that_need_a_gpu_are_open_until_they_are_measured(tmp_path: Path) -> None:
    """Without a figure they are neither met nor left out."""
    assert [cells[1] for cells in summary.unmeasured(tmp_path)] == list(aims.AIMS)
    assert {cells[3:] for cells in summary.unmeasured(tmp_path)} >= {("not measured", "≤ 100", "open")}
    target = aims.target(aims.STALL, 120.0, "here")
    (tmp_path / "gpu.json").write_text(json.dumps({"stall": {"targets": [target.to_json()]}}))
    assert [each.met for each in summary.entries(tmp_path)] == [False]
    still_open = summary.unmeasured(tmp_path)
    assert [cells[1] for cells in still_open] == [name for name in aims.AIMS if name != aims.STALL]
    text = summary.table(summary.entries(tmp_path), still_open)
    assert text.count("| open |") == len(aims.AIMS) - 1
    assert text.count("| yes |") == 0
