"""A proxy that stands between a client and the S3 server and spoils some answers."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from tests.s3_server import S3Server

# Of a request's method and its number among those of that method: None to pass it on; "lose" to pass it on and hang
# up instead of answering; "hang" never to answer, "stall" not even to read it; or the code of an error to answer
# with at once.
Spoil: TypeAlias = Callable[[int, str], str | None]
SpoiledOptions: TypeAlias = Callable[[Spoil], Any]

_ERRORS = {
    "403": ("AccessDenied", "Access Denied."),
    "409": ("ConditionalRequestConflict", "A conflicting operation occurred."),
    "412": ("PreconditionFailed", "At least one of the pre-conditions you specified did not hold."),
    "500": ("InternalError", "We encountered an internal error. Please try again."),
    "503": ("SlowDown", "Please reduce your request rate."),
}


@contextmanager
def spoiling(server: S3Server, spoil: Spoil) -> Iterator[dict[str, Any]]:
    """Run a proxy before a server; yields the storage options that lead through it."""
    over = threading.Event()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server.port, spoil, over))
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"}
    finally:
        over.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def _handler(port: int, spoil: Spoil, over: threading.Event) -> type[BaseHTTPRequestHandler]:
    numbers = {method: itertools.count() for method in ("GET", "HEAD", "PUT", "DELETE")}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            fate = spoil(next(numbers[self.command]), self.command)
            if fate == "stall":
                over.wait()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fate == "hang":
                over.wait()
                return
            if fate in _ERRORS:
                code, message = _ERRORS[fate]
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
                self.answer(int(fate), [("Content-Type", "application/xml")], text.encode())
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
            skipped: tuple[str, ...] = ("content-length", "transfer-encoding", "connection")
            if self.command == "HEAD":  # the length of what it would be
                skipped = skipped[1:]
            return response.status, [h for h in response.getheaders() if h[0].lower() not in skipped], data

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(OSError):  # the client has given up
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

        do_GET = do_HEAD = do_PUT = do_DELETE = forward  # noqa: N815 - http.server's names

    return Handler
