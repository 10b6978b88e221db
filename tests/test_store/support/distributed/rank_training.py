"""Training on ranks that run as processes: what a test calls on each of them by name."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cnr_store
from cnr_store.ranks import owners

PRELOAD = ("torch._dynamo", "torch.distributed.fsdp")
"""What takes long to import: torch imports its compiler for each of these."""
ROWS, DIM = 403, 6
"""No number of ranks divides the rows."""


class Net(nn.Module):
    """Two tables, one with sparse gradients, and a dense part."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.bags = nn.EmbeddingBag(2 * ROWS, DIM, mode="sum")
        self.over = nn.Linear(2 * DIM, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.items(ids[:, 0]), self.bags(ids)], dim=1)
        result: torch.Tensor = self.over(both)
        return result


class Reader:
    """Counts its batches. Readers of other numbers of ranks are joined into the greatest count."""

    def __init__(self) -> None:
        self.count = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def batch(self) -> torch.Tensor:
        """The next ids: others on each rank."""
        self.count += 1
        generator = torch.Generator().manual_seed(100 * self.count + self.rank)
        return torch.randint(0, ROWS, (5, 3), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "rank": self.rank}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        assert state["rank"] == self.rank
        self.count = state["count"]

    def split_state(self, states: Sequence[Mapping[str, int]], rank: int, world: int) -> dict[str, int]:
        assert world == dist.get_world_size()
        return {"count": max(state["count"] for state in states), "rank": rank}


def digest(*tensors: torch.Tensor) -> str:
    """The bits of some tensors, wherever their parts are: the same on all ranks."""
    whole = hashlib.sha256()
    for tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        plain = full.detach().reshape(-1).contiguous()
        whole.update(f"{tuple(full.shape)} {full.dtype}".encode())
        whole.update(plain.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:12]


def digests(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """By name, the bits of all that training has: the same on all ranks."""
    found = {name.removeprefix("module."): digest(value) for name, value in model.state_dict().items()}
    names = {id(value): name.removeprefix("module.") for name, value in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{names[id(parameter)]}/{key}"] = digest(value)
    return found


def model_is_dense(model: nn.Module) -> bool:
    """Whether no table has sparse gradients."""
    return not any(getattr(module, "sparse", False) for module in model.modules())


def optimizers_of(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What trains it. Rows of a table that has sparse gradients get none of other classes."""
    if kind == "adam" and not model_is_dense(model):
        sparse = [value for name, value in model.named_parameters() if "items" in name]
        others = [value for name, value in model.named_parameters() if "items" not in name]
        return [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.Adam(others, lr=0.1)]
    made = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[kind]
    return [made(model.parameters(), lr=0.1)]


def alike(value: Any) -> Any:
    """The value, which must be the same on all ranks."""
    data = torch.frombuffer(bytearray(hashlib.sha256(repr(value).encode()).digest()), dtype=torch.uint8)
    others = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(others, data)
    assert all(torch.equal(other, data) for other in others), f"ranks differ from {value!r}"
    return value


class Lines(logging.Handler):
    """The log lines of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("cnr_store")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def spread(model: Any, how: str) -> Any:
    """A model as ``ddp``, ``fsdp`` or ``hsdp`` has it, or as it is (``bare``)."""
    if how == "bare":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    names = ("replicas", "shards")
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        if how == "hsdp"
        else init_device_mesh("cpu", (world,))
    )
    for part in (model.items, model.over):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(url: Path, how: str, kind: str, sparse: bool, steps: int) -> dict[str, Any]:
    """Go on from what is stored, train, and save after each step. Returns what this rank has then."""
    warnings.simplefilter("error")
    lines, reader = Lines(), Reader()
    model = spread(Net(sparse), how)
    optimizers = optimizers_of(kind, model)
    torch.manual_seed(dist.get_rank())
    with cnr_store.Checkpointer(
        url, model, optimizers, policy="consecutive", bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        start = checkpointer.resume(reader)
        found = {"start": start, "loaded": alike(digests(model, optimizers)) if start else {}}
        found["random"] = torch.rand(2).tolist()
        found["count"] = reader.count
        rows = []
        for step in range(start + 1, start + steps + 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(reader.batch()).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            rows.append(checkpointer.save(step, reader).result().rows)
    return {
        **found,
        "rows": alike(rows),
        "trained": alike(digests(model, optimizers)),
        "next": torch.rand(2).tolist(),
        "lines": lines.lines,
    }


def train_with_few_owners(owners_of_dense: int, *arguments: Any) -> dict[str, Any]:
    """The same, where so many ranks own the dense tensors that come together from pieces of all."""
    owners.FEW_OWNERS = owners_of_dense
    return train(*arguments)


class Averages:
    """An object with a number of large arrays."""

    def __init__(self, count: int) -> None:
        self.values = {f"{number}": np.full(3000, number) for number in range(count)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def uneven_objects(url: Path, counts: Sequence[int]) -> dict[str, Any]:
    """Save a model in pieces beside an object with other arrays on each rank, and load both."""
    model, averages = spread(Net(sparse=False), "fsdp"), Averages(counts[dist.get_rank()])
    (optimizer,) = optimizers_of("adam", model)
    model(Reader().batch()).square().sum().backward()
    optimizer.step()
    options: Any = {
        "bits": 32,
        "failures": cnr_store.Failures(timeout_seconds=20),
        "state": {"averages": averages},
    }
    with cnr_store.Checkpointer(url, model, optimizer, **options) as checkpointer:
        checkpointer.save(1).result()
        trained = digests(model, [optimizer])
        model(Reader().batch()).square().sum().backward()
        optimizer.step()
        checkpointer.load()
    assert alike(digests(model, [optimizer])) == trained
    return {"loaded": len(averages.values)}


def load_once(url: Path, how: str, kind: str, sparse: bool) -> dict[str, str]:
    """The bits of the newest version, as `cnr_store.load` brings them onto each rank."""
    model = spread(Net(sparse), how)
    optimizers = optimizers_of(kind, model)
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(7)
    cnr_store.load(url, model, optimizers, bits=32)
    found: dict[str, str] = alike(digests(model, optimizers))
    return found


def save_once(url: Path) -> dict[str, Any]:
    """Two saves of `cnr_store.save`, and what `cnr_store.load` brings back."""
    lines = Lines()
    model: Any = DistributedDataParallel(Net())
    saved = []
    for step in (1, 2):
        with torch.no_grad():
            model.module.items.weight += step
        saved.append(alike(cnr_store.save(url, model, step=step, bits=32).id))
    trained = digests(model, [])
    with torch.no_grad():
        model.module.items.weight.zero_()
    restored = cnr_store.load(url, model, bits=32)
    assert alike(digests(model, [])) == trained
    return {"saved": saved, "loaded": restored.version.id, "lines": lines.lines}


def flags_of_one_rank(url: Path) -> list[int]:
    """Rows that are changed unseen on all ranks, and named by one rank alone."""
    model: Any = DistributedDataParallel(Net())
    optimizers = optimizers_of("sgd", model)
    rank, world = dist.get_rank(), dist.get_world_size()
    with cnr_store.Checkpointer(
        url, model, optimizers, policy="consecutive", bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        checkpointer.save(1).result()
        for other in range(world):
            model.module.items.weight.data[[other, 300 + other]] = 5.0 + other
        checkpointer.touch("items", [rank, 300 + rank])
        rows = checkpointer.save(2).result().rows
        trained = digests(model, optimizers)
        with torch.no_grad():
            model.module.items.weight.zero_()
        checkpointer.load()
        assert alike(digests(model, optimizers)) == trained
    written: list[int] = np.flatnonzero(model.module.items.weight[:, 0].detach().numpy() >= 5).tolist()
    return [alike(rows), *written]


def refusals(url: Path) -> list[Any]:
    """What is said of a rank that saves alone, and of state that is not spread; and the rows saved unowned."""
    rank, said = dist.get_rank(), list[Any]()
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    model = spread(Net(sparse=False), "fsdp")
    with cnr_store.Checkpointer(
        url / f"{rank}", model, bits=32, job=cnr_store.Job(group=own)
    ) as checkpointer:
        said.append(_refused(checkpointer))
    (optimizer,) = optimizers_of("adagrad", model)
    for parameter in (model.items.weight, model.over.weight):
        with cnr_store.Checkpointer(url / "all", model, optimizer, bits=32) as checkpointer:
            kept = optimizer.state[parameter]["sum"]
            optimizer.state[parameter]["sum"] = kept.full_tensor()
            said.append(_refused(checkpointer))
            optimizer.state[parameter]["sum"] = kept
    with cnr_store.Checkpointer(url / "all", model, bits=32, policy="consecutive") as checkpointer:
        rows = []
        for step in (1, 2):
            model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
            optimizer.step()
            rows.append(checkpointer.save(step).result().rows)
    return [*said, alike(rows)]


def _refused(checkpointer: cnr_store.Checkpointer) -> str:
    try:
        checkpointer.save(1)
    except cnr_store.UnsupportedModelError as error:
        return str(error)
    return "saved"


def wrapped(url: Path, package: str, steps: int) -> dict[str, Any]:
    """Go on from what is stored with a model and an optimizer that a package has wrapped, train, and save."""
    warnings.simplefilter("ignore")  # what these packages warn of is no concern of ours
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{world}",
        "LOCAL_WORLD_SIZE": f"{world}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "test",
    }
    bare, lines = Net(), Lines()
    inner = torch.optim.Adagrad(bare.parameters(), lr=0.1)
    model, optimizer = _wrap(package, bare, inner)
    reader = Reader()
    with cnr_store.Checkpointer(
        url, model, optimizer, policy="consecutive", bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        start = checkpointer.resume(reader)
        loaded = alike(digests(bare, [inner]))
        rows = []
        for step in range(start + 1, start + steps + 1):
            optimizer.zero_grad()
            model(reader.batch()).square().sum().backward()
            optimizer.step()
            rows.append(checkpointer.save(step, reader).result().rows)
    kind = f"{type(model).__name__} {type(optimizer).__name__}"
    trained = alike(digests(bare, [inner]))
    return {
        "start": start,
        "loaded": loaded,
        "rows": alike(rows),
        "trained": trained,
        "kind": kind,
        "lines": lines.lines,
    }


def _wrap(package: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if package == "accelerate":
        accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
        assert accelerator.num_processes == dist.get_world_size()
        return accelerator.prepare(model, optimizer)
    if package == "fabric":
        fabric = importlib.import_module("lightning.fabric").Fabric(
            accelerator="cpu", devices=dist.get_world_size(), strategy="ddp"
        )
        fabric.launch()
        assert fabric.world_size == dist.get_world_size()
        return fabric.setup(model, optimizer)
    return DistributedDataParallel(model), optimizer
