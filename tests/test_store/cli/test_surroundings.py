"""The command `cnr` where its surroundings are odd: a full disk behind its output, few letters, no working folder."""

from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cnr_store
from cnr_store.cli.app import main
from cnr_store.cli.output import print_line, table


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a name that ASCII lacks."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    model = torch.nn.ModuleDict({"größe": torch.nn.Embedding(1000, 16)})
    with cnr_store.Checkpointer(folder, model) as checkpointer:
        checkpointer.save(1, metadata="größer").result()
    return folder


def cnr(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cnr_store.cli", *map(str, arguments)]
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "timeout": 120}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **{**defaults, **options})  # type: ignore[call-overload]
    return done


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["info"], ["verify"], ["gc"]], ids=" ".join)
def test_output_that_can_not_be_written_is_one_line(store: Path, arguments: list[str]) -> None:
    command, *options = arguments
    with Path("/dev/full").open("w") as full:
        done = cnr(command, store, *options, stdout=full)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "cnr: the output could not be written: [Errno 28] No space left on device"


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error_to_tell(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = cnr("ls", store, "--json", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=["ascii", "C"],
)
@pytest.mark.parametrize("command", ["ls", "info", "verify"])
def test_a_terminal_that_knows_few_letters(store: Path, environment: dict[str, str], command: str) -> None:
    done = cnr(command, store, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    if command == "info":
        assert "gr\\xf6\\xdfer" in done.stdout


def test_a_working_folder_that_was_deleted(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in (["ls", "store"], ["export", str(store), "file.safetensors"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "the working folder, which it is relative to, was deleted; give an absolute path" in line
    assert len(cnr_store.versions(store)) == 1


def test_storage_options_that_are_no_mapping(store: Path) -> None:
    model = torch.nn.ModuleDict({"größe": torch.nn.Embedding(1000, 16)})
    for options in ("x", ["x"], 3):
        with pytest.raises(ValueError, match="storage_options must map names to values"):
            cnr_store.Checkpointer(store, model, storage_options=options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="storage_options must map names to values"):
            cnr_store.load(store, model, storage_options=options)


@pytest.mark.parametrize("columns", [None, "40"])
def test_tables_are_printed_as_rich_prints_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    cells = {"step": ["1", "12,000"], "metadata": ["größe=[red]漢字" * 5, ""], "health": ["ok", "ok"]}
    print_line(table(cells))
    found = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    shown = io.StringIO()
    expected = Table(box=None, pad_edge=False)
    for name in cells:
        expected.add_column(name, justify="right" if name == "step" else "left", no_wrap=True)
    for row in zip(*cells.values(), strict=True):
        expected.add_row(*(Text(cell or "-") for cell in row))
    Console(file=shown, width=500, force_terminal=False).print(expected)
    assert found == shown.getvalue()
    print_line(table({"step": []}))
    assert "step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_closed_output_changes_nothing(store: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -m cnr_store.cli verify "$1" >&-', sys.executable, str(store)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_report_goes_into_a_pipe(store: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    done = cnr("report", store, "-o", pipe)
    page, _ = reader.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"</html>" in page
    assert stat.S_ISFIFO(pipe.stat().st_mode)
