"""A relay before a server, that counts what goes through it, whoever the client is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_REQUEST_END = b" HTTP/1.1\r\n"


class Relay:
    """Counts of one relay. `port` is where clients connect."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests = 0
        self.nbytes = 0
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Begin counting again."""
        with self._lock:
            self.requests = self.nbytes = 0

    def pump(self, source: socket.socket, target: socket.socket, *, asks: bool) -> None:
        """Pass on what comes until the connection ends. Requests for reading have no body to be mistaken for one."""
        with suppress(OSError):
            while data := source.recv(1 << 20):
                with self._lock:
                    self.requests += data.count(_REQUEST_END) if asks else 0
                    self.nbytes += 0 if asks else len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """Relay to a server on this machine until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        relay = Relay(listening.getsockname()[1])
        threading.Thread(target=_accept, args=(listening, relay, port), daemon=True).start()
        try:
            yield relay
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, relay: Relay, port: int) -> None:
    with suppress(OSError):  # the listening socket was closed
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for source, target, asks in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=relay.pump, args=(source, target), kwargs={"asks": asks}, daemon=True
                ).start()
