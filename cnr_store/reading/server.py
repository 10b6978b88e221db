"""A version over HTTP, for tools that know plain Zarr and nothing of this package.

The root is one version as plain Zarr: ``/tables/NAME/weight/zarr.json`` and its chunks. ``/`` itself is a page that
lists its arrays. This needs the extra `serve`.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from typing import Any
from urllib.parse import quote

from cnr_backends import BackendError
from cnr_store.catalog.catalog import Url, Version
from cnr_store.errors import CheckpointError, OptionError, VersionNotFoundError
from cnr_store.format.layout import NODE, decode_name, encode_name
from cnr_store.reading.opening import view
from cnr_store.reading.overlay import BytesLike, Overlay, in_read_thread

_SHUTDOWN_SECONDS = 5
_AMBIGUOUS = (
    "readers that don't encode names in URLs can't tell them apart; read them with cnr_store.open or cnr://"
)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def app(url: Url, version: Version = "latest", **storage_options: Any) -> Starlette:
    """An ASGI application that serves one version read-only. "latest" is resolved at once.

    It answers GET and HEAD, single byte ranges, and entity tags. Every web page may read what it serves (CORS), as
    viewers in browsers need that.

    `url`: any fsspec URL, a path, or a Zarr store.
    `version`: an id, a `VersionInfo`, a step, or ``latest``.
    `storage_options`: for the filesystem, as in fsspec.
    """
    objects = _Objects(view(url, version, **storage_options))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["GET", "HEAD"],
        allow_headers=["Range", "If-Range", "If-None-Match"],
        expose_headers=["Accept-Ranges", "Content-Length", "Content-Range", "ETag"],
    )
    return Starlette(
        routes=[
            Route("/", objects.index, methods=["GET"]),
            Route("/{key:path}", objects.answer, methods=["GET"]),
        ],
        middleware=[cors],
        exception_handlers={CheckpointError: _unreadable, BackendError: _unreadable},
    )


def serve(
    url: Url,
    version: Version = "latest",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    storage_options: Mapping[str, Any] | None = None,
    ready: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve one version until the process is interrupted.

    There is no access control. By default only this machine can connect.

    `url`: any fsspec URL, a path, or a Zarr store.
    `version`: an id, a `VersionInfo`, a step, or ``latest``.
    `host`, `port`: where to listen.
    `storage_options`: for the filesystem, as in fsspec.
    `ready`: called with the port once clients can connect.
    """
    application = app(url, version, storage_options=storage_options)
    server = uvicorn.Server(uvicorn.Config(application, host=host, port=port, lifespan="off", ws="none"))
    with _listening(host, port) as listening, suppress(KeyboardInterrupt):
        ready(listening.getsockname()[1])
        server.run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OptionError(f"can't listen at {host}:{port}: {error}; choose another port or host") from error


@contextmanager
def serving(
    url: Url,
    version: Version = "latest",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Serve one version from a thread until the ``with`` block ends. Yields the address, ``http://HOST:PORT``.

    `url`: any fsspec URL, a path, or a Zarr store.
    `version`: an id, a `VersionInfo`, a step, or ``latest``.
    `host`, `port`: where to listen; port 0 takes a free one.
    `storage_options`: for the filesystem, as in fsspec.
    """
    application = app(url, version, storage_options=storage_options)
    config = uvicorn.Config(application, lifespan="off", ws="none", log_level="warning")
    config.timeout_graceful_shutdown = _SHUTDOWN_SECONDS
    server = uvicorn.Server(config)
    with socket.create_server((host, port)) as listening:
        # Clients that connect before the thread runs wait in the socket's queue.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="cnr-serving")
        thread.start()
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class _Objects:
    """Answers requests for the objects of an overlay."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    async def index(self, request: Request) -> Response:
        """The page for people. Every web page may read it, too, as it may read what is listed."""
        tag = f'"index-{self._overlay.fingerprint(NODE)}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache", "Content-Security-Policy": POLICY}
        if _matches(request.headers.get("If-None-Match"), tag):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(index_page(self._overlay.document("")), headers=headers)

    async def answer(self, request: Request) -> Response:
        candidates = self._candidates(request)
        if not candidates:
            return PlainTextResponse(f"version {self._overlay.version} has no such object\n", 404)
        if len(candidates) > 1:
            return PlainTextResponse(f"this may be {' or '.join(candidates)}: {_AMBIGUOUS}\n", 409)
        ((key, nbytes),) = candidates.items()
        tag = f'"{self._overlay.fingerprint(key)}"'
        # After a restart the same URL may belong to another version, so caches have to ask.
        headers = {"ETag": tag, "Accept-Ranges": "bytes", "Cache-Control": "no-cache"}
        if _matches(request.headers.get("If-None-Match"), tag):
            return Response(status_code=304, headers=headers)
        start, stop, status = 0, nbytes, 200
        if request.headers.get("If-Range", tag) == tag:
            start, stop, status = _parse_range(request.headers.get("Range"), nbytes)
        if status == 416:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{nbytes}"})
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        headers["Content-Length"] = str(stop - start)
        is_json = key.rpartition("/")[2] == NODE
        headers["Content-Type"] = "application/json" if is_json else "application/octet-stream"
        data: BytesLike = b""
        if request.method != "HEAD":
            data = await in_read_thread(lambda: self._overlay.read(key, start, stop))
        return Response(data, status, headers)

    def _candidates(self, request: Request) -> dict[str, int]:
        """Keys of the objects that a URL may stand for, and their sizes in bytes.

        Names in keys are percent-encoded. Some readers put them into a URL as they are, others encode them once
        more, as they should. Where a name looks like another one's encoding, there are two candidates.
        """
        raw: bytes = request.scope.get("raw_path") or b""
        mounted_at = request.scope.get("root_path", "")  # decoded, unlike `raw`
        sent = raw.decode("latin-1").split("/", mounted_at.count("/") + 1)[-1]
        sizes = {
            key: self._overlay.nbytes(key) for key in (request.path_params["key"], _stored_spelling(sent))
        }
        return {key: nbytes for key, nbytes in sizes.items() if nbytes is not None}


def _stored_spelling(sent: str) -> str:
    """The key that a reader put into a URL as it is, of the URL's path.

    Clients rewrite a path: they decode ``%3A``, for one, as it means the same there.
    """
    *names, last = sent.split("/")
    try:
        return "/".join([*(encode_name(decode_name(name)) for name in names), decode_name(last)])
    except ValueError:  # it is not valid Unicode, or too long for a key
        return sent


def _matches(header: str | None, tag: str) -> bool:
    """Whether one of the entity tags of an If-None-Match header is `tag`. Weak tags match, too."""
    tags = [part.strip().removeprefix("W/") for part in (header or "").split(",")]
    return tags == ["*"] or tag in tags


def _parse_range(header: str | None, nbytes: int) -> tuple[int, int, int]:
    """(first byte, the one after the last, status) for a Range header.

    Any header but a single range of bytes is ignored, as HTTP allows (RFC 9110, 14.2).
    """
    match = _RANGE.fullmatch((header or "").strip().lower())
    if match is None or match.group(1, 2) == ("", ""):
        return 0, nbytes, 200
    first, last = match.groups()
    if not first:
        start, stop = max(nbytes - int(last), 0), nbytes
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < start:
            return 0, nbytes, 200
    return (start, stop, 206) if start < nbytes else (0, 0, 416)


async def _unreadable(request: Request, error: Exception) -> Response:
    log.error("%s could not be served: %s", request.url.path, error)
    if isinstance(error, VersionNotFoundError):  # clients repeat what failed with 500
        return PlainTextResponse("the version was removed: serve another one\n", 410)
    return PlainTextResponse("the object can't be read now; the server's log says why\n", 500)


MAX_ARRAYS = 2000
"""Listed one by one."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page's own: nothing runs and nothing is fetched."""
_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:1.5rem auto;"
    "padding:0 1rem}div{overflow-x:auto}table{border-collapse:collapse}th,td{text-align:left;"
    "padding:.3rem 1rem .3rem 0;border-bottom:1px solid #8885}"
)


def index_page(document: bytes) -> bytes:
    """The page of the version whose root document, with all others inside, this is."""
    root = json.loads(document)
    version = root["attributes"]["cnr_version"]
    nodes = root["consolidated_metadata"]["metadata"]
    arrays = {path: node for path, node in nodes.items() if node["node_type"] == "array"}
    title = f"Version {escape(version['id'])}, step {version['step']:,}"
    shown = sorted(arrays, key=lambda path: (not path.startswith("tables/"), path))[:MAX_ARRAYS]
    rows = "".join(_row(path, arrays[path]) for path in shown)
    more = len(arrays) - MAX_ARRAYS
    rest = f"<p>{more:,} more arrays are in {NODE}.</p>" if more > 0 else ""
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>Plain Zarr, read-only. Open the address of this page "
        f'with zarr, xarray or any other reader of Zarr v3. Metadata of all arrays: <a href="{NODE}">{NODE}</a>.</p>'
        "<div><table><thead><tr><th>name</th><th>array</th><th>shape</th><th>type</th><th>metadata</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{rest}</body></html>\n"
    )
    return page.encode("utf-8", "xmlcharrefreplace")


def _row(path: str, node: Mapping[str, Any]) -> str:
    """Names in paths are percent-encoded; a link encodes them once more."""
    names = path.split("/")
    name = "/".join(map(decode_name, names[1:])) if names[0] == "tables" else decode_name(names[-1])
    shape = " × ".join(f"{length:,}" for length in node["shape"]) or "scalar"
    cells = (f"<bdi>{escape(name)}</bdi>", escape(path), shape, escape(str(node["data_type"])))
    link = f'<a href="./{escape(quote(f"{path}/{NODE}"))}">{NODE}</a>'
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (*cells, link))}</tr>"


try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ImportError(
        f"serving needs {error.name}: pip install 'cnr-store[serve]'", name=error.name
    ) from error

log = logging.getLogger("cnr_store")
