"""A proxy that stands between a client and the S3 server and spoils some answers."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from tests.conftest import S3Server

# Of a request's number and method: None to pass it on, "lose" to pass it on and hang up instead of answering, or
# the code of an error to answer with at once.
Spoil: TypeAlias = Callable[[int, str], str | None]
SpoiledOptions: TypeAlias = Callable[[Spoil], Any]

_CONFLICT = (
    b"<?xml version='1.0'?><Error><Code>ConditionalRequestConflict</Code><Message>A conflicting operation "
    b"occurred.</Message></Error>"
)


@pytest.fixture
def spoiled(s3_server: S3Server) -> SpoiledOptions:
    """Return a context manager that yields storage options leading through a spoiling proxy."""

    @contextmanager
    def through(spoil: Spoil) -> Iterator[dict[str, Any]]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(s3_server.port, spoil))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield {**s3_server.storage_options, "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    return through


def _handler(port: int, spoil: Spoil) -> type[BaseHTTPRequestHandler]:
    writes = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fate = spoil(next(writes), self.command) if self.command == "PUT" else None
            if fate == "409":
                self.answer(409, [("Content-Type", "application/xml")], _CONFLICT)
                return
            answer = self.ask(body)
            if fate == "lose":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.answer(*answer)

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            data = response.read()
            connection.close()
            skipped = ("content-length", "transfer-encoding", "connection")
            return response.status, [h for h in response.getheaders() if h[0].lower() not in skipped], data

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

        do_GET = do_PUT = forward  # noqa: N815 - http.server's names

    return Handler
