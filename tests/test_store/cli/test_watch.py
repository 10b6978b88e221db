"""`cnr watch`: the figures of a store in the terminal, until Ctrl-C."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import health
from cnr_store.cli.report import watch
from tests.test_store.cli.command import cnr
from tests.test_store.support.damaged_store import SavedStore

_WAIT_SECONDS = 120


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Two versions of a table whose name would colour a terminal."""
    url = str(tmp_path / "store")
    model = torch.nn.ModuleDict({"red\x1b[31m": torch.nn.EmbeddingBag(1000, 8, sparse=True)})
    with cnr_store.Checkpointer(url, model, None) as checkpointer:
        checkpointer.save(10, metadata={"name": "\x1b[31mred"}).result()
        checkpointer.touch("red\x1b[31m", range(100))
        checkpointer.save(20).result()
    return url


def test_once_prints_and_ends(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, err = cnr(capsys, "watch", store, "--once")
    assert (status, err) == (0, "")
    for expected in ("2 versions, ", "100 (10 %)", "restore reads", "2 of 2 versions can be restored"):
        assert expected in out, expected
    assert re.search(r"red\\x1b\[31m +█▁ +10 % ", out)
    assert "name=\\x1b[31mred" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_holds_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    out = re.sub(r"\x1b\[[\d;]*m", "", cnr(capsys, "watch", store, "--once")[1])
    tables = out.splitlines()[1:-1]
    assert max(map(len, tables)) <= columns
    assert len(tables) == 11


@pytest.mark.slow
def test_a_terminal_that_knows_few_letters(store: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cnr_store.cli", "watch", store, "--once"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        timeout=_WAIT_SECONDS,
    )
    assert b"@.   " in done.stdout
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout


def test_it_says_what_is_damaged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=3)
    (saved.folder / "versions" / saved.ids[1] / "zarr.json").unlink()
    out = cnr(capsys, "watch", str(saved.folder), "--once")[1]
    assert out.splitlines()[-1].startswith("1 of 2 versions can be restored")
    assert f"{saved.ids[2]}: can't be restored" in out


def test_an_interval_of_no_time_is_wrong_usage(capsys: pytest.CaptureFixture[str], store: str) -> None:
    assert cnr(capsys, "watch", store, "--interval", "0")[0] == 2


@contextmanager
def _watching(store: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "cnr_store.cli", "watch", store, "--interval", "0.2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=_WAIT_SECONDS)


def _read_until(process: subprocess.Popen[bytes], expected: bytes) -> bytes:
    """What it prints up to some words."""
    assert process.stdout is not None
    found, end = b"", time.monotonic() + _WAIT_SECONDS
    while expected not in found:
        ready, _, _ = select.select([process.stdout], [], [], max(0, end - time.monotonic()))
        data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        assert data, found.decode()
        found += data
    return found


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_new_version_appears_and_ctrl_c_ends_it(store: str, terminal: bool) -> None:
    environment = {"FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "50"} if terminal else {}
    with _watching(store, **environment) as process:
        _read_until(process, b"2 of 2 versions can be restored")
        cnr_store.save(store, torch.nn.EmbeddingBag(1000, 8), step=30)
        _read_until(process, b"3 of 3 versions can be restored")
    assert process.returncode == 0


@pytest.mark.slow
def test_a_store_that_is_gone_for_a_while_is_told(store: str) -> None:
    with _watching(store) as process:
        _read_until(process, b"2 of 2 versions can be restored")
        Path(store).rename(f"{store}-away")
        assert process.stderr is not None
        assert b"holds no store" in process.stderr.readline()
        Path(f"{store}-away").rename(store)
        cnr_store.save(store, torch.nn.EmbeddingBag(1000, 8), step=30)
        _read_until(process, b"3 of 3 versions can be restored")
    assert process.returncode == 0


def test_each_look_reads_anew(tmp_path: Path) -> None:
    saved = SavedStore(tmp_path, "consecutive", versions=2)
    catalog = Catalog(open_backend(tmp_path))
    assert [health(facts) for facts in watch._look(catalog).versions] == ["not verified", "not verified"]
    (tmp_path / "versions" / saved.ids[1] / "zarr.json").write_bytes(b"{}")
    assert [health(facts) for facts in watch._look(catalog).versions] == ["not verified", "damaged"]
