"""`cnr report`: one page of records and names, which draws itself and asks nobody for anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import Facts
from cnr_store.cli.report.figures import Figures, read_figures
from cnr_store.cli.report.page import MAX_VERSIONS, page
from tests.s3_server import S3Server
from tests.test_store.cli.command import cnr
from tests.test_store.cli.drawn_page import drawn
from tests.test_store.golden.golden_values import STORES
from tests.test_store.support.damaged_store import SavedStore
from tools.browser import NoBrowserError, find_browser, screenshot

EVIL = "<script>alert(1)</script>"
EVIL_FIGURE = '"><img src=x onerror=alert(2)>'
PAGE_BYTES = 1 << 20
VOID = {"meta", "link", "rect", "path"}


class Page(HTMLParser):
    """The elements of a page, which have to be closed in order, its text, and all that a browser might fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "link"}:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and value != "data:,":
                self.fetched.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six versions of three tables, one of which has an evil name; pinned, tagged and folded ones among them."""
    url = str(tmp_path_factory.mktemp("stores") / "store")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            EVIL: torch.nn.EmbeddingBag(3000, 16, sparse=True),
            "users": torch.nn.EmbeddingBag(2000, 8, sparse=True),
            "top": torch.nn.Linear(16, 1),
        }
    )
    with cnr_store.Checkpointer(url, model, None, policy="consecutive", bits="auto") as checkpointer:
        for step in range(10, 70, 10):
            if step > 10:
                checkpointer.touch(EVIL, range(step))
            checkpointer.save(step, metadata={"auc": step / 100, EVIL_FIGURE: "<b>x</b>"}).result()
    cnr_store.pin(url, 20)
    cnr_store.tag(url, "best", 40)
    cnr_store.compact(url, 50)
    return url


@pytest.fixture(scope="module")
def figures(store: str) -> Figures:
    return read_figures(Catalog(open_backend(store)))


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str) -> Path:
    """The page of the store."""
    target = tmp_path / "report.html"
    status, out, err = cnr(capsys, "report", store, "-o", str(target))
    assert (status, err) == (0, "")
    assert out.startswith(f"{target}: 6 versions, ")
    return target


def _drawn(page: Path | bytes) -> Page:
    """What the script of a page draws."""
    html = page.read_bytes() if isinstance(page, Path) else page
    assert Page(html.decode()).open == []
    return Page(drawn(html.decode())[1])


def test_the_page_stands_alone(written: Path) -> None:
    for found in (Page(written.read_text(encoding="utf-8")), _drawn(written)):
        assert found.open == []
        assert (found.fetched, found.handlers) == ([], [])
        assert not {"img", "iframe"}.intersection(found.tags)
    assert not {"script", "b"}.intersection(found.tags[found.tags.index("h2") :])
    assert found.tags.count("svg") >= 6
    assert "url(" not in written.read_text()
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|innerHTML)\b", written.read_text())


def test_no_script_but_the_templates_own_may_run(written: Path) -> None:
    html = written.read_text(encoding="utf-8")
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert [attributes for attributes, _ in scripts] == [' type="application/json" id="figures"', ""]
    digest = b64encode(sha256(scripts[1][1].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith(f"default-src 'none'; script-src 'sha256-{digest}'; style-src")


def test_names_and_metadata_are_text(written: Path) -> None:
    found = _drawn(written)
    assert EVIL in found.text
    assert f"{EVIL_FIGURE}=<b>x</b>" in found.text
    assert EVIL not in written.read_text(encoding="utf-8")
    assert "<b>x" not in written.read_text(encoding="utf-8")


def test_figures_that_are_no_numbers_are_left_out(figures: Figures) -> None:
    versions: list[Facts] = [
        {**facts, "stalled_seconds": float("nan"), "saved_seconds": None} for facts in figures.versions
    ]
    text = _drawn(page(replace(figures, versions=versions))).text
    assert "typical stall" not in text
    assert "How long a save held training" not in text
    assert "Versions that a restore reads" in text


def test_the_page_tells_what_happened(written: Path) -> None:
    text = _drawn(written).text
    assert drawn(written.read_text(encoding="utf-8"))[0].startswith("Checkpoints of file://")
    for expected in (
        "less than as many full copies",
        "consecutive: changed since the previous",
        "20 to 60",
        "0.01 % of the loss, 0 % spent: steps of 0.0707 of a table's scale",
        "best",
        "pinned",
        "6of 6 versions can be restored",
        "Nothing is damaged",
        "lattice",
        "typical stall",
    ):
        assert expected in text, expected
    assert "prefers-color-scheme:dark" in written.read_text()
    assert "width=device-width" in written.read_text()


def test_figures_are_those_of_ls_and_the_records(
    capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = cnr(capsys, "report", store, "--json")
    doc = json.loads(out)
    assert status == 0
    assert list(tmp_path.iterdir()) == []
    listed = json.loads(cnr(capsys, "ls", store, "--json")[1])
    assert [{name: each[name] for name in listed[0]} for each in doc["versions"]] == listed
    evil, users = doc["tables"]
    assert [evil["name"], evil["rows"], evil["dim"]] == [EVIL, 3000, 16]
    assert evil["shares"] == [1.0, *(step / 3000 for step in range(20, 70, 10))]
    assert users["shares"] == [1.0, 0, 0, 0, 0, 0]
    assert [(each["first_step"], each["last_step"], each["kind"]) for each in doc["decisions"]] == [
        (10, 10, "baseline"),
        (20, 60, "delta"),
    ]


def test_a_restore_reads_its_chain_to_the_fold(figures: Figures, store: str) -> None:
    arrays = [
        sum(entry.nbytes for entry in record.arrays.values() if entry.kind != "dense")
        for record in Catalog(open_backend(store)).oldest_first()
    ]
    reads = [facts["restore_bytes"] for facts in figures.versions]
    sizes = [facts["bytes"] for facts in figures.versions]
    assert reads[:4] == [sizes[at] + sum(arrays[:at]) for at in range(4)]
    assert [facts["chain"] for facts in figures.versions] == [
        1,
        2,
        3,
        4,
        1,
        3,
    ]  # the other table of the last one goes back to the first
    fold = Catalog(open_backend(store)).find_fold(figures.versions[4]["id"])
    assert fold is not None
    rows = sum(entry.nbytes for entry in fold.arrays.values())
    assert reads[4] == sizes[4] - arrays[4] + rows
    assert reads[5] == sizes[5] + rows


def test_records_and_names_alone_are_read(store: str) -> None:
    backend = FaultyBackend(open_backend(store), lambda *_: None, reads=True)
    read_figures(Catalog(backend))
    got = {key for operation, key in backend.log if operation in ("get", "read", "get_range")}
    assert got
    assert {
        key for key in got if not (key.endswith("zarr.json") or key.startswith(("tags/", "pins/")))
    } == set()
    assert not any("/tables/" in key or "/dense/" in key for _, key in backend.log)


def test_the_page_of_many_versions_is_bounded(figures: Figures) -> None:
    many = 2000
    versions: list[Facts] = [
        {**figures.versions[at % 6], "step": at, "metadata": {"x" * 1000: "<" * 1000}} for at in range(many)
    ]
    tables = [replace(figures.tables[0], name="<" * 1000, shares=[at % 7 / 7 for at in range(many)])] * 100
    decisions = [replace(figures.decisions[at % 2], reason="&" * 300) for at in range(many)]
    data = page(replace(figures, versions=versions, tables=tables, table_count=9000, decisions=decisions))
    assert len(data) < PAGE_BYTES
    found = _drawn(data)
    assert found.open == []
    assert found.tags.count("rect") < 10_000
    assert f"The newest {MAX_VERSIONS:,} of 2,000." in found.text
    assert "8,976 more tables" in found.text
    assert "Each bar is the highest of some 8 versions." in found.text


def test_half_a_character_is_no_error(figures: Figures) -> None:
    assert b"\\ud800" in page(replace(figures, url="\ud800"))


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may do everything, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is root's alone
        Path(folder).chmod(0o755)
        url = str(shutil.copytree(store, Path(folder, "store")))
        commands = (["report", url, "-o", str(tmp_path / "r.html")], ["watch", url, "--once"])
        for command in commands:  # all is imported before files of others may not be read any more
            assert cnr(capsys, *command)[0] == 0
        Path(url, "versions").chmod(0o000)
        with _as_nobody():
            told = [cnr(capsys, *command) for command in commands]
        Path(url, "versions").chmod(0o755)
    for status, out, err in told:
        assert (status, out) == (1, "")
        assert re.fullmatch(r"cnr: [^\n]*Permission denied[^\n]*\n", err)


@pytest.mark.some_by_day(12)
@pytest.mark.parametrize("store", sorted(STORES.iterdir()), ids=lambda store: store.name)
def test_golden_stores_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Path) -> None:
    shutil.unpack_archive(store / "store.zip", tmp_path / "store")
    assert cnr(capsys, "watch", str(tmp_path / "store"), "--once")[0] == 0
    found = read_figures(Catalog(open_backend(tmp_path / "store")))
    assert _drawn(page(found)).open == []
    reads = [facts["restore_bytes"] for facts in found.versions if facts["lost_base"] is None]
    assert all(0 < each < 1 << 30 for each in reads)


def test_a_store_without_tables_has_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    cnr_store.save(url, torch.nn.Linear(3, 3), step=3)
    assert cnr(capsys, "report", url, "-o", str(tmp_path / "r.html"))[0] == 0
    assert "Changed rows" not in _drawn(tmp_path / "r.html").text
    assert "changed rows" not in cnr(capsys, "watch", url, "--once")[1]


@pytest.mark.slow
def test_a_damaged_record_is_told_and_the_rest_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=4)
    record = saved.folder / "versions" / saved.ids[1] / "zarr.json"
    record.write_bytes(record.read_bytes()[:-20])
    status, _, err = cnr(capsys, "report", str(saved.folder), "-o", str(tmp_path / "r.html"))
    assert status == 3
    assert saved.ids[1] in err
    text = _drawn(tmp_path / "r.html").text
    assert "1of 4 versions" in text
    assert f"its base {saved.ids[1]} is lost" in text
    for each in saved.folder.glob("versions/*/zarr.json"):
        each.write_bytes(each.read_bytes()[:-20])
    assert cnr(capsys, "report", str(saved.folder), "-o", str(tmp_path / "r.html"))[0] == 3
    assert "0of 4 versions" in _drawn(tmp_path / "r.html").text


@pytest.mark.parametrize("command", ["report", "watch"])
@pytest.mark.parametrize("place", ["empty", "typo", "file", "nothing"])
def test_places_without_a_version_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    store: str,
    place: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    shutil.copy(Path(store) / "zarr.json", tmp_path / "nothing")
    status, out, err = cnr(capsys, command, str(tmp_path / place))
    assert (status, out) == (1, "")
    assert re.fullmatch(r"cnr: [^\n]+\n", err)
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_can_not_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str
) -> None:
    status, out, err = cnr(capsys, "report", store, "-o", str(tmp_path))
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert str(tmp_path) in err


def test_a_page_is_replaced_whole(capsys: pytest.CaptureFixture[str], written: Path, store: str) -> None:
    written.write_text("an older one")
    assert cnr(capsys, "report", store, "-o", str(written))[0] == 0
    assert written.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.server
def test_report_watch_and_pin_of_a_store_on_s3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, s3_server: S3Server
) -> None:
    url, options = s3_server.url(f"report-{uuid.uuid4().hex}"), s3_server.storage_options
    cnr_store.save(url, torch.nn.EmbeddingBag(1000, 8), step=7, storage_options=options)
    opened = ("--storage-options", json.dumps(options))
    assert cnr(capsys, "report", url, "-o", str(tmp_path / "r.html"), *opened)[0] == 0
    assert url in _drawn(tmp_path / "r.html").text
    status, out, _ = cnr(capsys, "watch", url, "--once", *opened)
    assert status == 0
    assert "1 version, " in out
    assert cnr(capsys, "pin", url, "7", "--reason", "why not", *opened)[0] == 0
    assert "pinned: why not" in cnr(capsys, "ls", url, *opened)[1]
    for command in ("report", "watch"):
        assert cnr(capsys, command, f"{url}-none", *opened)[0] == 1


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desktop"])
def test_chromium_shows_the_page_without_a_word(
    written: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    try:
        find_browser()
    except NoBrowserError as error:
        pytest.skip(str(error))
    target = tmp_path / "report.png"
    assert screenshot(written, target, width, 900, dark=dark) == []
    head = target.read_bytes()[:24]
    assert struct.unpack(">II", head[16:]) == (width, 900)
    assert target.stat().st_size > 20_000, "nearly one colour"
