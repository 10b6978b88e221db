"""Filesystems of a few megabytes, to be filled up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ["tmpfs", "ext4"]
PIECES_BYTES = (1 << 20, 4096, 1)


@contextmanager
def small_disk(kind: str, folder: Path, mebibytes: int = 8) -> Iterator[Path]:
    """Mount a new filesystem, of memory or of an image in a file. Skips the test where that is not allowed."""
    place = folder / "disk"
    place.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs"]
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(mebibytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", "-F", str(image))  # without blocks that only root may use
        command = ["mount", "-o", "loop", str(image)]
    _run(*command, str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]}")
    if done.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {done.stderr.strip()}")


def fill(place: Path) -> Path:
    """Take all room that is left on a disk, to the last block, by a file of that name."""
    filler = place / "filler"
    with filler.open("ab", buffering=0) as file:
        for nbytes in PIECES_BYTES:
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(os.urandom(nbytes))
                    os.fsync(file.fileno())
    return filler


def free_bytes(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize
