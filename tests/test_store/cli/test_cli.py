"""The command `cnr`: what it prints, and how it fails."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter, OrderedDict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from rich.filesize import decimal
from safetensors.numpy import load_file

import cnr_store
from cnr_store.cli.options import OWN_PARAMETERS
from tests.test_store.cli.command import cnr

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from cnr_store.cli.app import main
main(sys.argv[1:])
"""


def test_ls_lists_versions_oldest_first(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "ls", store)
    head, first, second, totals = out.splitlines()
    assert status == 0
    assert head.split() == [
        "step",
        "kind",
        "rows",
        "size",
        "of",
        "full",
        "chain",
        "age",
        "stall",
        "metadata",
        "health",
    ]
    assert first.split()[:5] == ["1", "baseline", "1,000", "(100", "%)"]
    assert second.split()[:5] == ["2", "delta", "2", "(0.2", "%)"]
    assert "name=[red]first" in first
    assert [line.split()[-2:] for line in (first, second)] == [["not", "verified"]] * 2
    assert re.fullmatch(r"2 versions, [\d.]+ kB, [\d.]+x less than as many full copies \(256.1 kB\)", totals)


def test_ls_long_has_ids_and_times(capsys: pytest.CaptureFixture[str], store: str) -> None:
    head, *lines, _ = cnr(capsys, "ls", store, "--long")[1].splitlines()
    assert head.split()[:4] == ["id", "previous", "time", "step"]
    ids = [info.id for info in cnr_store.versions(store)]
    assert [line.split()[:2] for line in lines] == [[ids[0], "-"], [ids[1], ids[0]]]


def test_ls_json_is_what_versions_returns(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "ls", store, "--json")
    names = ("id", "step", "kind", "rows", "bytes", "previous", "time", "metadata")
    assert status == 0
    listed = json.loads(out)
    expected = [{name: getattr(info, name) for name in names} for info in cnr_store.versions(store)]
    stalled = [each.pop("stalled_seconds") for each in listed]
    assert all(0 < seconds < 600 for seconds in stalled)
    assert listed == [
        each
        | {"pinned": False, "pin_reasons": [], "folded": False, "fold_bytes": None, "removed": False}
        | {"lost_base": None, "damaged": None, "tags": [], "chain": 1 + number}
        | {"table_rows": 1000, "full_bytes": 4 * (2 * 1000 * 16 + 17)}
        for number, each in enumerate(expected)
    ]


def test_tag_takes_name_and_version_in_either_order(
    capsys: pytest.CaptureFixture[str], own_store: str
) -> None:
    newest = cnr_store.versions(own_store)[-1]
    for name, known in (("by-step", "2"), ("by-id", newest.id), ("by-word", "latest")):
        assert cnr(capsys, "tag", own_store, name, known)[::2] == (0, "")
        status, _, said = cnr(capsys, "tag", own_store, known, f"{name}-2")
        assert (status, said.strip()) == (0, f"cnr: took {name}-2 for NAME and {known} for VERSION")
    assert cnr(capsys, "tag", own_store, "by-tag", "by-step")[::2] == (0, "")
    assert set(cnr_store.tags(own_store).values()) == {newest.id}
    assert len(cnr_store.tags(own_store)) == 7
    assert cnr(capsys, "tag", own_store, "1", "2")[0] == 1


def test_ls_marks_what_is_named_pinned_and_folded(capsys: pytest.CaptureFixture[str], own_store: str) -> None:
    assert cnr(capsys, "pin", own_store, "1")[0] == 0
    assert cnr(capsys, "tag", own_store, "best", "1")[0] == 0
    assert cnr(capsys, "tag", own_store, "candidate", "2")[0] == 0
    assert cnr(capsys, "compact", own_store, "2")[0] == 0
    first, second = json.loads(cnr(capsys, "ls", own_store, "--json")[1])
    marks = [(each["tags"], each["pinned"], each["folded"], each["chain"]) for each in (first, second)]
    assert marks == [(["best"], True, False, 1), (["candidate"], False, True, 1)]
    head, *lines, totals = cnr(capsys, "ls", own_store)[1].splitlines()
    assert head.split()[-2:] == ["tags", "health"]
    assert lines[0].endswith("best, pinned  not verified")
    assert lines[1].split()[-3:] == ["candidate", "not", "verified"]
    nbytes = sum(path.stat().st_size for path in Path(own_store, "folds").rglob("*") if path.is_file())
    assert [first["fold_bytes"], second["fold_bytes"]] == [None, nbytes]
    assert f"and {decimal(nbytes)} of folds" in totals
    assert decimal(nbytes) in cnr(capsys, "ls", own_store, "--long")[1].splitlines()[2]
    assert json.loads(cnr(capsys, "info", own_store, "2", "--json")[1])["fold_bytes"] == nbytes
    told = cnr(capsys, "info", own_store, "2")[1]
    assert decimal(nbytes) in told
    assert "candidate" in told


def test_ls_shows_ordered_metadata_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "store")
    metadata = OrderedDict(loss=np.float32(0.5), best=[OrderedDict(auc=1)], seen=Counter(a=2))
    with cnr_store.Checkpointer(url, torch.nn.EmbeddingBag(100, 4, sparse=True), None) as checkpointer:
        checkpointer.save(1, metadata=metadata).result()
        checkpointer.save(2, metadata=OrderedDict({3: 4})).result()
    _, out, _ = cnr(capsys, "ls", url, "--long")
    assert 'loss=0.5, best=[{"auc": 1}], seen={"a": 2}' in out
    assert "$ordered=[[3, 4]]" in out  # a key that is no name
    assert cnr_store.versions(url)[0].metadata == metadata


@pytest.fixture(scope="module")
def measured_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five versions, four of which have a figure; that of step 3 is no number."""
    url = str(tmp_path_factory.mktemp("stores") / "measured")
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    with cnr_store.Checkpointer(url, model, None) as checkpointer:
        for step, auc in enumerate([0.7, np.float32(0.9), float("nan"), torch.tensor(0.8)], 1):
            checkpointer.save(step, metadata={"auc": auc}).result()
        checkpointer.save(5).result()
    return url


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["--last", "2"], ["4", "5"]),
        (["--sort", "auc"], ["3", "5", "1", "4", "2"]),
        (["--sort", "auc", "--last", "1"], ["2"]),
        (["--sort", "age"], ["5", "4", "3", "2", "1"]),
        (["--sort", "step"], ["1", "2", "3", "4", "5"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_ls_lists_some_in_an_order(
    capsys: pytest.CaptureFixture[str], measured_store: str, arguments: list[str], steps: list[str]
) -> None:
    status, out, _ = cnr(capsys, "ls", measured_store, *arguments)
    assert (status, [line.split()[0] for line in out.splitlines()[1:-1]]) == (0, steps)
    assert out.splitlines()[-1].startswith("5 versions, ")
    assert ("auc=0.9" in out) == ("2" in steps)  # whichever library the number came from


def test_ls_names_the_figures_there_are(capsys: pytest.CaptureFixture[str], measured_store: str) -> None:
    status, _, err = cnr(capsys, "ls", measured_store, "--sort", "ndcg")
    assert status == 2
    assert "no version has the figure 'ndcg'" in err
    assert "auc" in err


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_a_narrow_terminal_drops_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, measured_store: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    whole = cnr(capsys, "ls", measured_store)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    lines = re.sub(r"\x1b\[[\d;]*m", "", cnr(capsys, "ls", measured_store)[1]).splitlines()[:-1]
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "step"
    assert lines[0].split()[-1] == "health"
    assert ("metadata" in lines[0]) == (columns == 120)
    assert "metadata" in whole


def test_info_shows_a_version_by_id_step_or_latest(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "info", store, "1")
    assert status == 0
    assert "[red]first" in out
    assert "tables/0/weight" in out
    _, latest, _ = cnr(capsys, "info", store, "--json")
    doc = json.loads(latest)
    assert doc["step"] == 2
    assert doc["arrays"]["tables/0/weight"]["rows"] == 2
    assert json.loads(cnr(capsys, "info", store, doc["id"], "--json")[1]) == doc


def test_the_release_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = cnr(capsys, "--version")
    assert (status, out) == (0, f"cnr {version('cnr-store')}\n")


def test_a_store_without_a_version_lists_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str
) -> None:
    shutil.copy(Path(store) / "zarr.json", tmp_path)
    status, out, err = cnr(capsys, "ls", str(tmp_path))
    assert (status, out) == (0, "")
    assert "no committed version" in err
    assert cnr(capsys, "ls", str(tmp_path), "--json")[:2] == (0, "[]\n")


@pytest.mark.parametrize("place", ["empty", "typo"])
def test_where_no_store_is_there_is_nothing_to_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "empty").mkdir()
    for options in ([], ["--json"]):
        status, out, err = cnr(capsys, "ls", str(tmp_path / place), *options)
        assert (status, out) == (1, "")
        assert "holds no store: check the URL" in err


@pytest.mark.slow
def test_an_error_of_ours_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str
) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    (tmp_path / "file").write_text("")
    for arguments in (
        ("ls", str(tmp_path)),
        ("ls", "nosuch://place"),
        ("ls", str(tmp_path / "file")),
        ("info", str(tmp_path / "empty")),
        ("info", store, "77"),
        ("info", store, "[bold]"),
        ("info", store, "9" * 5000),
        ("demo", "--data", str(tmp_path)),
        ("verify", str(tmp_path / "empty")),
        ("verify", store, "77"),
        ("compact", store, "77"),
        ("gc", str(tmp_path)),
        ("gc", str(tmp_path / "empty"), "--keep-last", "1"),
        ("pin", store, "77"),
        ("diff", store, "1", "77"),
        ("export", store, str(tmp_path / "file")),
        ("serve", str(tmp_path / "empty")),
        ("simulate", "--policy", "often"),
    ):
        status, out, err = cnr(capsys, *arguments)
        assert (status, out) == (1, ""), arguments
        assert err.startswith("cnr: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err


def test_diff_counts_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 16, sparse=True))
    with cnr_store.Checkpointer(url, model, bits=32) as checkpointer:
        checkpointer.save(1).result()
        with torch.no_grad():
            model[0].weight[[3, 5]] += 1.0  # type: ignore[index, operator]
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    status, out, _ = cnr(capsys, "diff", url, "1")
    assert (status, out.splitlines()[1].split()) == (0, ["tables/0/weight", "changed", "2", "100", "1"])
    assert json.loads(cnr(capsys, "diff", url, "2", "1", "--json")[1])[0]["rows_changed"] == 2


def test_export_writes_what_state_dict_returns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str
) -> None:
    target = tmp_path / "model.safetensors"
    status, out, _ = cnr(capsys, "export", store, str(target), "--version", "1", "--json")
    assert (status, json.loads(out)["step"]) == (0, 1)
    found = load_file(target)
    assert (found["0.weight"] == cnr_store.state_dict(store, 1)["0.weight"]).all()
    assert cnr(capsys, "export", store, str(target))[0] == 1
    assert cnr(capsys, "export", store, str(tmp_path / "group"), "--format", "zarr")[0] == 0
    assert cnr(capsys, "export", store, str(tmp_path / "group.zarr"))[0] == 0
    for name in ("group", "group.zarr"):
        assert "tables/0/weight" in zarr.open_group(tmp_path / name, mode="r")


@pytest.mark.slow
def test_serve_answers_until_interrupted(store: str) -> None:
    command = [
        sys.executable,
        "-m",
        "cnr_store.cli",
        "serve",
        store,
        "--port",
        "0",
        "--version",
        "1",
        "--host",
        "127.0.0.2",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = re.search(r"\(step 1\) at (http://127\.0\.0\.2:[1-9][0-9]*)/$", server.stderr.readline())
            assert said
            address = said[1]
            with urllib.request.urlopen(f"{address}/zarr.json", timeout=60) as answer:
                assert json.load(answer)["attributes"]["cnr_version"]["step"] == 1
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


def test_a_port_that_is_taken_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], store: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, out, err = cnr(capsys, "serve", store, "--port", str(taken.getsockname()[1]))
    assert (status, out) == (1, "")
    assert err.startswith("cnr: can't listen at 127.0.0.1:")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "function", ["versions", "open", "verify", "compact", "gc", "pin", "unpin", "diff", "export"]
)
def test_what_storage_options_must_not_be_called_is_known(function: str) -> None:
    parameters = inspect.signature(getattr(cnr_store, function)).parameters.values()
    assert {each.name for each in parameters if each.kind != each.VAR_KEYWORD} <= OWN_PARAMETERS


def test_simulate_compares_policies(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("simulate", "--rows", "1000", "--saves", "6", "--accesses", "500")
    status, out, _ = cnr(capsys, *few)
    assert status == 0
    assert out.startswith("6 saves of 1,000 rows of 68 bytes, 500 lookups between two of them")
    assert [line.split()[0] for line in out.splitlines()[-5:]] == [
        *("full", "one-shot", "consecutive", "intermittent", "auto")
    ]
    status, out, _ = cnr(
        capsys, "simulate", "--failure-hours", "8", "--stall-ms", "20", "--write-seconds", "30"
    )
    assert (status, out.startswith("with a failure every 8 hours, save every 34 seconds")) == (0, True)
    found = json.loads(cnr(capsys, *few, "--policy", "full", "--row-bytes", "10", "--json")[1])
    assert [save["bytes"] for save in found["full"]] == [10_000] * 6
    assert "every version is full" in cnr(capsys, *few, "--policy", "full")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls",), "Missing argument"),
        (("nothing",), "No such command"),
        (("ls", "x", "--storage-options", "{"), "not JSON"),
        (("ls", "x", "--storage-options", "[1]"), "JSON object"),
        (("demo", "--policy", "often"), "policy 'often' is not one of"),
        (("demo", "--bits", "5"), "no width 5: give"),
        (("demo", "--bits", "few"), "no width few: give"),
        (("demo", "--bits", "9" * 5000), "--bits"),
        (("ls", "x", "--storage-options", '{"url": "y"}'), "url: these"),
        (("demo", "--every", "0"), "--every"),
        (("demo", "--steps", "many"), "--steps"),
        (("gc", "x", "--keep-last", "0"), "--keep-last"),
        (("export", "x", "y", "--format", "onnx"), "onnx"),
    ],
)
def test_wrong_usage_is_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, _, err = cnr(capsys, *arguments)
    assert status == 2
    assert message in err


@pytest.mark.slow
def test_listing_needs_no_torch_and_the_demo_says_that_it_does(store: str) -> None:
    listed = _without_torch("ls", store)
    assert listed.returncode == 0, listed.stderr
    assert "baseline" in listed.stdout
    assert _without_torch("info", store).returncode == 0
    demo = _without_torch("demo")
    assert demo.returncode == 1
    assert demo.stderr == "cnr: the demo needs torch: pip install 'cnr-store[demo]'\n"


def _without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_warm_compiles_and_tells_where(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = cnr(capsys, "warm", "--json")
    found = json.loads(out)
    files = [file for folder in found["folders"] for file in Path(folder).glob("*.nb[ci]")]
    assert (status, found["files"], found["bytes"]) == (
        0,
        len(files),
        sum(file.stat().st_size for file in files),
    )
    assert f"{found['files']} files" in cnr(capsys, "warm")[1]


def test_warm_shows_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which lets rich take standard error for a terminal
    status, out, err = cnr(capsys, "warm")
    assert (status, "compiling" in out) == (0, False)
    assert re.search(r"compiling .*[1-9]\d*/\?", err)


@pytest.mark.slow
def test_warm_fails_where_nothing_can_be_kept() -> None:
    nowhere = {"NUMBA_CACHE_DIR": "", "NUMBA_CACHE_LOCATOR_CLASSES": "_UserProvidedCacheLocator"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "warm"],
        env={**os.environ, **nowhere},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"set NUMBA_CACHE_DIR" in done.stderr
