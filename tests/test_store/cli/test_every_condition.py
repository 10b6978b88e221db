"""Every command where its store, the storage or the terminal is not as it should be."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from typer.main import get_command

import cnr_store
from cnr_store.cli.app import app, main
from tests.nightly import at_night
from tests.test_store.cli.command import COMMANDS, cnr, fill

ALL = [*COMMANDS, "serve", "import"]
"""Every command that takes a store."""
PRINTING = [*COMMANDS, "simulate"]
"""Every command that prints, and ends by itself."""
WRITING = {
    "compact": ["2"],
    "pin": ["1"],
    "unpin": ["3"],
    "tag": ["new", "1"],
    "untag": ["best"],
    "gc": ["--keep-last", "1"],
}
"""Commands that change a store, with what follows the URL."""
NOBODY = 65534


def _names(all_names: Iterable[str], by_day: str) -> list[Any]:
    """Commands, of which those not named are tried at night."""
    return [name if name in by_day.split() else at_night(name) for name in all_names]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a table, of which the older one is tagged."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    with cnr_store.Checkpointer(folder, _model()) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.75, "loss": float("nan")}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    cnr_store.tag(folder, "best", 1)
    return folder


@pytest.fixture
def own_store(tmp_path: Path, store: Path) -> Path:
    """A copy of the store, to change."""
    return Path(shutil.copytree(store, tmp_path / "copy"))


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))


def _arguments(name: str, url: object, folder: Path) -> list[str]:
    if name == "simulate":
        return ["simulate", "--rows", "100", "--saves", "4", "--accesses", "50"]
    if name == "import":
        file = folder / "model.pt"
        torch.save(_model().state_dict(), file)
        return ["import", str(file), str(url)]
    return [name, str(url), *fill({**COMMANDS, "serve": ["--port", "0"]}[name], folder)]


def _is_one_line(told: tuple[int, str, str], says: str) -> None:
    status, out, err = told
    assert (status, out) == (1, "")
    assert re.fullmatch(r"cnr: [^\n]+\n", err)
    assert re.search(says, err), err


# The storage


@pytest.mark.parametrize("name", _names(ALL, "ls tag export serve"))
def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("s3fs")
    once = {"retries": {"total_max_attempts": 1}}
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s", "config_kwargs": once}
    arguments = _arguments(name, "s3://bucket/store", tmp_path)
    told = cnr(capsys, *arguments, "--storage-options", json.dumps(options))
    _is_one_line(told, r"s3://bucket/store.*Could not connect.*check that the server is up")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may do everything, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_store(store: Path) -> Iterator[Path]:
    """A copy that others may reach: pytest's own folders are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(store, Path(folder, "store")))


@pytest.mark.parametrize("name", _names(ALL, "ls verify export serve import"))
def test_a_store_that_one_may_not_read(
    capsys: pytest.CaptureFixture[str], public_store: Path, name: str
) -> None:
    arguments = _arguments(name, public_store, public_store.parent)
    cnr(capsys, "ls", str(public_store))  # all is imported before files of others may not be read any more
    public_store.chmod(0o000)
    with _as_nobody():
        told = cnr(capsys, *arguments)
    public_store.chmod(0o755)
    _is_one_line(told, "Permission denied")
    assert str(public_store) in told[2]


@pytest.mark.parametrize("name", _names(WRITING, "compact tag gc"))
def test_a_store_that_one_may_only_read(
    capsys: pytest.CaptureFixture[str], public_store: Path, name: str
) -> None:
    cnr_store.save(public_store, _model(), step=3)
    cnr_store.pin(public_store, 3)
    before = sorted(public_store.rglob("*"))
    cnr(capsys, "ls", str(public_store))
    with _as_nobody():
        told = cnr(capsys, name, str(public_store), *WRITING[name])
    _is_one_line(told, "Permission denied")
    assert sorted(public_store.rglob("*")) == before


# The store


@pytest.mark.parametrize("name", _names(COMMANDS, "compact gc repair"))
def test_a_store_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    url = tmp_path / "store"
    with cnr_store.Checkpointer(url, _model()) as checkpointer:
        for step in (1, 2):
            checkpointer.touch("0", [step])
            checkpointer.save(step).result()
        status, _, err = cnr(capsys, *_arguments(name, url, tmp_path))
        assert (status, err) == (0, "")
        checkpointer.touch("0", [3])
        assert checkpointer.save(3).result().kind == "delta"
    assert cnr_store.verify(url, deep=True).ok


DAMAGED_STATUS = {"ls": 3, "report": 3, "verify": 3, "du": 0, "watch": 0, "untag": 0}
"""Of the commands that show the rest beside a record that can't be read, or need none."""


@pytest.mark.parametrize("name", _names(COMMANDS, "info cat du gc tag untag watch"))
def test_a_store_whose_newest_record_is_cut_off(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Path, name: str
) -> None:
    newest = cnr_store.versions(own_store)[-1].id
    record = own_store / "versions" / newest / "zarr.json"
    record.write_bytes(record.read_bytes()[:-20])
    told = cnr(capsys, *_arguments(name, own_store, tmp_path))
    if name in DAMAGED_STATUS:
        assert told[0] == DAMAGED_STATUS[name]
        assert name in ("untag", "du") or newest in told[1] + told[2]
    else:
        _is_one_line(told, newest)


@pytest.mark.parametrize("name", _names(ALL, "ls gc tag untag serve import"))
@pytest.mark.parametrize(
    "document",
    [at_night(b""), at_night(b"\x00\xff"), b'{"zarr_format":3,"node_type":"group","attributes":{}}'],
)
def test_a_place_that_holds_something_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, document: bytes
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "zarr.json").write_bytes(document)
    _is_one_line(cnr(capsys, *_arguments(name, place, tmp_path)), re.escape(str(place)))
    assert [each.name for each in place.iterdir()] == ["zarr.json"]


# The terminal


@contextmanager
def _output(stream: IO[bytes], encoding: str = "utf-8") -> Iterator[None]:
    """Standard output of this process."""
    text, before = io.TextIOWrapper(stream, encoding), sys.stdout
    sys.stdout = text
    try:
        yield
    finally:
        sys.stdout = before
        text.close()  # by now what it still holds goes nowhere


def _ends(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("name", _names(PRINTING, "ls cat report simulate"))
def test_a_pipe_that_nobody_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Path, name: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = _arguments(name, own_store, tmp_path)
    with _output(os.fdopen(writing, "wb")):
        assert _ends(arguments) == 1
        assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("name", _names(PRINTING, "ls cat report simulate"))
def test_output_on_a_full_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Path, name: str
) -> None:
    arguments = _arguments(name, own_store, tmp_path)
    with _output(Path("/dev/full").open("wb")):
        assert _ends(arguments) == 1
    err = capsys.readouterr().err
    assert err == "cnr: the output could not be written: [Errno 28] No space left on device\n"


FITTING = frozenset({"ls", "info", "diff", "watch", "simulate"})
"""Commands whose tables go without columns. The first table of `du` has the same three on every terminal."""


@pytest.mark.parametrize("name", _names(PRINTING, "ls info du diff gc watch simulate"))
def test_a_terminal_of_40_columns_that_knows_ascii(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    own_store: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    arguments, bars = _arguments(name, own_store, tmp_path), io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(bars, "ascii", "backslashreplace", write_through=True))
    status, shown = _shown(arguments)
    assert status == 0
    assert b"\\" not in bars.getvalue()
    assert "\\" not in shown
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown).splitlines()
    assert lines
    sentences = re.compile(r"[^ ]+: |\d+ (versions|saves|of)\b|policy  ")
    if name in FITTING:
        assert [line for line in lines if len(line) > 40 and not sentences.match(line)] == []


def _shown(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status, and what a terminal that knows ASCII shows."""
    kept = io.BytesIO()
    with _output(kept, "ascii"):
        status = _ends(arguments)
        return status, kept.getvalue().decode("ascii")


@pytest.mark.parametrize("columns", [40, at_night(80)])
def test_help_cuts_no_name_of_an_option(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        status, shown = _shown([name, "--help"])
        assert status == 0
        assert "\\" not in shown
        assert {each for option in command.params for each in option.opts if each.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", shown)
        )
