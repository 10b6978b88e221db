"""A save of a rank of a gloo job, with real rows and a real store, whose counts it returns."""

from __future__ import annotations

from typing import Any

from benchmarks.ranks_bench.counting import CountedBackend
from benchmarks.ranks_bench.rows import Model, RealRows, TableShape
from benchmarks.ranks_bench.save import fixed_names, save
from cnr_backends import open_backend
from cnr_store.format import grid
from cnr_store.training.distributed.torch_group import job_group

SIZES = {"TARGET_CHUNK_BYTES": 4 << 10, "TARGET_SHARD_BYTES": 32 << 10, "BLOCK_ROWS": 1 << 9}


def small_model(every: int) -> Model:
    shapes = ((20_011, 16, True), (3_000, 16, False), (9_000, 8, True), (500, 4, False), (2_500, 8, False))
    return Model(tuple(TableShape(number, *shape) for number, shape in enumerate(shapes)), every)


def save_rank(url: str, every: int) -> dict[str, Any]:
    """Save on this rank."""
    for name, size in SIZES.items():
        setattr(grid, name, size)
    group = job_group()
    with fixed_names():
        return save(group, CountedBackend(open_backend(url)), small_model(every), RealRows())
