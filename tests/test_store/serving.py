"""A real server in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from cnr_store.reading.server import app


@contextmanager
def served(url: Any, version: Any = "latest", **storage_options: Any) -> Iterator[int]:
    """The port at which a version is served on loopback, until the block ends."""
    application = app(url, version, **storage_options)
    config = uvicorn.Config(
        application, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Who connects before the thread runs waits in the socket's queue.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
