"""The pictures of the documentation are those that their scripts draw, and stand in a page with words beside them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import cnr_store
from tests.paths import ROOT
from tools import pictures, screenshots
from tools.browser import NoBrowserError, find_browser, screenshot

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


def _shown() -> dict[Path, str]:
    """The words in place of each picture that a page shows."""
    found = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            found[(page.parent / target).resolve()] = words
    return found


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda each: each.__name__)
def test_a_picture_is_what_its_function_draws(picture: pictures.Picture) -> None:
    svg = picture().svg()
    file = pictures.FOLDER / f"{picture.__name__}.svg"
    assert file.read_text(encoding="utf-8") == svg, "run python -m tools.pictures"
    root = ElementTree.fromstring(svg)
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc") or "") > 50
    assert "prefers-color-scheme:dark" in svg
    assert set(re.findall(r"https?://[^\"']+", svg)) == {"http://www.w3.org/2000/svg"}


def test_each_picture_stands_in_a_page_with_words() -> None:
    shown = _shown()
    assert set(pictures.FOLDER.iterdir()) <= shown.keys()
    assert [path.name for path, words in shown.items() if len(words) < 40] == []


def test_the_picture_of_ls_asks_no_other_host(tmp_path: Path) -> None:
    cnr_store.save(tmp_path, torch.nn.EmbeddingBag(100, 8), step=7)
    for svg in (screenshots.listing(str(tmp_path)), (pictures.FOLDER / "ls.svg").read_text(encoding="utf-8")):
        ElementTree.fromstring(svg)
        assert "baseline" in svg
        assert set(re.findall(r"https?://[^\s\"')]+", svg)) <= {
            "http://www.w3.org/2000/svg",
            "https://www.textualize.io",
        }
        assert "url(http" not in svg.replace(" ", "")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_chromium_shows_all_pictures_without_a_word(tmp_path: Path, dark: bool) -> None:
    try:
        find_browser()
    except NoBrowserError as error:
        pytest.skip(str(error))
    page = tmp_path / "pictures.html"
    page.write_text("".join(f'<img src="{path.as_uri()}">' for path in sorted(pictures.FOLDER.iterdir())))
    assert screenshot(page, tmp_path / "pictures.png", 800, 3000, dark=dark) == []
    assert (tmp_path / "pictures.png").stat().st_size > 50_000, "nearly one colour"
