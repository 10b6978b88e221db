"""What a server far away can do to us, with a real one."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from cnr_backends import ObjectExistsError, OpenError, StorageError, open_backend
from cnr_backends.clouds import S3Backend
from tests.nightly import at_night

if TYPE_CHECKING:
    from tests.s3_proxy import Spoil, SpoiledOptions
    from tests.s3_server import S3Server

pytestmark = pytest.mark.server


_CREATE = """
import json, sys
from cnr_backends import open_backend
open_backend(sys.argv[1], **json.loads(sys.argv[2])).create("name", b"theirs")
"""


def _new_url(server: S3Server) -> str:
    return server.url(uuid.uuid4().hex)


def first_put(fate: str, times: int = 1) -> Spoil:
    return lambda number, method: fate if method == "PUT" and number < times else None


def test_a_lost_answer_to_a_create_that_landed_is_not_a_failure(
    s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    url = _new_url(s3_server)
    with (
        spoiled(first_put("lose")) as options,
        open_backend(url, **options) as backend,
    ):
        backend.create("name", b"mine")
        with pytest.raises(ObjectExistsError):
            backend.create("name", b"somebody else's")
        assert backend.get("name") == b"mine"


def test_a_lost_answer_to_a_create_that_lost_is_a_failure(
    s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    url = _new_url(s3_server)
    with open_backend(url, **s3_server.storage_options) as backend:
        backend.create("name", b"first")
    with (
        spoiled(first_put("lose")) as options,
        open_backend(url, **options) as backend,
    ):
        with pytest.raises(ObjectExistsError):
            backend.create("name", b"second")
        assert backend.get("name") == b"first"


def test_a_conflict_is_tried_again(s3_server: S3Server, spoiled: SpoiledOptions) -> None:
    with (
        spoiled(first_put("409", times=2)) as options,
        open_backend(_new_url(s3_server), **options) as backend,
    ):
        backend.create("name", b"mine")
        assert backend.get("name") == b"mine"


@pytest.mark.parametrize("code", [at_night("500"), "503"])
def test_a_server_that_is_overloaded_is_asked_again(
    s3_server: S3Server, spoiled: SpoiledOptions, code: str
) -> None:
    with (
        spoiled(lambda number, method: None if number % 2 else code) as options,
        open_backend(_new_url(s3_server), **options) as backend,
    ):
        backend.put("put", b"1")
        backend.create("created", b"2")
        assert backend.get("put") == b"1"
        assert backend.list_names("") == ["created", "put"]
        with pytest.raises(ObjectExistsError):
            backend.create("created", b"3")


def test_a_refused_create_without_an_object_is_no_success(
    s3_server: S3Server, spoiled: SpoiledOptions
) -> None:
    with (
        spoiled(first_put("412")) as options,
        open_backend(_new_url(s3_server), **options) as backend,
    ):
        with pytest.raises(StorageError, match="create of 'name' failed"):
            backend.create("name", b"mine")
        assert backend.list_names("") == []
        backend.create("name", b"mine")


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(("operation", "fate"), [("put", "stall"), ("create", "hang")])
def test_a_request_that_hangs_is_given_up(
    s3_server: S3Server,
    spoiled: SpoiledOptions,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    fate: str,
) -> None:
    monkeypatch.setattr("cnr_backends.remote.SENT_BYTES_PER_SECOND", 1 << 30)
    data = bytes(16 << 20)  # more than lies in the buffers on the way
    with (
        spoiled(first_put(fate, times=3)) as options,
        open_backend(_new_url(s3_server), **options, operation_seconds=4) as backend,
    ):
        with pytest.raises(StorageError, match=f"{operation} of 'name' failed.*more than 4 seconds"):
            getattr(backend, operation)("name", data)
        assert backend.list_names("") == []


def test_a_read_that_hangs_is_given_up(s3_server: S3Server, spoiled: SpoiledOptions) -> None:
    hangs = threading.Event()
    with (
        spoiled(lambda number, method: "hang" if hangs.is_set() else None) as options,
        open_backend(_new_url(s3_server), **options, operation_seconds=4) as backend,
    ):
        backend.put("name", b"value")
        hangs.set()
        with pytest.raises(StorageError, match=r"get of 'name' failed.*more than 4 seconds"):
            backend.get("name")
        hangs.clear()
        assert backend.get("name") == b"value"


@pytest.mark.parametrize("seconds", [0, -1, "5", None, True])
def test_operation_seconds_are_checked(s3_server: S3Server, seconds: Any) -> None:
    with pytest.raises(OpenError, match="operation_seconds"):
        open_backend(_new_url(s3_server), **s3_server.storage_options, operation_seconds=seconds)


def test_own_time_outs_are_kept(s3_server: S3Server) -> None:
    options = {**s3_server.storage_options, "config_kwargs": {"read_timeout": 7}}
    with open_backend(_new_url(s3_server), **options) as backend:
        assert isinstance(backend, S3Backend)
        config = backend._fs.s3._client_config
        assert (config.read_timeout, config.connect_timeout) == (7, 10)


def test_what_another_process_creates_is_seen_and_kept(s3_server: S3Server) -> None:
    url = _new_url(s3_server)
    with open_backend(url, **s3_server.storage_options) as backend:
        assert backend.list_names("") == []
        subprocess.run(
            [sys.executable, "-c", _CREATE, url, json.dumps(s3_server.storage_options)], check=True
        )
        assert backend.list_names("") == ["name"]
        with pytest.raises(ObjectExistsError):
            backend.create("name", b"mine")
        assert backend.get("name") == b"theirs"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own_connection(s3_server: S3Server) -> None:
    with open_backend(_new_url(s3_server), **s3_server.storage_options) as backend:
        backend.put("parent", b"value")
        child = os.fork()
        if child == 0:
            # Whatever happens, the child must not return into pytest.
            try:
                backend.put("child", backend.get("parent"))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert backend.get("child") == b"value"


def test_an_object_sent_in_parts_arrives_whole(s3_server: S3Server) -> None:
    with open_backend(_new_url(s3_server), **s3_server.storage_options) as backend:
        data = np.arange(13 * 2**20, dtype="<u8").tobytes()  # s3fs sends 100 MB and more in parts
        backend.put("large", [data[: 7 * 2**20], data[7 * 2**20 :]])
        assert backend.size("large") == len(data)
        assert backend.get_suffix("large", 16) == data[-16:]
        assert backend.get("large") == data
        backend.delete("large")


def test_the_store_can_be_pickled(s3_server: S3Server) -> None:
    with open_backend(_new_url(s3_server), **s3_server.storage_options) as backend:
        source = zarr.storage.MemoryStore()
        zarr.create_array(source, data=np.arange(4))
        for key, buffer in source._store_dict.items():
            backend.put(key, buffer.to_bytes())
        store = pickle.loads(pickle.dumps(backend.zarr_store()))  # noqa: S301 - our own bytes
        assert store == backend.zarr_store()
        np.testing.assert_array_equal(zarr.open_array(store)[:], np.arange(4))
        store.backend.close()


@pytest.mark.parametrize(
    ("url", "changes", "message"),
    [
        ("s3://no-such-bucket/prefix", {}, "no bucket 'no-such-bucket'; make it"),
        ("s3://", {}, "no bucket or container in the URL"),
        ("s3://cnr-tests/prefix", {"secret": "wrong"}, "check the credentials"),
        ("s3://cnr-tests/prefix", {"key": "nobody"}, "check the credentials"),
        ("s3://cnr-tests/prefix", {"nonsense": 1}, "nonsense.*storage options"),
    ],
)
def test_what_can_not_be_opened_says_why(
    s3_server: S3Server, url: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OpenError, match=message) as caught:
        open_backend(url, **{**s3_server.storage_options, **changes})
    assert s3_server.storage_options["secret"] not in str(caught.value)


def test_a_bucket_that_goes_away_is_not_a_missing_object(s3_server: S3Server) -> None:
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(**s3_server.storage_options, skip_instance_cache=True)
    filesystem.mkdir("short-lived")
    with open_backend("s3://short-lived/prefix", **s3_server.storage_options) as backend:
        filesystem.rmdir("short-lived")
        for call in (lambda: backend.get("name"), lambda: backend.list_names("")):
            with pytest.raises(StorageError, match="no bucket 'short-lived'"):
                call()


def test_a_server_that_is_down_is_an_open_error(s3_server: S3Server, tmp_path: Path) -> None:
    options = {**s3_server.storage_options, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(OpenError, match="check that the server is up"):
        open_backend("s3://cnr-tests/prefix", **options)
