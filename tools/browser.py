"""Headless Chromium, for tests and screenshots of pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
_TIMEOUT_SECONDS = 120


class NoBrowserError(Exception):
    """There is no Chromium, and what to do."""


def find_browser() -> str:
    """The command of a Chromium: that of ``CNR_CHROMIUM``, or one on the path.

    Raises
    ------
    NoBrowserError
        There is none.
    """
    found = os.environ.get("CNR_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowserError(
            f"none of {', '.join(NAMES)} is on the path: install Chromium, or name one in CNR_CHROMIUM"
        )
    return found


def screenshot(page: Path, target: Path, width: int, height: int, *, dark: bool = False) -> list[str]:
    """Write a picture of a page, and return what its console says.

    Parameters
    ----------
    page, target
        The page, and the PNG to write.
    width, height
        Of the window, in pixels.
    dark
        Whether the reader's system asks for dark pages.
    """
    scheme = 0 if dark else 1
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--user-data-dir={target.parent / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"),
        *(f"--window-size={width},{height}", f"--screenshot={target}", "--enable-logging=stderr"),
    )
    done = subprocess.run(
        [find_browser(), *options, page.resolve().as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_SECONDS,
    )
    shutil.rmtree(target.parent / "profile", ignore_errors=True)
    return re.findall(r"CONSOLE.*", done.stderr)
