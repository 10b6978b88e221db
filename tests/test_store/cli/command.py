"""The command `cnr`, run in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from cnr_backends import Backend, open_backend
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


@dataclass(frozen=True)
class Place:
    """Where a store is or will be, and how to open it."""

    url: str
    storage_options: dict[str, Any]

    @property
    def options(self) -> list[str]:
        """How the command line opens it."""
        return ["--storage-options", json.dumps(self.storage_options)] if self.storage_options else []

    @cached_property
    def backend(self) -> Backend:
        return open_backend(self.url, **self.storage_options)


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
