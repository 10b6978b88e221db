"""A version over HTTP, asked by a plain client."""

from __future__ import annotations

import html
import http.client
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer
from cnr_store.reading.server import MAX_ARRAYS, app, index_page, serving
from tests.test_store.chains.test_relative import RELATIVE


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({"t/u": nn.Embedding(700, 8)})
        self.top = nn.Linear(4, 2)


def _make(folder: Path, steps: int) -> None:
    model = Model()
    weight = model.tables["t/u"].weight
    assert isinstance(weight, nn.Parameter)
    with Checkpointer(folder, model, policy="consecutive", codec={"tables.t/u": RELATIVE}) as checkpointer:
        for step in range(steps):
            with torch.no_grad():
                weight[step] += 1
            checkpointer.touch("tables.t/u", [step])
            checkpointer.save(step).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("server")
    _make(place, 3)
    return place


@contextmanager
def _served(folder: Path, version: int | str = "latest") -> Iterator[int]:
    with serving(folder, version) as url:
        address, _, port = url.rpartition(":")
        assert address == "http://127.0.0.1"
        yield int(port)


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with _served(folder) as port:
        yield port


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def key_url(folder: Path) -> str:
    """The URL of the first chunk of the table, whose name needs encoding."""
    (path,) = [path for path in cnr_store.view(folder).keys_below("tables") if path.endswith("weight/c/0/0")]
    return "/" + path.replace("%", "%25")


@pytest.fixture(scope="module")
def chunk(folder: Path, key_url: str) -> bytes:
    overlay = cnr_store.view(folder)
    key = key_url[1:].replace("%25", "%")
    nbytes = overlay.nbytes(key)
    assert nbytes is not None
    return bytes(overlay.read(key, 0, nbytes))


def test_every_object_of_the_overlay_is_served_and_nothing_else(folder: Path, port: int) -> None:
    overlay = cnr_store.view(folder)
    for key in overlay.keys_below(""):
        nbytes = overlay.nbytes(key)
        assert nbytes is not None
        found = ask(port, "/" + key.replace("%", "%25"))
        assert (found.status, found.body) == (200, bytes(overlay.read(key, 0, nbytes)))
        assert found.headers["content-length"] == str(nbytes)
        is_json = key.endswith("zarr.json")
        assert found.headers["content-type"] == (
            "application/json" if is_json else "application/octet-stream"
        )
    for path in (
        "/tables",
        "/tables/",
        "/zarr.json/",
        "//zarr.json",
        "/c/0",
        "/versions/zarr.json",
    ):
        assert ask(port, path).status == 404


EVIL = "<script>alert(1)</script>"


def test_the_root_is_a_page_whose_links_lead_to_the_metadata(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {EVIL: nn.Embedding(5000, 4), "a b": nn.Embedding(50, 4), "100%": nn.Embedding(5, 4)}
    )
    cnr_store.save(tmp_path, model, step=7)
    overlay = cnr_store.view(tmp_path)
    with _served(tmp_path) as port:
        found = ask(port, "/", Origin="https://viewer.example")
        page = found.body.decode()
        assert (found.status, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert found.headers["access-control-allow-origin"] == "*"
        assert found.headers["content-security-policy"].startswith("default-src 'none'")
        assert "step 7" in page
        assert "5,000 × 4" in page
        assert "<script" not in page
        assert html.escape(f"{EVIL}/weight") in page
        links = re.findall(r'href="\./([^"]+)"', page)
        documents = [ask(port, f"/{link}") for link in links]
        assert sorted(each.body for each in documents) == sorted(
            overlay.document(f"tables/{name}/weight")
            for name in ("%3Cscript%3Ealert%281%29%3C%2Fscript%3E", "a%20b", "100%25")
        )
        head = ask(port, "/", "HEAD")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(found.body)))
        again = ask(port, "/", If_None_Match=found.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        assert ask(port, "/", "POST").status == 405
        assert ask(port, "/?a").body == found.body


def test_the_page_of_many_arrays_is_bounded() -> None:
    node = {"node_type": "array", "shape": [1, 2], "data_type": "float32"}
    root = {
        "attributes": {"cnr_version": {"id": "x", "step": 1}},
        "consolidated_metadata": {"metadata": {f"tables/{at}/weight": node for at in range(5000)}},
    }
    page = index_page(json.dumps(root).encode()).decode()
    assert page.count("<tr>") == MAX_ARRAYS + 1
    assert "3,000 more arrays" in page


def test_a_name_may_be_put_into_a_url_without_encoding_it_once_more(
    port: int, key_url: str, chunk: bytes
) -> None:
    assert "%25" in key_url
    assert ask(port, key_url.replace("%25", "%")).body == chunk
    assert ask(port, key_url + "?a=b").body == chunk


def test_a_url_that_may_be_two_objects_is_answered_with_neither(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a b": nn.Embedding(50, 4), "a%20b": nn.Embedding(50, 4)})
    cnr_store.save(tmp_path, model, step=1)
    overlay = cnr_store.view(tmp_path)
    spaced, percent = "tables/a%20b/weight/c/0/0", "tables/a%2520b/weight/c/0/0"
    with _served(tmp_path) as port:
        for key, path in {spaced: spaced, percent: percent.replace("%", "%25")}.items():
            assert ask(port, "/" + path).body == bytes(overlay.read(key, 0, overlay.nbytes(key) or 0))
        for method in ("GET", "HEAD"):
            assert ask(port, "/" + percent, method).status == 409
        assert b"this may be" in ask(port, "/" + percent).body


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/tables/../zarr.json/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%00",
        "/tables/%ff",
        "/file:///etc/passwd",
        "/" + "a" * 5000,
        "/tables/x/weight/c/" + "9" * 5000 + "/0",
    ],
)
def test_nothing_outside_is_reached(port: int, path: str) -> None:
    assert ask(port, path).status == 404


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-99", 10, 100),
        ("bytes=100-", 100, None),
        ("bytes=-7", -7, None),
        ("bytes=-999999999", 0, None),
        ("bytes=5-999999999", 5, None),
        ("Bytes=33-64", 33, 65),
    ],
)
def test_one_range_is_answered_with_that_part(
    port: int, key_url: str, chunk: bytes, wanted: str, start: int, stop: int | None
) -> None:
    expected = chunk[start:stop]
    first = range(len(chunk))[start]
    for method in ("GET", "HEAD"):
        found = ask(port, key_url, method, Range=wanted)
        assert found.status == 206
        assert found.body == (expected if method == "GET" else b"")
        assert found.headers["content-range"] == f"bytes {first}-{first + len(expected) - 1}/{len(chunk)}"
        assert found.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize(
    "wanted",
    ["bytes=0-1,3-4", "bytes=9-3", "bytes=-", "bytes=a-b", "items=0-1", "bytes 0-1", "bytes=0x1-2", ""],
)
def test_what_is_no_single_range_is_ignored(port: int, key_url: str, chunk: bytes, wanted: str) -> None:
    found = ask(port, key_url, Range=wanted)
    assert (found.status, found.body) == (200, chunk)
    assert "content-range" not in found.headers


@pytest.mark.parametrize("wanted", ["bytes=999999999-", "bytes=999999999-1999999999", "bytes=-0"])
def test_a_range_beyond_the_end_can_not_be_satisfied(
    port: int, key_url: str, chunk: bytes, wanted: str
) -> None:
    found = ask(port, key_url, Range=wanted)
    assert (found.status, found.body) == (416, b"")
    assert found.headers["content-range"] == f"bytes */{len(chunk)}"


def test_an_object_that_is_known_is_not_sent_again(port: int, key_url: str, chunk: bytes) -> None:
    found = ask(port, key_url)
    tag = found.headers["etag"]
    assert tag.startswith('"')
    assert found.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = ask(port, key_url, If_None_Match=known)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert ask(port, key_url, If_None_Match='"other"').body == chunk
    assert ask(port, "/zarr.json").headers["etag"] != tag


def test_a_part_is_sent_only_of_the_object_that_is_known(port: int, key_url: str, chunk: bytes) -> None:
    tag = ask(port, key_url, "HEAD").headers["etag"]
    assert ask(port, key_url, Range="bytes=0-3", If_Range=tag).body == chunk[:4]
    assert ask(port, key_url, Range="bytes=0-3", If_Range='"other"').body == chunk


@pytest.mark.slow
def test_tags_are_of_the_version(folder: Path, port: int, key_url: str) -> None:
    latest = ask(port, key_url, "HEAD").headers["etag"]
    with _served(folder) as again:
        assert ask(again, key_url, "HEAD").headers["etag"] == latest
    with _served(folder, 1) as older:
        assert ask(older, key_url, "HEAD").headers["etag"] != latest


def test_a_head_is_answered_without_reading(folder: Path, key_url: str, chunk: bytes, tmp_path: Path) -> None:
    _make(tmp_path, 1)
    with _served(tmp_path) as port:
        for shard in (tmp_path / "versions").glob("*/tables/*/weight/c/0/0"):
            shard.unlink()
        found = ask(port, key_url, "HEAD")
        assert (found.status, found.body, found.headers["content-length"]) == (200, b"", str(len(chunk)))
        lost = ask(port, key_url)
        assert lost.status == 500
        assert b"log" in lost.body
        assert str(tmp_path).encode() not in lost.body
        shutil.rmtree(tmp_path / "versions")
        assert (
            ask(port, key_url).status == 410
        )  # clients would ask again after 500, and take 404 for fill values


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(port: int, method: str) -> None:
    found = ask(port, "/zarr.json", method)
    assert found.status == 405
    assert set(found.headers["allow"].replace(" ", "").split(",")) == {"GET", "HEAD"}


def test_web_pages_may_read(port: int, key_url: str) -> None:
    found = ask(port, key_url, Origin="https://viewer.example", Range="bytes=0-3")
    assert found.headers["access-control-allow-origin"] == "*"
    assert "ETag" in found.headers["access-control-expose-headers"]
    asked = ask(
        port,
        key_url,
        "OPTIONS",
        Origin="https://viewer.example",
        Access_Control_Request_Method="GET",
        Access_Control_Request_Headers="range",
    )
    assert asked.status == 200
    assert "Range" in asked.headers["access-control-allow-headers"]


def test_latest_is_the_version_that_was_latest_at_the_start(tmp_path: Path, key_url: str) -> None:
    _make(tmp_path, 1)
    with _served(tmp_path) as port:
        before = ask(port, key_url).body
        _make(tmp_path, 2)
        assert ask(port, key_url).body == before
    values = np.frombuffer(before, "<f4").reshape(-1, 8)[:700]
    first = cnr_store.versions(tmp_path)[0]
    np.testing.assert_array_equal(values, cnr_store.state_dict(tmp_path, first)["tables.t/u.weight"])


def test_an_empty_store_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(cnr_store.EmptyStoreError):
        app(tmp_path)
    with pytest.raises(cnr_store.EmptyStoreError), serving(tmp_path):
        raise AssertionError("there is nothing to serve")


def test_a_port_that_is_taken_is_an_error_at_once(folder: Path, port: int) -> None:
    with pytest.raises(OSError, match="in use"), serving(folder, port=port):
        raise AssertionError("somebody else is served there")


@pytest.mark.slow
def test_without_the_extra_the_error_says_what_to_install() -> None:
    script = "import sys; sys.modules['starlette'] = None; import cnr_store.reading.server"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert "pip install 'cnr-store[serve]'" in found.stderr
