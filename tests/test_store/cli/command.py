"""The command `cnr`, run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cnr_store.cli.app import main

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


def cnr(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def fill(arguments: Sequence[str], folder: Path) -> list[str]:
    """Arguments with a new path in a folder for each `TARGET`."""
    new = str(folder / f"{len(list(folder.iterdir()))}.safetensors")
    return [new if each == TARGET else each for each in arguments]
