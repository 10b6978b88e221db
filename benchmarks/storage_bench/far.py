"""A real S3 server, by s3fs and by obstore."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from zarr.storage import ObjectStore

import cnr_store
from benchmarks.codec_bench.timing import race
from cnr_backends import Backend, open_backend
from tests.s3_server import BUCKET, NoServerError, S3Server, serving

MOST_ROWS = 500_000


def measure(rows: int, dim: int, folder: Path) -> dict[str, Any]:
    """Seconds of saving and loading a table with 4 bits; or why not."""
    missing = [name for name in ("s3fs", "obstore") if find_spec(name) is None]
    if missing:
        return {"left out": f"not installed: {', '.join(missing)}"}
    try:
        with serving(folder) as server:
            return _beside_each_other(server, min(rows, MOST_ROWS), dim)
    except NoServerError as error:
        return {"left out": str(error)}


def _beside_each_other(server: S3Server, rows: int, dim: int) -> dict[str, Any]:
    model = nn.Module()
    model.table = nn.Embedding(rows, dim, sparse=True)
    roots = {
        "s3fs": open_backend(server.url("s3fs"), **server.storage_options),
        "obstore": _through_obstore(server, "obstore"),
    }
    with ExitStack() as stack:
        open_ones = {
            name: stack.enter_context(cnr_store.Checkpointer(root, model, policy="full", bits=4))
            for name, root in roots.items()
        }
        saves = {name: partial(_save, each) for name, each in open_ones.items()}
        found = {f"save by {name}, {rows} rows (s)": value for name, value in race(saves, rounds=2).items()}
        loads = {name: each.load for name, each in open_ones.items()}
        found |= {f"load by {name}, {rows} rows (s)": value for name, value in race(loads, rounds=3).items()}
    return found


def _save(checkpointer: cnr_store.Checkpointer) -> None:
    checkpointer.save(0).result()


def _through_obstore(server: S3Server, prefix: str) -> Backend:
    from obstore.store import S3Store

    options = server.storage_options
    store = S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    return open_backend(ObjectStore(store))
