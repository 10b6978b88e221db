"""State dicts of ranks, their saves and loads, for tests of DCP on a store."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import OptionError
from cnr_store.dcp import Reader, Writer
from tests.test_store.ranks.support.rank_processes import reach

ROWS, COLUMNS = 3001, 12


def whole_state(seed: int = 0) -> dict[str, Any]:
    """A nested state dict of plain tensors and values, alike on all ranks."""
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    tied = values(900, 8)
    return {
        "model": {
            "users.weight": values(ROWS, COLUMNS),
            "half.weight": values(2000, 10, dtype=torch.bfloat16),
            "tied.weight": tied,
            "again.weight": tied,
            "conv": values(8, 4, 3, 3),
            "bias": values(COLUMNS),
            "counts": torch.arange(41) + seed,
            "tiny": values(2, 3),
            "empty": torch.empty(0, 4),
        },
        "optim": {
            "state": {"users.weight": {"momentum": values(ROWS * 4), "step": torch.tensor(3.0 + seed)}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["users.weight"]}],
        },
        "step": 7 + seed,
        "note": "ö\0",
        "nothing": None,
        "rng": {"python": (3, tuple(range(600)), None), "big": torch.arange(4000) + seed},
    }


SPLIT = ("users.weight", "half.weight", "conv", "bias", "counts", "momentum", "tiny")


def zeroed(state: Any) -> Any:
    """A state dict of the same tensors with other values."""
    if isinstance(state, dict):
        return {name: zeroed(each) for name, each in state.items()}
    if isinstance(state, list):
        return [zeroed(each) for each in state]
    return torch.zeros_like(state) - 1 if isinstance(state, torch.Tensor) else 0


def spread(state: Any, mesh: Any, placements: Sequence[Any], names: Sequence[str] = SPLIT) -> Any:
    """The state dict with the tensors of some names spread over a mesh, as far as they have the dimensions."""
    if not isinstance(state, dict):
        return state
    return {
        name: distribute_tensor(each, mesh, _fitting(each, placements))
        if name in names and isinstance(each, torch.Tensor)
        else spread(each, mesh, placements, names)
        for name, each in state.items()
    }


def _fitting(tensor: torch.Tensor, placements: Sequence[Any]) -> list[Any]:
    return [
        Shard(each.dim if each.dim < tensor.ndim else 0) if isinstance(each, Shard) else each
        for each in placements
    ]


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Check that two state dicts are equal bit for bit, over all ranks."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            same(found[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted), where
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(wanted, torch.Tensor):
        full = found.full_tensor() if isinstance(found, DTensor) else found
        assert full.dtype == wanted.dtype, where
        assert torch.equal(full, wanted), where
    else:
        assert found == wanted, where
        assert type(found) is type(wanted), where


MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows of 2": ((2,), [Shard(0)]),
    "columns of 2": ((2,), [Shard(1)]),
    "rows of 3": ((3,), [Shard(0)]),
    "columns of 3": ((3,), [Shard(1)]),
    "copies on 3": ((3,), [Replicate()]),
    "one": ((1,), [Shard(0)]),
    "rows of 2, twice": ((2, 2), [Replicate(), Shard(0)]),
    "rows and columns of 4": ((2, 2), [Shard(0), Shard(1)]),
}


def on_mesh(name: str, state: Any) -> Any:
    """A state dict spread over a mesh of all ranks."""
    shape, placements = MESHES[name]
    return spread(state, init_device_mesh("cpu", shape), placements)


def save_on(meshes: Mapping[str, str]) -> list[str]:
    """Save on each mesh, to the URL beside it."""
    saved = []
    for seed, (mesh, url) in enumerate(meshes.items()):
        with closing(Writer(url, timeout_seconds=20)) as writer:
            save(on_mesh(mesh, whole_state(seed)), storage_writer=writer)
            saved.append(writer.version.id)
    return saved


def load_on(mesh: str, url: str, seed: int = 0) -> None:
    """Load onto a mesh what `save_on` saved, and check it."""
    state = on_mesh(mesh, zeroed(whole_state(seed)))
    load(state, storage_reader=Reader(url))
    same(state, whole_state(seed))


def load_all(meshes: Sequence[str], urls: Sequence[str]) -> None:
    for mesh in meshes:
        for seed, url in enumerate(urls):
            load_on(mesh, url, seed)


def save_with_cached_plans(url: str) -> list[int]:
    writer = Writer(url, timeout_seconds=20)
    steps = []
    for seed in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(on_mesh("rows of 2", whole_state(seed)), storage_writer=writer, planner=planner)
        steps.append(writer.version.step)
        load_on("columns of 2", url, seed)
    return steps


def save_in_the_background(url: str) -> None:
    writer, group = (
        Writer(url, timeout_seconds=20),
        dist.new_group(backend="gloo"),
    )
    for seed in range(2):
        state = on_mesh("rows of 2", whole_state(seed))
        future = async_save(state, checkpoint_id=str(10 * seed), storage_writer=writer, process_group=group)
        dist.all_reduce(torch.ones(3))  # of training
        future.result()  # type: ignore[union-attr]  # a future unless a stager returns early
        assert writer.version.step == 10 * seed
        load_on("columns of 2", url, seed)


class Failing(DefaultSavePlanner):
    """Fails on the last rank when it is asked for a tensor."""

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("no such tensor")
        found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return found


class Stopping(DefaultSavePlanner):
    """Reaches a point on the last rank when it is asked for a tensor."""

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == dist.get_world_size() - 1:
            reach("resolving")
        found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return found


def save_and_be_killed(url: str) -> None:
    save(
        on_mesh("rows of 3", whole_state()),
        storage_writer=Writer(url, timeout_seconds=3),
        planner=Stopping(),
    )


def fail_and_save_again(url: str) -> list[str]:
    writer = Writer(url, timeout_seconds=20)
    state = on_mesh("rows of 3", whole_state())
    said = []
    try:
        save(state, storage_writer=writer, planner=Failing())
    except CheckpointException as error:
        said.append(str(error))
    save(state, storage_writer=writer)
    load_on("columns of 3", url)
    said.append(writer.version.id)
    return said


class Unplanned(DefaultSavePlanner):
    """Fails on one rank before that comes to the writer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if dist.get_rank() == self.rank:
            raise ValueError("no room")
        return super().finish_plan(new_plan)


def miss_saves_and_save_again(url: str) -> tuple[list[str], list[int]]:
    """Each rank in turn misses a save, the last one two."""
    writer = Writer(url, timeout_seconds=1)
    said, steps = [], []
    for seed, missing in enumerate([None, 0, None, 1, 1, None, None]):
        planner = None if missing is None else Unplanned(missing)
        try:
            save(whole_state(seed), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            said.append(str(error))
        else:
            steps.append(writer.version.step)
    load_on("columns of 2", url, seed)
    return said, steps


def lose_a_put_and_save_again(folder: str) -> list[str]:
    """Save while the last rank's storage fails in the middle of the save, then again when it is sound."""
    failing = dist.get_rank() == dist.get_world_size() - 1

    def fault(operation: str, key: str, index: int) -> Fault:
        return "before" if failing and "/c/" in key else None

    writer = Writer(FaultyBackend(open_backend(folder), fault), timeout_seconds=20)
    state = on_mesh("rows of 3", whole_state())
    try:
        save(state, storage_writer=writer)
        said = "saved"
    except CheckpointException as error:
        said = str(error)
    left = [info.id for info in cnr_store.versions(folder)]
    dist.barrier()
    failing = False
    save(state, storage_writer=writer)
    load_on("columns of 3", folder)
    return [said, *left, writer.version.id]


class Tripwire:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("tripped", "w")


def save_what_json_lacks(url: str) -> str:
    """What the last rank alone has is refused on all."""
    writer = Writer(url, timeout_seconds=20)
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        save({"x": torch.ones(3), **({"own": Tripwire()} if last else {})}, storage_writer=writer)
    except CheckpointException as error:
        return str(error)
    return "saved"


def save_with_a_mistake(url: str) -> list[str]:
    """What a writer of all ranks says where `save` is told of other ranks, or ranks name different steps."""
    writer = Writer(url, timeout_seconds=60)
    mistakes: list[dict[str, Any]] = [
        {"no_dist": True},
        {"use_collectives": False},
        {"checkpoint_id": str(dist.get_rank())},
        {"checkpoint_id": "step-5"},
    ]
    said = []
    for mistake in mistakes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                save(whole_state(), storage_writer=writer, **mistake)
            except (CheckpointException, OptionError) as error:
                said.append(str(error))
    return said


def shards_of_rank() -> ShardedTensor:
    """A tensor of 2 ranks, of which the first has the rows at both ends."""
    whole, offsets = torch.arange(6000.0 * 8).reshape(6000, 8), ((0, 4500), (1500,))
    sizes = ((1500, 1500), (3000,))
    rank = dist.get_rank()
    shards = [
        LocalShard(
            whole[offset : offset + rows].clone(),
            ShardMetadata([offset, 0], [rows, 8], f"rank:{rank}/cpu"),
        )
        for offset, rows in zip(offsets[rank], sizes[rank], strict=True)
    ]
    return init_from_local_shards(shards, 6000, 8)


def save_and_load_shards(url: str) -> None:
    save({"x": shards_of_rank()}, storage_writer=Writer(url, timeout_seconds=20))
    found = shards_of_rank()
    for shard in found.local_shards():
        shard.tensor.zero_()
    load({"x": found}, storage_reader=Reader(url))
    for shard, wanted in zip(found.local_shards(), shards_of_rank().local_shards(), strict=True):
        assert torch.equal(shard.tensor, wanted.tensor)
