"""Every command where its store, the storage or the terminal is not as it should be."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from typer.main import get_command

import cnr_store
from cnr_backends import open_backend
from cnr_store.cli.app import app, main
from tests.nightly import at_night
from tests.plain_http import plain_http
from tests.s3_proxy import SpoiledOptions
from tests.s3_server import S3Server
from tests.test_store.cli.command import COMMANDS, Place, cnr, fill

ALL = [*COMMANDS, "serve", "import"]
"""Every command that takes a store."""
PRINTING = [*COMMANDS, "simulate", "import"]
"""Every command that prints and ends by itself, but `demo` and `warm`: these take long, and have tests of their own."""
WRITING = {
    "compact": ["2"],
    "pin": ["1"],
    "unpin": ["3"],
    "tag": ["new", "1"],
    "untag": ["best"],
    "gc": ["--keep-last", "1"],
}
"""Commands that change a store, with what follows the URL."""
NOBODY = 65534
ON_S3 = pytest.param("S3", marks=pytest.mark.server)
FOLDER_BY_DAY = ["folder", pytest.param("S3", marks=[pytest.mark.server, pytest.mark.nightly])]
"""Places of a test that both pass alike, since what it asks begins where the storage has answered."""


def _names(all_names: Iterable[str], by_day: str) -> list[Any]:
    """Commands, of which those not named are tried at night."""
    return [name if name in by_day.split() else at_night(name) for name in all_names]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a table, of which the older one is tagged."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    with cnr_store.Checkpointer(folder, _model()) as checkpointer:
        checkpointer.save(1, metadata={"auc": 0.75, "loss": float("nan")}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    cnr_store.tag(folder, "best", 1)
    return folder


@pytest.fixture(params=["folder", ON_S3])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place of its own, in which nothing is yet."""
    if request.param == "folder":
        return Place(str(tmp_path / "place"), {})
    server: S3Server = request.getfixturevalue("s3_server")
    return Place(server.url(uuid.uuid4().hex), server.storage_options)


@pytest.fixture
def own_store(place: Place, store: Path) -> Place:
    """A copy of the store, to change."""
    source, target = open_backend(store), place.backend
    for key, _ in source.list_keys(""):
        target.put(key, source.get(key))
    return place


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))


def _on(name: str, place: Place, folder: Path) -> list[str]:
    """A command on a place."""
    return [*_arguments(name, place.url, folder), *(place.options if name != "simulate" else [])]


def _arguments(name: str, url: object, folder: Path) -> list[str]:
    if name == "simulate":
        return ["simulate", "--rows", "100", "--saves", "4", "--accesses", "50"]
    if name == "import":
        file = folder / "model.pt"
        torch.save(_model().state_dict(), file)
        return ["import", str(file), str(url)]
    return [name, str(url), *fill({**COMMANDS, "serve": ["--port", "0"]}[name], folder)]


def _is_one_line(told: tuple[int, str, str], says: str) -> None:
    status, out, err = told
    assert (status, out) == (1, "")
    assert re.fullmatch(r"cnr: [^\n]+\n", err)
    assert re.search(says, err), err


# The storage


ONCE = {"retries": {"total_max_attempts": 1}, "read_timeout": 1}
NOWHERE = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}


@pytest.mark.slow
@pytest.mark.parametrize("name", _names(ALL, "ls tag export serve"))
def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("s3fs")
    down = Place("s3://bucket/store", {**NOWHERE, "config_kwargs": ONCE})
    told = cnr(capsys, *_on(name, down, tmp_path))
    _is_one_line(told, r"s3://bucket/store.*Could not connect.*check that the server is up")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", _names(ALL, ""))
def test_a_server_that_is_down_is_not_asked_for_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """With the pauses and the repetitions that are there by default."""
    pytest.importorskip("s3fs")
    told = cnr(capsys, *_on(name, Place("s3://bucket/store", NOWHERE), tmp_path))
    _is_one_line(told, r"s3://bucket/store.*Could not connect.*check that the server is up")


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", _names(ALL, "ls gc"))
def test_a_server_that_never_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spoiled: SpoiledOptions, name: str
) -> None:
    with spoiled(lambda number, method: "hang") as options:
        silent = Place("s3://cnr-tests/store", {**options, "config_kwargs": ONCE})
        told = cnr(capsys, *_on(name, silent, tmp_path))
    _is_one_line(told, r"s3://cnr-tests/store.*[Tt]imeout.*check that the server is up")


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.parametrize("name", _names(WRITING, "compact tag gc"))
@pytest.mark.parametrize("place", [ON_S3], indirect=True)
def test_a_store_on_s3_that_one_may_only_read(
    capsys: pytest.CaptureFixture[str], s3_server: S3Server, own_store: Place, name: str
) -> None:
    cnr_store.save(own_store.backend, _model(), step=3)
    cnr_store.pin(own_store.backend, 3)
    before = sorted(own_store.backend.list_keys(""))
    reader = Place(own_store.url, s3_server.reader_options)
    told = cnr(capsys, name, own_store.url, *WRITING[name], *reader.options)
    _is_one_line(told, "PermissionError.*check the credentials")
    assert sorted(own_store.backend.list_keys("")) == before
    assert cnr(capsys, "ls", own_store.url, *reader.options)[0] == 0


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.parametrize("place", [ON_S3], indirect=True)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tag", r"is tagged 'new', but a pin .* stays \(delete of 'pins/.*PermissionError.*`cnr unpin`"),
        ("untag", "delete of 'tags/best' failed .*PermissionError.*check the credentials"),
        ("unpin", "delete of 'pins/.* failed .*PermissionError.*check the credentials"),
    ],
)
def test_a_store_that_refuses_deletes(
    capsys: pytest.CaptureFixture[str], own_store: Place, spoiled: SpoiledOptions, name: str, says: str
) -> None:
    cnr_store.save(own_store.backend, _model(), step=3)
    cnr_store.pin(own_store.backend, 3)
    with spoiled(lambda number, method: "403" if method == "DELETE" else None) as options:
        refusing = Place(own_store.url, options)
        _is_one_line(cnr(capsys, name, refusing.url, *WRITING[name], *refusing.options), says)
    new = {"new"} if name == "tag" else set()
    assert cnr_store.tags(own_store.backend).keys() == {"best"} | new


@pytest.mark.parametrize("name", _names(["cat", "diff", "repair", "export", "compact"], "cat"))
def test_a_server_that_ignores_ranges(
    capsys: pytest.CaptureFixture[str], store: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("aiohttp")
    with plain_http(store) as url:
        assert cnr(capsys, "ls", url)[0] == 0
        _is_one_line(cnr(capsys, *_arguments(name, url, tmp_path)), "the server ignores Range requests")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may do everything, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_store(store: Path) -> Iterator[Path]:
    """A copy that others may reach: pytest's own folders are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(store, Path(folder, "store")))


@pytest.mark.parametrize("name", _names(ALL, "ls verify export serve import"))
def test_a_store_that_one_may_not_read(
    capsys: pytest.CaptureFixture[str], public_store: Path, name: str
) -> None:
    arguments = _arguments(name, public_store, public_store.parent)
    cnr(capsys, "ls", str(public_store))  # all is imported before files of others may not be read any more
    import_module("cnr_store.reading.server")  # by `cnr serve` alone
    public_store.chmod(0o000)
    with _as_nobody():
        told = cnr(capsys, *arguments)
    public_store.chmod(0o755)
    _is_one_line(told, "Permission denied")
    assert str(public_store) in told[2]


@pytest.mark.parametrize("name", _names(WRITING, "compact tag gc"))
def test_a_store_that_one_may_only_read(
    capsys: pytest.CaptureFixture[str], public_store: Path, name: str
) -> None:
    cnr_store.save(public_store, _model(), step=3)
    cnr_store.pin(public_store, 3)
    before = sorted(public_store.rglob("*"))
    cnr(capsys, "ls", str(public_store))
    with _as_nobody():
        told = cnr(capsys, name, str(public_store), *WRITING[name])
    _is_one_line(told, "Permission denied")
    assert sorted(public_store.rglob("*")) == before


# The store


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("name", _names(COMMANDS, "compact gc repair"))
def test_a_store_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, place: Place, name: str) -> None:
    with cnr_store.Checkpointer(place.backend, _model()) as checkpointer:
        for step in (1, 2):
            checkpointer.touch("0", [step])
            checkpointer.save(step).result()
        status, _, err = cnr(capsys, *_on(name, place, tmp_path))
        assert (status, err) == (0, "")
        checkpointer.touch("0", [3])
        assert checkpointer.save(3).result().kind == "delta"
    assert cnr_store.verify(place.backend, deep=True).ok


DAMAGED_STATUS = {"ls": 3, "report": 3, "verify": 3, "du": 0, "watch": 0, "untag": 0}
"""Of the commands that show the rest beside a record that can't be read, or need none."""


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("name", _names(COMMANDS, "info cat du gc tag untag watch"))
def test_a_store_whose_newest_record_is_cut_off(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Place, name: str
) -> None:
    backend = own_store.backend
    newest = cnr_store.versions(backend)[-1].id
    record = f"versions/{newest}/zarr.json"
    backend.put(record, backend.get(record)[:-20])
    told = cnr(capsys, *_on(name, own_store, tmp_path))
    if name in DAMAGED_STATUS:
        assert told[0] == DAMAGED_STATUS[name]
        assert name in ("untag", "du") or newest in told[1] + told[2]
    else:
        _is_one_line(told, newest)


@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
@pytest.mark.parametrize("name", _names(ALL, "ls gc tag untag serve import"))
@pytest.mark.parametrize(
    "document",
    [at_night(b""), at_night(b"\x00\xff"), b'{"zarr_format":3,"node_type":"group","attributes":{}}'],
)
def test_a_place_that_holds_something_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: Place, name: str, document: bytes
) -> None:
    place.backend.put("zarr.json", document)
    _is_one_line(cnr(capsys, *_on(name, place, tmp_path)), re.escape(place.url))
    assert [key for key, _ in place.backend.list_keys("")] == ["zarr.json"]


# The terminal


@contextmanager
def _output(stream: IO[bytes], encoding: str = "utf-8") -> Iterator[None]:
    """Standard output of this process."""
    text, before = io.TextIOWrapper(stream, encoding), sys.stdout
    sys.stdout = text
    try:
        yield
    finally:
        sys.stdout = before
        text.close()  # by now what it still holds goes nowhere


def _ends(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
@pytest.mark.parametrize("name", _names(PRINTING, "ls cat report simulate"))
def test_a_pipe_that_nobody_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Place, name: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = _on(name, own_store, tmp_path)
    with _output(os.fdopen(writing, "wb")):
        assert _ends(arguments) == 1
        assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
@pytest.mark.parametrize("name", _names(PRINTING, "ls cat report simulate"))
def test_output_on_a_full_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_store: Place, name: str
) -> None:
    arguments = _on(name, own_store, tmp_path)
    with _output(Path("/dev/full").open("wb")):
        assert _ends(arguments) == 1
    err = capsys.readouterr().err
    assert err == "cnr: the output could not be written: [Errno 28] No space left on device\n"


FITTING = frozenset({"ls", "info", "diff", "watch", "simulate"})
"""Commands whose tables go without columns. The first table of `du` has the same three on every terminal."""


@pytest.mark.parametrize("place", FOLDER_BY_DAY, indirect=True)
@pytest.mark.parametrize("name", _names(PRINTING, "ls info du diff gc watch simulate"))
def test_a_terminal_of_40_columns_that_knows_ascii(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    own_store: Place,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    arguments, bars = _on(name, own_store, tmp_path), io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(bars, "ascii", "backslashreplace", write_through=True))
    status, shown = _shown(arguments)
    assert status == 0
    assert b"\\" not in bars.getvalue()
    assert "\\" not in shown
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown).splitlines()
    assert lines
    sentences = re.compile(r"[^ ]+: |\d+ (versions|saves|of)\b|policy  |budget  ")
    if name in FITTING:
        assert [line for line in lines if len(line) > 40 and not sentences.match(line)] == []


def _shown(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status, and what a terminal that knows ASCII shows."""
    kept = io.BytesIO()
    with _output(kept, "ascii"):
        status = _ends(arguments)
        return status, kept.getvalue().decode("ascii")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, at_night(80)])
def test_help_cuts_no_name_of_an_option(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        status, shown = _shown([name, "--help"])
        assert status == 0
        assert "\\" not in shown
        assert {each for option in command.params for each in option.opts if each.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", shown)
        )
