"""How long one and two ranks take to save a TorchRec model, beside torch.distributed.checkpoint with the same model.

Each rank has one thread of torch and one worker. Runs of one and of two ranks take turns, because other work on the
machine moves them all; the best of each counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, if its types do not say so
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

import cnr_store
from benchmarks.codec_bench.targets import Target

MAX_WRITE, MAX_STALL = 0.7, 1.3
_TABLES, _DIM = 4, 64
_ROWS, _QUICK_ROWS = 1 << 19, 1 << 12
_ROUNDS = 3
_SAVES = 3
_SECONDS = 600


def measure(quick: bool) -> dict[str, Any]:
    """The best of each, and ratios beside what they may be at most."""
    rows = _QUICK_ROWS if quick else _ROWS
    load_before = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(1 if quick else _ROUNDS):
        for name, world, each in (("one", 1, rows), ("two", 2, rows), ("two, twice the rows", 2, 2 * rows)):
            found.setdefault(name, []).append(_job(world, each))
    best = {
        name: {peer: _least([run[peer] for run in runs]) for peer in runs[0]} for name, runs in found.items()
    }
    one, two, twice = (best[name]["cnr-store"] for name in ("one", "two", "two, twice the rows"))
    where = f"{rows * _TABLES} rows; of one rank's"
    targets = [
        Target(
            "ranks: time of two ranks to write",
            MAX_WRITE,
            two["write_seconds"] / one["write_seconds"],
            where,
            at_most=True,
        ),
        Target(
            "ranks: stall of two ranks with as many rows each",
            MAX_STALL,
            twice["stall_seconds"] / one["stall_seconds"],
            where,
            at_most=True,
        ),
    ]
    print(json.dumps(best, indent=1), *targets, sep="\n")
    return {
        "rows": rows * _TABLES,
        "model_bytes": rows * _TABLES * (_DIM + 1) * 4,
        "load": [load_before, os.getloadavg()[0]],
        "best": best,
        "targets": [target.to_json() for target in targets],
    }


def _least(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _job(world: int, rows: int) -> dict[str, Any]:
    """Run the ranks, and return what the slowest of them took."""
    with tempfile.TemporaryDirectory(prefix="cnr-ranks-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-W", "ignore", "-m", __name__, folder, str(world), str(rows)]
        running = [
            subprocess.Popen([*command, str(rank)], env=environment, cwd=Path(__file__).parents[2])
            for rank in range(world)
        ]
        try:
            if any(process.wait(_SECONDS) for process in running):
                raise RuntimeError("a rank failed")
        finally:
            for process in running:
                process.kill()
                process.wait()
        ranks = [json.loads((Path(folder) / f"rank{rank}").read_text()) for rank in range(world)]
    return {
        peer: {name: max(rank[peer][name] for rank in ranks) for name in ranks[0][peer]} for peer in ranks[0]
    }


def _sharded(rows: int, world: int) -> DistributedModelParallel:
    names = [f"t{number}" for number in range(_TABLES)]
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=_DIM, num_embeddings=rows, feature_names=[name])
        for name in names
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    ways = {name: row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value) for name in names}
    plan = construct_module_sharding_plan(
        bags, ways, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        torch.nn.ModuleDict({"sparse": bags}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder],
    )


def _run_rank(folder: Path, world: int, rows: int, rank: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "ranks"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = _sharded(rows, world)
    found = {"cnr-store": _ours(folder / "store", model), "DCP": _peer(folder / "dcp", model)}
    (folder / f"rank{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torchrec leaves threads behind


def _ours(folder: Path, model: DistributedModelParallel) -> dict[str, float]:
    stalls, writes = [], []
    with cnr_store.Checkpointer(
        f"file://{folder}", model, [model.fused_optimizer], bits=4, limits=cnr_store.Limits(workers=1)
    ) as checkpointer:
        for step in range(_SAVES):
            dist.barrier()
            pending = checkpointer.save(step, full=True)
            pending.result()
            assert pending.stats is not None
            stalls.append(pending.stats.seconds_stalled)
            writes.append(pending.stats.seconds_writing)
    return {
        "stall_seconds": min(stalls),
        "write_seconds": min(writes),
        "bytes": _bytes(folder) / _SAVES,
    }


def _peer(folder: Path, model: DistributedModelParallel) -> dict[str, float]:
    """FileSystemWriter stalls training until all is written; `async_save` until all is copied."""
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    def save_here(number: int) -> None:
        save(state, storage_writer=FileSystemWriter(folder / f"save{number}"))

    def save_beside(number: int) -> Any:
        return async_save(state, storage_writer=FileSystemWriter(folder / f"beside{number}"))

    writes = [_timed(partial(save_here, number)) for number in range(_SAVES)]
    stalls = []
    for number in range(_SAVES):
        began = time.perf_counter()
        pending = save_beside(number)
        stalls.append(time.perf_counter() - began)
        pending.result()
    return {
        "stall_seconds": min(stalls),
        "write_seconds": min(writes),
        "bytes": _bytes(folder) / (2 * _SAVES),
    }


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _bytes(folder: Path) -> int:
    dist.barrier()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
