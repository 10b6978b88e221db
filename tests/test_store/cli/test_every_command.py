"""Every command on a folder and on a real S3 server: in a pipe, at 80 columns, with `--json`, and without a store."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from typer.main import get_command

import cnr_store
from cnr_store.cli.app import app
from tests.nightly import at_night
from tests.s3_server import S3Server
from tests.test_store.cli.command import COMMANDS, Place, cnr, fill

TABLES = frozenset({"ls", "info", "du", "diff"})
"""Commands whose lines fit a terminal. The others print sentences or values, which a terminal folds."""
OF_THEIR_OWN = {"demo", "serve", "simulate", "warm", "import"}
"""Commands that have a test of their own, since they serve, train, or take no store first."""
WITHOUT_JSON = {"demo", "serve", "watch"}
"""What they print is for people; `report --json` has the figures of `watch`."""
FOLDER_BY_DAY = ["folder", pytest.param("S3", marks=[pytest.mark.server, pytest.mark.nightly])]
"""Places of a test that both pass alike, since what it asks begins where the storage has answered."""


@pytest.fixture(scope="module", params=["folder", pytest.param("S3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    url, storage_options = str(tmp_path_factory.mktemp("stores") / "store"), {}
    if request.param == "S3":
        server = request.getfixturevalue("s3_server")
        url, storage_options = server.url("every-command"), server.storage_options
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))
    with cnr_store.Checkpointer(url, model, storage_options=storage_options) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.75, "loss": float("nan"), "note": "a word " * 5}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    return Place(url, storage_options)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command on the store of a URL."""

    def run(name: str, url: str, *more: str) -> tuple[int, str, str]:
        return cnr(capsys, name, url, *fill(COMMANDS[name], tmp_path), *more)

    return run


@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_in_a_pipe_and_as_json(run: Run, place: Place, name: str) -> None:
    status, out, err = run(name, place.url, *place.options)
    assert (status, err) == (0, "")
    assert out
    assert "\x1b" not in out
    if name not in WITHOUT_JSON:
        status, out, err = run(name, place.url, *place.options, "--json")
        assert (status, err) == (0, "")
        assert json.loads(out) is not None


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
def test_a_command_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, run: Run, place: Place, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = run(name, place.url, *place.options)
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out).splitlines()
    assert status == 0
    assert lines
    if name in TABLES:
        totals = re.compile(r"\d+ versions, ")  # a sentence
        assert [line for line in lines if len(line) > 80 and not totals.match(line)] == []


@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_where_no_store_is(run: Run, place: Place, name: str) -> None:
    for more in ([],) if name in WITHOUT_JSON else ([], ["--json"]):
        status, out, err = run(name, f"{place.url}-none", *place.options, *more)
        assert (status, out) == (1, "")
        assert err.startswith("cnr: ")
        assert err.count("\n") == 1
        assert "-none" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_a_url_or_with_odd_options(
    run: Run, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert cnr(capsys, name)[0] == 2
    status, out, err = run(name, "x", "--storage-options", "[1]")
    assert (status, out) == (2, "")
    assert "JSON object" in err


def test_no_command_is_left_out() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert commands.keys() == COMMANDS.keys() | OF_THEIR_OWN
    with_json = {
        name for name, each in commands.items() if "--json" in {o for p in each.params for o in p.opts}
    }
    assert with_json == commands.keys() - WITHOUT_JSON


def test_a_file_is_imported(capsys: pytest.CaptureFixture[str], place: Place, tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt")
    torch.save(torch.nn.EmbeddingBag(100, 16).state_dict(), file)
    status, out, _ = cnr(capsys, "import", file, f"{place.url}-imported", "--step", "7", *place.options)
    assert status == 0
    assert "(step 7): " in out
    status, out, _ = cnr(
        capsys, "import", file, f"{place.url}-imported", "--step", "8", "--json", *place.options
    )
    assert (status, json.loads(out)["step"]) == (0, 8)
    status, out, err = cnr(capsys, "import", str(tmp_path / "none"), place.url, *place.options)
    assert (status, out) == (1, "")
    assert err.startswith("cnr: ")


@pytest.mark.parametrize("place", [pytest.param("S3", marks=pytest.mark.server)], indirect=True)
def test_a_version_on_s3_is_served(place: Place) -> None:
    command = [sys.executable, "-m", "cnr_store.cli", "serve", place.url, "--port", "0", *place.options]
    with subprocess.Popen([*command, "--version", "1"], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = re.search(r"\(step 1\) at (http://[0-9.:]+)/$", server.stderr.readline())
            assert said
            with urllib.request.urlopen(f"{said[1]}/", timeout=60) as answer:
                assert "step 1" in answer.read().decode()
            expected = cnr_store.rows(place.url, "0", [3], version=1, **place.storage_options)
            served = zarr.open_array(f"{said[1]}/tables/0/weight", mode="r")
            assert np.array_equal(np.asarray(served[3:4]), expected)
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


def test_tables_are_exported_as_parquet(
    capsys: pytest.CaptureFixture[str], place: Place, tmp_path: Path
) -> None:
    options = ["--target-options", *place.options[1:]] if place.options else []
    target = f"{place.url}-exported.parquet"
    status, out, err = cnr(capsys, "export", place.url, target, *place.options, *options)
    assert (status, err) == (0, "")
    assert out.endswith(f"(step 2) written to {target}\n")
    told = cnr(capsys, "export", place.url, target, *place.options, *options)
    assert told[:2] == (1, "")
    assert re.fullmatch(r"cnr: [^\n]*--overwrite[^\n]*\n|cnr: [^\n]*overwrite=True[^\n]*\n", told[2])
    assert cnr(capsys, "export", place.url, target, "--overwrite", *place.options, *options)[0] == 0


def test_a_run_that_died_is_ended(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    url = f"{place.url}-died"
    model = torch.nn.EmbeddingBag(100, 16, sparse=True)
    with cnr_store.Checkpointer(url, model, storage_options=place.storage_options) as checkpointer:
        checkpointer.save(1).result()
        asked = cnr(capsys, "gc", url, "--end-run", *place.options)
        assert asked[:2] == (2, "")
        assert "give --yes" in asked[2]
        status, out, err = cnr(capsys, "gc", url, "--end-run", "--yes", "--json", *place.options)
        assert (status, len(json.loads(out)["kept"])) == (0, 1)
        assert re.fullmatch(r"writer 000001-[^\n]* claimed [^\n]*; the last commit is 000001-[^\n]*\n", err)
        with pytest.raises(cnr_store.SupersededError):
            checkpointer.save(2).result()


@pytest.mark.parametrize("rule", ["auk:max:1", "loss:min:1"])
@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
def test_a_figure_that_no_version_has_removes_nothing(
    capsys: pytest.CaptureFixture[str], place: Place, rule: str
) -> None:
    """The other way to take it, as of a rule that keeps nothing, would remove nearly all."""
    status, out, err = cnr(capsys, "gc", place.url, "--keep-best", rule, *place.options)
    assert (status, out) == (2, "")
    assert re.search("there are auc", err)
    assert len(cnr_store.versions(place.backend)) == 2


@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
def test_a_tag_that_exists_is_moved(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    for version in ("1", "2"):
        assert cnr(capsys, "tag", place.url, "moved", version, *place.options)[0] == 0
    first, second = json.loads(cnr(capsys, "ls", place.url, "--json", *place.options)[1])
    assert ("moved" in first["tags"], "moved" in second["tags"]) == (False, True)
    assert cnr(capsys, "untag", place.url, "moved", *place.options)[0] == 0


@pytest.mark.parametrize("place", ["folder"], indirect=True)
def test_what_is_no_number_of_json(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    url = f"{place.url}-nan"
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), float("-inf")]]))
    cnr_store.save(url, model, step=1, metadata={"loss": float("nan")})
    status, out, _ = cnr(capsys, "cat", url, "weight", "--json")
    assert (status, _json(out)["values"]) == (0, [["NaN", "-Infinity"]])
    assert "loss=nan" in cnr(capsys, "ls", url)[1]
    assert "loss=nan" in cnr(capsys, "info", url)[1]
    for name in ("ls", "info", "report"):
        assert _json(cnr(capsys, name, url, "--json")[1])


def _json(text: str) -> Any:
    """A document of JSON as its standard has it, in which Python's NaN is none."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.server
@pytest.mark.parametrize(
    "name", [name if name in ("ls", "verify", "tag") else at_night(name) for name in COMMANDS]
)
def test_keys_that_a_server_refuses_are_one_line(
    capsys: pytest.CaptureFixture[str], s3_server: S3Server, tmp_path: Path, name: str
) -> None:
    options = {**s3_server.storage_options, "secret": "another"}
    arguments = [name, s3_server.url("every-command"), *fill(COMMANDS[name], tmp_path)]
    status, out, err = cnr(capsys, *arguments, "--storage-options", json.dumps(options))
    assert (status, out) == (1, "")
    assert re.fullmatch(r"cnr: [^\n]*(Forbidden|PermissionError|denied)[^\n]*\n", err), err
    assert "another" not in err
