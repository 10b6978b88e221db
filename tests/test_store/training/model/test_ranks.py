"""A process group of one rank is none; tensors that no process holds are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import cnr_store

# torch's own, about its older class of spread tensors.
pytestmark = pytest.mark.filterwarnings("ignore:.*ShardedTensor:FutureWarning")


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_rank_saves_and_loads(tmp_path: Path) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cnr_store.Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        checkpointer.save(1).result()
        model(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert checkpointer.save(2).result().rows == 1
    bare = nn.Sequential(nn.Embedding(10, 4))
    cnr_store.load(tmp_path, bare)
    assert torch.equal(bare.get_parameter("0.weight"), model.module.get_parameter("0.weight"))


def sharded(rows: int) -> Any:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), rows, 4)


def in_the_state_dict() -> nn.Module:
    """As TorchRec's modules have their tables."""
    model, values = nn.Linear(2, 2), sharded(10)
    model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda _module, state, prefix, _: state.update({f"{prefix}t": values})
    )
    return model


def in_a_table() -> nn.Module:
    table = nn.Embedding(10, 4)
    table._parameters["weight"] = nn.Parameter(sharded(10))
    return nn.ModuleDict({"t": table})


def in_partial_sums() -> nn.Module:
    from torch.distributed.tensor import DTensor, Partial

    layer = nn.Linear(2, 2)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    part = DTensor.from_local(layer.weight.detach(), mesh, [Partial()], run_check=False)
    layer.weight = nn.Parameter(part)
    return nn.ModuleDict({"t": layer})


class WithoutStorage(torch.Tensor):
    """Has no memory in this process."""

    def untyped_storage(self) -> Any:
        raise NotImplementedError("no storage")


def in_a_class_of_its_own() -> nn.Module:
    model = nn.Module()
    model.register_buffer("t", torch.zeros(3).as_subclass(WithoutStorage))
    return model


def on_meta() -> nn.Module:
    return nn.ModuleDict({"t": nn.EmbeddingBag(10, 4, device="meta")})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (in_the_state_dict, "'t' of the model is a ShardedTensor.*TorchRec.*this process holds itself"),
        (in_a_table, "table 't' is a ShardedTensor, spread over ranks"),
        (in_partial_sums, r"'t\.weight' is a DTensor.*part of a sum"),
        (in_a_class_of_its_own, "'t' of the model is a WithoutStorage"),
        (on_meta, "table 't' is on the meta device"),
    ],
)
def test_tensors_that_this_process_does_not_hold_are_refused(
    tmp_path: Path, make: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(cnr_store.UnsupportedModelError, match=why):
        cnr_store.Checkpointer(tmp_path, make())


class Cached:
    """A module of which some tables are cached, or none, as TorchRec's are known."""

    def __init__(self, cached: bool) -> None:
        self.module = SimpleNamespace(_lookups=[self])
        self.tables = [SimpleNamespace(cached=False), SimpleNamespace(cached=cached)]
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def purge(self) -> None:
        self.calls.append("purge")


def test_a_save_flushes_caches_and_a_load_purges_them(tmp_path: Path) -> None:
    some, none = Cached(True), Cached(False)
    model = nn.Embedding(10, 4)
    with cnr_store.Checkpointer(tmp_path, model) as checkpointer:
        sharded: Any = [some, none]
        checkpointer._trained.sharded = sharded
        checkpointer.save(1).result()
        assert some.calls == ["flush"]
        checkpointer.load()
    assert some.calls == ["flush", "purge"]
    assert none.calls == []
