"""Options that no story of a command needs: each changes what is done, or is handed on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import cnr_store
from tests.test_store.cli.command import cnr

PASSING = {"seconds", "bytes"}
"""What reports say of times, and of records that hold times."""
TRACE = ("--rows", "500", "--saves", "9", "--accesses", "200")


def _written(capsys: pytest.CaptureFixture[str], *options: str) -> int:
    """The bytes that the policy "consecutive" writes in a small simulation, folds included."""
    status, out, err = cnr(capsys, "simulate", *TRACE, "--policy", "consecutive", "--json", *options)
    assert (status, err) == (0, "")
    total = json.loads(out)["consecutive"][-1]["written_bytes"]
    assert isinstance(total, int)
    return total


def test_simulate_takes_rows_of_deltas_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    trace = cnr_store.Trace.zipf(500, 9, 200, 1.05)
    saved = cnr_store.simulate(trace, "consecutive", row_bytes=68.0, delta_row_bytes=17.0)
    found = _written(capsys, "--delta-row-bytes", "17")
    assert found == saved[-1].written_bytes < _written(capsys)


def test_simulate_takes_the_popularity_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    trace = cnr_store.Trace.zipf(500, 9, 200, 2.5)
    found = _written(capsys, "--exponent", "2.5")
    assert (
        found == cnr_store.simulate(trace, "consecutive", row_bytes=68.0)[-1].written_bytes < _written(capsys)
    )


def test_simulate_folds_chains_of_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    trace = cnr_store.Trace.zipf(500, 9, 200, 1.05)
    saved = cnr_store.simulate(trace, "consecutive", row_bytes=68.0, max_chain=3)
    assert any(each.fold_bytes for each in saved)
    assert _written(capsys, "--max-chain", "3") == saved[-1].written_bytes > _written(capsys)


def test_simulate_keeps_so_many_versions(capsys: pytest.CaptureFixture[str]) -> None:
    saved = cnr_store.simulate(cnr_store.Trace.zipf(500, 9, 200, 1.05), "full", keep_last=2, row_bytes=68.0)
    found = json.loads(cnr(capsys, "simulate", *TRACE, "--policy", "full", "--keep-last", "2", "--json")[1])
    assert found["full"][-1]["kept_bytes"] == saved[-1].kept_bytes == 2 * 500 * 68


def test_simulate_counts_the_seconds_of_a_restore(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for seconds in ("10", "3600"):
        _, out, _ = cnr(capsys, "simulate", "--failure-hours", "8", "--restore-seconds", seconds, "--json")
        shares.append(json.loads(out)["lost"])
    assert shares[0] < shares[1]


@pytest.mark.parametrize("arguments", [("verify", "--deep"), ("repair", "--dry-run"), ("compact", "2")])
def test_any_number_of_workers_does_the_same(
    capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = []
    for workers in ("1", "3"):
        url = str(shutil.copytree(store, tmp_path / "copy"))
        status, out, err = cnr(capsys, arguments[0], url, *arguments[1:], "--workers", workers, "--json")
        assert (status, err) == (0, "")
        said.append({key: value for key, value in json.loads(out).items() if key not in PASSING})
        shutil.rmtree(url)
    assert said[0] == said[1]
    assert cnr(capsys, arguments[0], store, *arguments[1:], "--workers", "0")[0] == 2


def test_gc_keeps_every_so_many_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with cnr_store.Checkpointer(url, torch.nn.EmbeddingBag(50, 4), policy="full") as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step).result()
    status, _, err = cnr(capsys, "gc", url, "--keep-last", "1", "--keep-every", "2")
    assert (status, err) == (0, "")
    assert [each.step for each in cnr_store.versions(url)] == [2, 4, 5]


def test_gc_leaves_what_may_be_read_for_a_while(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with cnr_store.Checkpointer(url, torch.nn.EmbeddingBag(50, 4), policy="full") as checkpointer:
        ids = [checkpointer.save(step).result().id for step in (1, 2)]
    for seconds, left in (("3600", True), ("0", False)):
        status, _, err = cnr(capsys, "gc", url, "--keep-last", "1", "--grace-seconds", seconds)
        assert (status, err) == (0, "")
        assert [each.id for each in cnr_store.versions(url)] == ids[1:]
        assert any(ids[0] in str(path) for path in Path(url).rglob("*")) == left


def test_report_writes_where_it_is_told(
    capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    assert cnr(capsys, "report", store, "--output", str(target))[0] == 0
    assert "<html" in target.read_text(encoding="utf-8")
