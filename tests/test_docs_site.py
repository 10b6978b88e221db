"""The built site: each of its links, anchors and images leads to something that was built."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.paths import ROOT

LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.references: list[tuple[str, str, str]] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.references.append((tag, name, value or ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site was built into."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def internal(site: Path, file: Path, page: Page) -> Iterator[tuple[str, Path, str]]:
    """(reference, file, anchor) of each reference to the site itself."""
    for _, _, reference in page.references:
        parts = urlsplit(reference)
        if parts.scheme or parts.netloc:
            continue
        path = unquote(parts.path)
        target = (site / path.lstrip("/") if path.startswith("/") else file.parent / path) if path else file
        yield reference, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


@pytest.mark.slow
def test_every_link_and_image_of_the_site_leads_to_what_was_built(
    site: Path, pages: dict[Path, Page]
) -> None:
    broken, links = [], 0
    for file, page in pages.items():
        for reference, target, anchor in internal(site, file, page):
            links += 1
            found = target.is_file() and (not anchor or anchor in pages[target.resolve()].anchors)
            if not found:
                broken.append(f"{file.relative_to(site)}: {reference}")
    assert links > len(pages)
    assert broken == []


@pytest.mark.slow
def test_the_site_has_every_page_of_the_documentation(site: Path) -> None:
    sources = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in sources if not (site / page.with_suffix(".html")).is_file()] == []


@pytest.mark.slow
def test_the_site_is_searched_without_a_server(site: Path, pages: dict[Path, Page]) -> None:
    """Opened from the folder, a browser fetches no JSON and starts no worker: scripts stand in for both."""
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    for file, page in pages.items():
        scripts = [Path(reference).name for tag, _, reference in page.references if tag == "script"]
        stand_in, bundle = scripts
        assert stand_in == "iframe-worker.js", file
        assert bundle.startswith("bundle."), file


@pytest.mark.slow
def test_the_pages_load_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loaded = [
        (str(file.relative_to(site)), reference)
        for file, page in pages.items()
        for tag, name, reference in page.references
        if (tag, name) in LOADED and urlsplit(reference).netloc
    ]
    assert loaded == []
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", style.read_text()) == []
