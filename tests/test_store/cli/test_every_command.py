"""Every command on a folder and on a real S3 server: in a pipe, at 80 columns, with `--json`, and without a store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import cnr_store
from cnr_store.cli.app import app
from tests.test_store.cli.command import cnr

TARGET = "TARGET"
"""Stands for a path that is not there yet."""
COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "info": ["1"],
    "cat": ["0", "--rows", "1:4"],
    "du": [],
    "verify": ["--deep"],
    "repair": ["--dry-run"],
    "diff": ["1", "2"],
    "compact": ["2"],
    "gc": ["--keep-last", "2", "--dry-run"],
    "pin": ["1", "--reason", "the one before"],
    "unpin": ["1"],
    "tag": ["best", "1"],
    "untag": ["best"],
    "export": [TARGET],
    "report": ["--output", TARGET],
    "watch": ["--once"],
}
"""What follows the URL."""
TABLES = frozenset({"ls", "info", "du", "diff"})
"""Commands whose lines fit a terminal. The others print sentences or values, which a terminal folds."""
OF_THEIR_OWN = {"demo", "serve", "simulate", "warm", "import"}
"""Commands that have a test of their own, since they serve, train, or take no store first."""
WITHOUT_JSON = {"demo", "serve", "watch"}
"""What they print is for people; `report --json` has the figures of `watch`."""


@dataclass(frozen=True)
class Place:
    """Where a store of two versions is, and how the command line opens it."""

    url: str
    options: list[str]


@pytest.fixture(scope="module", params=["folder", pytest.param("S3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    url, storage_options = str(tmp_path_factory.mktemp("stores") / "store"), {}
    if request.param == "S3":
        server = request.getfixturevalue("s3_server")
        url, storage_options = server.url("every-command"), server.storage_options
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))
    with cnr_store.Checkpointer(url, model, storage_options=storage_options) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.75, "note": "a word " * 5}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    return Place(url, ["--storage-options", json.dumps(storage_options)] if storage_options else [])


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command on the store of a URL."""

    def run(name: str, url: str, *more: str) -> tuple[int, str, str]:
        taken = len(list(tmp_path.iterdir()))
        arguments = [
            str(tmp_path / f"{taken}.safetensors") if each == TARGET else each for each in COMMANDS[name]
        ]
        return cnr(capsys, name, url, *arguments, *more)

    return run


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
@pytest.mark.parametrize("place", ["folder"], indirect=True)
def test_a_command_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, run: Run, place: Place, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = run(name, place.url)
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out).splitlines()
    assert status == 0
    assert lines
    if name in TABLES:
        totals = re.compile(r"\d+ versions, ")  # a sentence
        assert [line for line in lines if len(line) > 80 and not totals.match(line)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_where_no_store_is(run: Run, place: Place, name: str) -> None:
    if name == "untag":
        return  # a tag that is not there is no error
    status, out, err = run(name, f"{place.url}-none", *place.options)
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
