"""A run that is killed in the middle of a save: `python -m tests.test_store.golden.golden_crash URL PART`.

It goes on from the newest version of a store of the job `pair`, and ends before it puts the first object of its version
whose key holds PART; or, if PART is `create`, before the commit.
"""

from __future__ import annotations

import os
import sys

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import Checkpointer
from tests.test_store.golden.golden_jobs import JOBS


def main() -> None:
    url, part = sys.argv[1:]
    job = JOBS["pair"](3)

    def fault(operation: str, key: str, index: int) -> Fault:
        return "hang" if key.startswith("versions/0") and (operation == part or part in key) else None

    backend = FaultyBackend(open_backend(url), fault, hang=lambda: os._exit(9))
    with Checkpointer(
        backend, job.model, policy="consecutive", bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        checkpointer.load()
        for table in ("users", "ads"):
            job.model.get_parameter(f"{table}.weight").detach()[:5] = 1.5
            checkpointer.touch(table, range(5))
        checkpointer.save(1_000).result()


if __name__ == "__main__":
    main()
