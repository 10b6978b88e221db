"""Several processes that make up a process group, each of which runs the same checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.paths import ROOT

SECONDS = 300


@contextmanager
def group(store: str, rank: int, world: int) -> Iterator[None]:
    """A process group over the file `store`, torn down after."""
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(module: str, world: int, folder: Path) -> None:
    """Run a module of checks as `world` processes, which must all end well.

    Parameters
    ----------
    module
        Ends with ``run_checks``.
    world
        How many processes.
    folder
        An empty one for what they share and print.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    running = []
    for rank in range(world):
        command = [sys.executable, "-W", "ignore", "-m", module, str(folder / "store"), str(rank), str(world)]
        with (folder / f"rank{rank}").open("w") as output:
            running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output))
    try:
        ended = [process.wait(SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    printed = [(folder / f"rank{rank}").read_text()[-5000:] for rank in range(world)]
    assert ended == [0] * world, "\n".join(printed)


def run_checks(checks: Mapping[str, Callable[[], None]]) -> None:
    """In such a process: run the checks in their order, and end the process."""
    _, store, rank, world = sys.argv
    with group(store, int(rank), int(world)):
        for name, check in checks.items():
            print(name, flush=True)
            check()
    # Threads of torch that TorchRec's models keep alive may want the interpreter's lock while it ends, and then
    # abort the process ("terminate called without an active exception"). Children of `multiprocessing` end like this.
    sys.stdout.flush()
    os._exit(0)
