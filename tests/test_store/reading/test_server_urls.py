"""Names of arrays whose percent-encoding HTTP clients rewrite, over HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pytest
import torch
import uvicorn
import zarr
from starlette.applications import Starlette
from starlette.routing import Mount
from torch import nn
from zarr.storage import FsspecStore

import cnr_store
from cnr_store.format.layout import dense_path, table_name, weight_path
from cnr_store.reading.server import app, serving
from tests.test_store.reading.test_server import ask
from tests.test_store.support.zarr_nodes import values_of

NAMES = [
    *(f"a{character}b" for character in " :@!$'()*,;=&+~|^[]{}<>\"`\\#?%é\u0301"),
    *("a%2Fb", "%41", "%3A", "user:item", "cross(a,b)", "__a", "zarr", "c"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A store of arrays, and by an array's path the number that all its values are."""
    model = nn.ModuleDict({name: nn.Embedding(3, 2) for name in NAMES})
    model["zarr"].register_buffer("json", torch.zeros(3, 2))
    numbers = {}
    for number, (name, values) in enumerate(model.state_dict().items(), 1):
        values.fill_(number)
        is_dense = name == "zarr.json"
        numbers[dense_path("model", name) if is_dense else weight_path(table_name(name))] = number
    folder = tmp_path_factory.mktemp("store")
    cnr_store.save(folder, model, bits=32)
    return folder, numbers


@pytest.fixture(scope="module")
def url(store: tuple[Path, dict[str, int]]) -> Iterator[str]:
    with serving(store[0]) as url:
        yield url


@pytest.mark.slow
def test_clients_that_rewrite_urls_read_every_array(url: str, store: tuple[Path, dict[str, int]]) -> None:
    pytest.importorskip("aiohttp")
    numbers = store[1]
    group = zarr.open_group(FsspecStore.from_url(url, read_only=True), mode="r")
    for path, number in numbers.items():
        assert (values_of(group, path) == number).all(), path
        parent, _, name = path.rpartition("/")
        alone = zarr.open_group(FsspecStore.from_url(f"{url}/{parent}", read_only=True), mode="r")
        assert (values_of(alone, name) == number).all(), path


@pytest.mark.slow
def test_every_spelling_of_a_key_is_answered(url: str, store: tuple[Path, dict[str, int]]) -> None:
    port = int(url.rpartition(":")[2])
    for path, number in store[1].items():
        names = [unquote(name) for name in path.split("/")]
        spellings = {
            path,
            quote(path),
            "/".join(quote(name, safe=":@!$'()*,;=&+") for name in names),
            "/".join("".join(f"%{byte:02x}" for byte in name.encode()) for name in names),
        }
        for spelling in spellings:
            assert ask(port, f"/{spelling}/zarr.json").status == 200, spelling
            found = ask(port, f"/{spelling}/c/0/0")
            assert found.status == 200, spelling
            assert np.frombuffer(found.body[:24], "<f4").tolist() == [number] * 6, spelling
            assert ask(port, f"/{spelling}x/c/0/0").status == 404, spelling


@pytest.mark.slow
def test_an_application_is_mounted_at_a_path_that_is_encoded(store: tuple[Path, dict[str, int]]) -> None:
    mounted = Starlette(routes=[Mount("/a b", app(store[0]))])
    server = uvicorn.Server(uvicorn.Config(mounted, lifespan="off", ws="none", log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            for path in store[1]:
                for spelling in (path, quote(path)):
                    assert ask(listening.getsockname()[1], f"/a%20b/{spelling}/c/0/0").status == 200, spelling
        finally:
            server.should_exit = True
            thread.join()
