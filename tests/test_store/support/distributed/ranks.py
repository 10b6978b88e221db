"""Checks that each rank of a process group runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


@contextmanager
def group(store: str, rank: int, world: int) -> Iterator[None]:
    """A process group over the file `store`, torn down after."""
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_checks(module: str) -> None:
    """On a rank: run a module's `CHECKS` in their order."""
    for name, check in importlib.import_module(module).CHECKS.items():
        try:
            check()
        except BaseException as error:
            error.add_note(f"in the check {name!r}")
            raise
