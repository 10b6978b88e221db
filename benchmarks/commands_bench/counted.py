"""One command in a process of its own: `python -m benchmarks.commands_bench.counted DELAY_SECONDS NAME ARGUMENT...`.

NAME is cnr, or a peer: `list` lists all objects beneath a URL, `read` reads the records of all versions. Each request
to the server is counted, and sent after DELAY_SECONDS. The last line of standard error is JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import s3fs
from aiobotocore.client import AioBaseClient

from cnr_store.cli.app import main as cnr


def _count(delay_seconds: float) -> Counter[str]:
    """Count requests from now on, by operation, and delay each."""
    found: Counter[str] = Counter()
    call = AioBaseClient._make_api_call

    async def counted(client: Any, operation: str, arguments: Any) -> Any:
        found[operation] += 1
        await asyncio.sleep(delay_seconds)
        return await call(client, operation, arguments)

    AioBaseClient._make_api_call = counted
    return found


def _cnr(*arguments: str) -> int:
    try:
        cnr(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _list(url: str, options: str) -> int:
    return 0 if _open(options).find(url, detail=True) else 1


def _read(url: str, options: str) -> int:
    filesystem = _open(options)
    versions = filesystem.ls(f"{url}/versions", detail=False)
    keys = [f"{each}/zarr.json" for each in versions if not each.endswith(".json")]
    # `cat` would ask of each whether it is a folder.
    return 0 if filesystem.cat_ranges(keys, [0] * len(keys), [1 << 30] * len(keys), on_error="raise") else 1


def _open(options: str) -> Any:
    return s3fs.S3FileSystem(**json.loads(options), use_listings_cache=False)


def _peak_mib() -> float:
    """The most memory of this process. `getrusage` would count what its parent had when it was started."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


NAMES: dict[str, Callable[..., int]] = {"cnr": _cnr, "list": _list, "read": _read}


def main(delay_seconds: str, name: str, *arguments: str) -> None:
    """Run, and say on standard error what it took."""
    requests, began, cpu_began = _count(float(delay_seconds)), time.perf_counter(), time.process_time()
    status = NAMES[name](*arguments)
    took = {
        "status": status,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "peak_mib": _peak_mib(),
        "requests": dict(requests),
    }
    print("\n" + json.dumps(took), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
