"""What a run tells of its saves and loads: the log, `PendingSave`, `explain`, and `cnr info`."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from typer.testing import CliRunner

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import Checkpointer, ExplainedTable, OptionError, SaveError, SaveStats
from cnr_store.cli.app import app
from tests.test_store.support.faults import Weather
from tests.test_store.support.lasting_store import DIM, ROWS, change, make_model

_SAVED = re.compile(
    r"step (\d+): (baseline|delta), ([\d,]+) of ([\d,]+) rows, ([\d,.]+ [kMG]B) \(([\d.]+) % of full\), "
    r"stalled (\d+) ms, written in ([\d.]+) s"
)
_LOADED = re.compile(r"loaded version (\S+), step (\d+): ([\d,]+) rows, ([\d,.]+ [kMG]B) read in ([\d.]+) s")


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == ("cnr_store", level)
    ]


def test_the_log_has_one_line_for_each_save_and_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(rows=60_000)
    with (
        caplog.at_level(logging.INFO, "cnr_store"),
        Checkpointer(tmp_path, model, bits=32, policy="consecutive") as checkpointer,
    ):
        saves = [checkpointer.save(100)]
        whole = saves[0].result()
        change(checkpointer, model, list(range(1234)))
        saves.append(checkpointer.save(200))
        delta = saves[1].result()
        checkpointer.load()
    lines = said(caplog, logging.INFO)
    assert len(lines) == 3
    first, second = (_SAVED.fullmatch(line) for line in lines[:2])
    assert first is not None
    assert second is not None
    assert first.groups()[:4] == ("100", "baseline", "60,000", "60,000")
    assert second.groups()[:4] == ("200", "delta", "1,234", "60,000")
    assert first[5] == f"{whole.bytes / 1e6:.1f} MB"
    assert second[5] == f"{delta.bytes / 1e3:.1f} kB"
    loaded = _LOADED.fullmatch(lines[2])
    assert loaded is not None
    assert loaded.groups()[:3] == (delta.id, "200", "60,000")
    assert float(loaded[4].split()[0]) * 1e6 == pytest.approx(whole.bytes + delta.bytes, rel=0.1)


def test_stats_of_a_save(tmp_path: Path) -> None:
    model = make_model(rows=60_000)
    optimizer = SGD(model.parameters(), lr=0.1)
    full = io.BytesIO()
    torch.save(model.state_dict(), full)
    with Checkpointer(tmp_path, model, optimizer, bits=32) as checkpointer:
        pending = checkpointer.save(1)
        info = pending.result()
        stats = pending.stats
        assert isinstance(stats, SaveStats)
        assert (stats.rows, stats.table_rows, stats.bytes) == (60_000, 60_000, info.bytes)
        assert stats.ratio == pytest.approx(info.bytes / full.tell(), rel=0.02)
        assert stats.seconds_stalled == pending.stall_seconds > 0
        assert min(stats.seconds_writing, stats.seconds_encoding, stats.seconds_putting) > 0
        assert stats.seconds_waiting == 0
        with pytest.raises(AttributeError):
            stats.rows = 0  # type: ignore[misc]


def test_stats_count_folds(tmp_path: Path) -> None:
    """Each fold once: in the next save that is committed. The log says so."""
    down: list[bool] = []
    backend = FaultyBackend(open_backend(tmp_path), lambda *_: "before" if down else None)
    with Checkpointer(
        backend,
        make_model(),
        policy="consecutive",
        retention=cnr_store.Retention(max_chain=3),
        bits=32,
        failures=cnr_store.Failures(retry_seconds=0),
    ) as checkpointer:
        counted = []
        for step in range(9):
            checkpointer.touch("t", [step])
            pending = checkpointer.save(step)
            pending.result()
            assert pending.stats is not None
            counted.append(pending.stats.fold_bytes)
            checkpointer._upkeep.wait()
            if step in (3, 4):
                down.append(True)
                with pytest.raises(SaveError):
                    checkpointer.save(100 + step).result()
                down.clear()
    folds = [
        sum(size for _, size in backend.list_keys(f"folds/{name}")) for name in backend.list_names("folds")
    ]
    assert [nbytes for nbytes in counted if nbytes] == folds
    assert counted[4] > 0


def test_on_done_sees_the_stats(tmp_path: Path) -> None:
    seen: list[SaveStats | None] = []
    with Checkpointer(tmp_path, make_model(), on_done=lambda pending: seen.append(pending.stats)) as saving:
        saving.save(1)
    assert [stats is not None and stats.seconds_stalled > 0 for stats in seen] == [True]


def test_a_save_under_way_shows_its_state(tmp_path: Path) -> None:
    weather = Weather()
    backend = FaultyBackend(open_backend(tmp_path), weather)
    with Checkpointer(backend, make_model(), limits=cnr_store.Limits(overlap="skip")) as checkpointer:
        weather.change(None, hold=True)
        pending = checkpointer.save(7)
        skipped = checkpointer.save(8)
        shown = repr(pending)
        weather.release()
        info = pending.result()
        assert (shown, repr(skipped)) == (
            "<PendingSave of step 7: writing>",
            "<PendingSave of step 8: skipped>",
        )
        assert repr(pending) == f"<PendingSave of step 7: committed {info.id}>"
        weather.change(lambda operation, key: "before")
        failed = checkpointer.save(9)
        with pytest.raises(SaveError):
            failed.result()
        weather.change(None)
    assert repr(failed) == "<PendingSave of step 9: failed>"
    assert skipped.stats is None
    assert failed.stats is None


class Tables(nn.Module):
    """Tables `a0`, `a1`, ... of which each has rows enough to be quantized."""

    def __init__(self, tables: int, rows: int = 3000) -> None:
        super().__init__()
        for number in range(tables):
            self.add_module(f"a{number}", nn.Embedding(rows, 8, sparse=True))

    def step(self, optimizer: Any, ids: list[int]) -> None:
        optimizer.zero_grad()
        for module in self.children():
            module(torch.tensor(ids)).sum().backward()
        optimizer.step()


@pytest.mark.slow
def test_compared_tables_are_told_of_once_and_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tables(20)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    optimizer = Adam(model.parameters())
    with caplog.at_level(logging.WARNING, "cnr_store"), Checkpointer(tmp_path, model, optimizer) as saving:
        for step in range(3):
            model.step(optimizer, [step])
            saving.save(step).result()
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith("20 tables are compared with what is stored: 'a0', 'a1', ")
    assert "'a15' and 4 more: Adam" in warning
    found = json.loads(
        CliRunner().invoke(app, ["info", str(tmp_path), "--json"], catch_exceptions=False).stdout
    )["policy"]["compared"]
    ((reason, tables),) = found.items()
    assert reason.startswith("Adam")
    assert (tables["count"], tables["tables"]) == (20, [f"a{number}" for number in range(16)])
    shown = CliRunner().invoke(app, ["info", str(tmp_path)], catch_exceptions=False).stdout
    assert re.search(r"^compared +'a0', 'a1', .* and 4 more: Adam", shown, re.MULTILINE)


def test_the_record_says_why_a_table_is_whole_among_deltas(tmp_path: Path) -> None:
    model = Tables(2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=8) as saving:
        saving.save(0).result()
        model.step(optimizer, [1])
        with torch.no_grad():
            model.get_parameter("a1.weight").mul_(2)
        saving.save(1).result()
        model.step(optimizer, [1])
        saving.save(2).result()
    policies = [
        json.loads(
            CliRunner().invoke(app, ["info", str(tmp_path), step, "--json"], catch_exceptions=False).stdout
        )["policy"]
        for step in ("0", "1", "2")
    ]
    assert ["whole" in policy for policy in policies] == [False, True, False]
    ((reason, tables),) = policies[1]["whole"].items()
    assert "changed outside lookups" in reason
    assert (tables["count"], tables["tables"]) == (1, ["a1"])


def test_explain_tells_of_each_table(tmp_path: Path) -> None:
    model = Tables(3, rows=4000)
    small = nn.Embedding(20, 8)
    model.add_module("small", small)
    sgd = SGD([model.get_parameter("a0.weight"), model.get_parameter("a1.weight")], lr=0.1)
    adam = Adam([*small.parameters()])
    with Checkpointer(tmp_path, model, [sgd, adam], bits={"a0": 4, "*": 8, "small": 32}) as saving:
        saving.save(0).result()
        model.get_submodule("a0")(torch.tensor([1, 2, 3])).sum().backward()
        sgd.step()
        model.get_submodule("a2")(torch.tensor([5]))
        small(torch.tensor([7])).sum().backward()
        adam.step()
        explained = saving.explain()
        assert saving.explain() == explained
        assert all(isinstance(table, ExplainedTable) for table in explained)
        by_name = {table.name: table for table in explained}
        assert {
            name: (table.rows, table.whole, table.compared, table.changed) for name, table in by_name.items()
        } == {
            "a0": (4000, False, False, 3),
            "a1": (4000, False, False, 0),
            "a2": (4000, False, False, 0),
            "small": (20, False, True, 1),
        }
        assert [table.bits for table in explained] == [4, 8, 8, 8]
        assert by_name["a0"].why == "rows with a gradient"
        assert by_name["a2"].why == "rows with a gradient"
        assert by_name["small"].why.startswith("Adam")
        assert 0 < by_name["a0"].bytes < by_name["a0"].whole_bytes / 1000
        assert by_name["a1"].bytes == 0
        assert by_name["small"].bytes == by_name["small"].whole_bytes / 20
        lines = str(explained).splitlines()
        assert len(lines) == 7  # the last is advice
        assert lines[5].startswith("In memory of what is stored: ")
        assert re.fullmatch(r"a0 +tracked +4 +4,000 +3 +0\.0 kB +\S+ kB +rows with a gradient", lines[1])
        # It changed nothing: the rows are saved.
        assert saving.save(1).result().rows == 3 + 1


def test_explain_counts_the_rows_of_the_save_before(tmp_path: Path) -> None:
    """A delta since the baseline holds them again; one that failed left them to the next save."""
    model, weather = make_model(), Weather()
    backend = FaultyBackend(open_backend(tmp_path), weather)
    options: dict[str, Any] = {
        "policy": "one-shot",
        "failures": cnr_store.Failures(on_failure="log", retry_seconds=0),
    }
    with Checkpointer(backend, model, bits=32, **options) as saving:
        saving.save(0)
        change(saving, model, [1, 2])
        saving.save(1)
        assert saving.explain()[0].changed == 2
        change(saving, model, [3])
        weather.change(lambda operation, key: "before")
        saving.save(2)
        assert saving.explain()[0].changed == 3
        weather.change(None)
        assert saving.save(3).result().rows == 3


class Reader:
    """A position that resumes."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, reader = make_model(), Reader()
    with Checkpointer(tmp_path, model, bits=32) as checkpointer:
        assert checkpointer.resume(reader=reader) == 0
        assert any(
            "holds no version: training starts at step 0" in line for line in said(caplog, logging.WARNING)
        )
        for step in (5, 6):
            reader.position = 10 * step
            change(checkpointer, model, [step])
            info = checkpointer.save(step, reader=reader).result()
    again, other = Reader(), make_model(1)
    with Checkpointer(tmp_path, other, bits=32) as checkpointer:
        assert checkpointer.resume(reader=again) == 6
    assert again.position == 60
    assert torch.equal(other.get_parameter("t.weight"), model.get_parameter("t.weight"))
    # The newest version is damaged: the one before it is loaded, with its reader.
    (tmp_path / "versions" / info.id / "manifest").write_bytes(b"")
    with Checkpointer(tmp_path, make_model(1), bits=32) as checkpointer:
        assert checkpointer.resume(again) == 5
        assert again.position == 50
        with caplog.at_level(logging.WARNING, "cnr_store"):
            caplog.clear()
            assert checkpointer.resume() == 5
    assert any("holds the state of a reader" in line for line in said(caplog, logging.WARNING))


def test_resume_refuses_readers_it_cannot_restore(tmp_path: Path) -> None:
    model = make_model()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(3).result()
        before = model.get_parameter("t.weight").clone()
        with pytest.raises(OptionError, match=r"reader is of type dict and has no load_state_dict: give one"):
            checkpointer.resume(reader={"position": 3})
        assert torch.equal(model.get_parameter("t.weight"), before)
        with pytest.raises(OptionError, match=r"version .*, step 3, was saved without a reader"):
            checkpointer.resume(reader=Reader())
        assert checkpointer.resume() == 3
    assert cnr_store.versions(tmp_path)[0].rows == ROWS
    assert DIM == 8
