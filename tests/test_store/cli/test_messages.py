"""Errors of the command line: options as its reader types them, and nothing that a terminal would obey."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_store import OptionError
from tests.test_store.cli.command import cnr

PYTHON = re.compile(r"\b[a-z_]+=|storage_options")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to import, each in the working folder of a user."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"epoch": 3, "model": {"users.weight": torch.zeros(50, 4)}}, folder / "parts.pt")
    torch.save({"net work": {"users.weight": torch.zeros(50, 4)}}, folder / "blank.pt")
    torch.save({"wide": torch.zeros(3, dtype=torch.complex128)}, folder / "wide.pt")
    torch.save({"queue": deque()}, folder / "code.pt")
    (folder / "there.safetensors").touch()
    (folder / "there.zarr").mkdir()
    (folder / "there.zarr" / "a").touch()
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("import parts.pt new", "--key model\n"),
        ("import blank.pt new", "--key 'net work'\n"),
        ("import parts.pt new --key net", "nothing under --key net; it holds"),
        ("import there.safetensors new --key net", "nothing under --key net"),
        ("import code.pt new", "it holds a collections.deque"),
        ("import parts.pt new --bits 5", "there is no width 5: give auto, 2"),
        ("export STORE there.safetensors", "replace it with --overwrite; a file"),
        ("export STORE there.zarr", "--overwrite"),
        (
            "export STORE there.zarr --format safetensors --overwrite",
            "another target; a file replaces only a file",
        ),
        ("report STORE -o there.zarr", "another target; a file replaces only a file"),
        ("info users STORE", "; the store's URL comes first"),
        ("tag prod STORE 1", "; the store's URL comes first"),
        ("import STORE parts.pt", "; the file comes first, then the store's URL"),
        ("info --json STORE 17", "list the versions\n"),
        ("export WIDE new.safetensors", "choose --format zarr, or"),
        ("pin STORE 1 --reason \x1b[1mred", "--reason "),
        ("simulate --exponent -1", "--exponent -1.0; give"),
        ("simulate --failure-hours 2 --stall-ms inf", "--stall-ms inf; give"),
        ("simulate --row-bytes 1e30", "--row-bytes 1e+30; give"),
    ],
)
def test_options_are_spelled_as_they_are_typed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    files: Path,
    store: str,
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(files)
    if "WIDE" in arguments:
        cnr_store.import_file("wide.pt", "wide")
    places = {"STORE": store, "WIDE": "wide"}
    status, out, err = cnr(capsys, *(places.get(each, each) for each in arguments.split()))
    text = " ".join(err.replace("\u2502", " ").split()) + "\n"  # wrong usage is told in a frame
    assert (status, out) == (2 if "--bits" in arguments else 1, "")
    assert words in text
    assert not PYTHON.search(text)
    assert "\x1b" not in err


def test_reasons_of_a_dry_run_are_spelled_so_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with cnr_store.Checkpointer(tmp_path, torch.nn.EmbeddingBag(9, 2), policy="full") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step).result()
    status, out, _ = cnr(capsys, "gc", str(tmp_path), "--keep-last", "2", "--dry-run")
    assert status == 0
    assert ": --keep-last 2\n" in out
    assert "keep_last=2" in cnr_store.gc(tmp_path, keep_last=2, dry_run=True).kept.values()


def test_python_is_told_in_python(tmp_path: Path, files: Path, store: str) -> None:
    with pytest.raises(OptionError, match="nothing under key='net'"):
        cnr_store.import_file(files / "parts.pt", tmp_path / "store", key="net")
    with pytest.raises(OptionError, match="replace it with overwrite=True; a file"):
        cnr_store.export(store, files / "there.safetensors")
