"""Ranks that hold what they should not, or ask for what others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import cnr_store
from cnr_store import Checkpointer
from cnr_store.dcp import Writer


class Counted:
    """An object whose state is of another size on each rank."""

    def __init__(self) -> None:
        self.values = np.full(2000 + dist.get_rank(), dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.ModuleDict({"emb": nn.EmbeddingBag(300, 8), "norm": nn.BatchNorm1d(8), "top": nn.Linear(8, 1)})
    made.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return made


def told(call: Callable[[], Any]) -> str:
    """What a call raises, or nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def train_apart() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Step on data of this rank's own, then average the parameters alone, as LocalSGD does."""
    trained = nn.Linear(8, 1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.fill_(1)
    adam = torch.optim.Adam(trained.parameters())
    trained(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
    adam.step()
    for parameter in trained.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()
    return trained, adam


def train_in_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Step each parameter on one rank, which sends it to the others, as distributed Muon does."""
    trained = nn.Linear(8, 1)
    sgd = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
    trained(torch.ones(1, 8)).sum().backward()
    for number, parameter in enumerate(trained.parameters()):
        if number % dist.get_world_size() != dist.get_rank():
            parameter.grad = None
    sgd.step()
    for number, parameter in enumerate(trained.parameters()):
        dist.broadcast(parameter.data, number % dist.get_world_size())
    return trained, sgd


def save_apart(url: str) -> None:
    """Save as a job of one rank: with a group of its own, also through DCP, and through DCP alone."""
    rank = dist.get_rank()
    group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    with Checkpointer(
        f"{url}/group {rank}", model(rank), bits=32, job=cnr_store.Job(group=group)
    ) as checkpointer:
        checkpointer.save(1).result()
    ways: dict[str, dict[str, Any]] = {"dcp": {"process_group": group}, "alone": {"no_dist": True}}
    for name, way in ways.items():
        save({"rank": rank}, storage_writer=Writer(f"{url}/{name} {rank}", **way), **way)


def run(url: str) -> dict[str, Any]:
    """On each rank: what goes wrong, and what is loaded where nothing does."""
    rank, found = dist.get_rank(), dict[str, Any]()
    save_apart(url)
    with Checkpointer(
        f"{url}/other", model(rank), failures=cnr_store.Failures(timeout_seconds=20)
    ) as checkpointer:
        found["other values"] = told(lambda: checkpointer.save(1))
    averaged, adam = train_apart()
    with Checkpointer(
        f"{url}/other", averaged, adam, failures=cnr_store.Failures(timeout_seconds=20)
    ) as checkpointer:
        found["other state"] = told(lambda: checkpointer.save(1))
    spread, sgd = train_in_parts()
    with Checkpointer(
        f"{url}/other", spread, sgd, failures=cnr_store.Failures(timeout_seconds=20)
    ) as checkpointer:
        found["spread state"] = told(lambda: checkpointer.save(1))
    trained, counted = model(0), Counted()
    for buffer in (trained["norm"].running_mean, trained["norm"].running_var):  # type: ignore[index]
        buffer.fill_(rank + 1)
    options: Any = {
        "bits": 32,
        "policy": "consecutive",
        "state": {"counted": counted},
        "failures": cnr_store.Failures(timeout_seconds=20),
    }
    with Checkpointer(f"{url}/same", trained, **options) as checkpointer:
        checkpointer.save(1).result()
        found["other tables"] = told(lambda: checkpointer.load(tables="*" if rank else None))
        found["other versions"] = told(lambda: checkpointer.load(1 if rank else "latest"))
        found["again"] = told(checkpointer.load)
        found["buffers"] = [float(trained["norm"].running_mean[0]), float(trained["norm"].running_var[0])]  # type: ignore[index]
        found["object"] = [len(counted.values), int(counted.values[0])]
        found["next"] = told(lambda: checkpointer.save(2).result())
    return found
