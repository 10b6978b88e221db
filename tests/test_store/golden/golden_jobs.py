"""The models, optimizers and objects that golden stores were written from: `JOBS[kind](seed)` makes one afresh.

A golden store names its jobs, so none of these may change; another model is another entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR
from torch.utils.data import DataLoader

from tests.test_store.golden.golden_codecs import FOLLOWED, KMEANS, UNIFORM
from tests.test_store.golden.golden_modules import Dense, Extra, Named, embedding, hard_rows
from tests.test_store.golden.golden_values import Job


def tables(codecs: Mapping[str, Any], rows: int, dim: int) -> Callable[[int], Job]:
    """A table by each of these names."""

    def make(seed: int) -> Job:
        found = {name: embedding(hard_rows(rows, dim, seed * 100 + at)) for at, name in enumerate(codecs)}
        return Job(nn.ModuleDict(found))

    return make


def kmeans(seed: int) -> Job:
    job = tables(KMEANS, 22, 40)(seed)
    draw = np.random.default_rng(seed)
    plain_rows = draw.normal(0, 0.1, (300, 8)).astype(np.float32)  # more than 256 codebooks
    job.model["manyblocks"] = embedding(torch.from_numpy(plain_rows))
    return job


def users(seed: int, rows: int = 200, dim: int = 8, **more: nn.Module) -> Job:
    torch.manual_seed(seed)
    return Job(nn.ModuleDict({"users": nn.Embedding(rows, dim, sparse=True), **more}))


def stepped(seed: int) -> Job:
    """One table, of which rows without a gradient stay as they are."""
    job = users(seed, 300)
    job.optimizers = [SGD(job.model.parameters(), lr=0.5)]
    return job


def averaged(seed: int) -> Job:
    """One table, of which rows move little, and with them means and squares of their gradients."""
    job = users(seed)
    job.optimizers = [SparseAdam(list(job.model.parameters()), lr=0.01)]
    return job


def decaying(seed: int) -> Job:
    """One table with gradients for all rows: what Adam keeps for those that are not looked up decays."""
    torch.manual_seed(seed)
    job = Job(nn.ModuleDict({"users": nn.Embedding(600, 4)}))
    job.optimizers = [Adam(job.model.parameters(), lr=0.01)]
    return job


def pair(seed: int) -> Job:
    return users(seed, 60, 6, ads=nn.Embedding(9, 3, sparse=True))


def shards(seed: int) -> Job:
    """A table for many chunks, and one with rows that are absent or have codebooks of their own."""
    odd = hard_rows(33, 6, seed)
    odd[1::3] = odd[1::3].abs() + 1
    return users(seed, 1200, 2, odd=embedding(odd))


def bare(seed: int) -> Job:
    torch.manual_seed(seed)
    return Job(nn.Embedding(60, 4, sparse=True))


def elements(seed: int) -> Job:
    """Each type that a table may have, lossless and not, and the smallest shapes."""
    made = {}
    for at, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        name = str(dtype).replace("torch.", "as_")
        made[name] = embedding(hard_rows(33, 5, seed * 100 + at, dtype))
        made[f"{name}_8"] = embedding(hard_rows(33, 12, seed * 100 + 10 + at, dtype))
    made["column"] = embedding(hard_rows(40, 1, seed * 100 + 20))
    made["row"] = embedding(hard_rows(1, 7, seed * 100 + 21))
    made["number"] = embedding(torch.full((1, 1), float(seed)))
    return Job(nn.ModuleDict(made))


class RowWise(Optimizer):
    """Keeps one number a row, a column, a count and something that follows no rows."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "name": "row-wise", "limits": (1e-3, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it needs none
        for parameter in (each for group in self.param_groups for each in group["params"]):
            state, gradient = self.state[parameter], parameter.grad.to_dense()
            if not state:
                rows = len(parameter)
                state["step"] = torch.tensor(0.0)
                state["sum"] = torch.zeros(rows)
                state["column"] = torch.zeros(rows, 1, dtype=torch.bfloat16)
                state["count"] = torch.zeros(rows, dtype=torch.int64)
                state["small"] = torch.zeros(rows, 3, dtype=torch.uint8)
                state["wide"] = torch.zeros(2, 2, dtype=torch.float64)
            moved = (gradient != 0).any(dim=1)
            state["step"] += 1
            state["sum"] += gradient.square().mean(dim=1)
            state["column"] += moved[:, None]
            state["count"] += moved * 2**40
            state["small"] += moved[:, None].to(torch.uint8)
            state["wide"] += 0.1
            beside: dict[Any, Any] = self.state
            beside["rounds"] = {"so far": beside.get("rounds", {"so far": 0})["so far"] + 1}
            parameter -= self.param_groups[0]["lr"] * gradient / (state["sum"].sqrt() + 0.1)[:, None]


def optimizers(seed: int) -> Job:
    """Tables each with an optimizer of its own, and a layer."""
    torch.manual_seed(seed)
    shapes = {"sgd": (20, 3), "adagrad": (18, 4), "sparseadam": (16, 2), "adam": (12, 3), "rowwise": (14, 5)}
    model = nn.ModuleDict(
        {name: nn.Embedding(*shape, sparse=name not in ("sgd", "adam")) for name, shape in shapes.items()}
    )
    model["adagrad"].to(torch.bfloat16)
    model["top"] = nn.Linear(17, 2)
    of: dict[str, Any] = {name: list(module.parameters()) for name, module in model.items()}
    return Job(
        model,
        [
            SGD([{"params": of["sgd"]}, {"params": of["top"], "lr": 0.01}], lr=0.1, momentum=0.9),
            Adagrad(of["adagrad"], lr=0.1, eps=1e-3),
            SparseAdam(of["sparseadam"], lr=0.1),
            Adam(of["adam"], lr=0.1, amsgrad=True, betas=(0.8, 0.99)),
            RowWise(of["rowwise"]),
        ],
    )


def squares(seed: int) -> Job:
    """Tables under an optimizer that keeps means (of both signs) and squares for each value."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({f"by{bits}": nn.Embedding(24, 8, sparse=True) for bits in (2, 3, 4, 8)})
    return Job(model, [SparseAdam(list(model.parameters()), lr=0.1)])


def train(job: Job, ids: Mapping[str, list[int]]) -> None:
    """One step on rows of the tables that are named."""
    found = [job.model[name](torch.tensor(rows)).float() for name, rows in ids.items()]
    if "top" in job.model:
        joined = torch.cat([each.mean(dim=0) for each in found])
        loss = job.model["top"](joined).square().sum() + joined.sum()
    else:
        loss = torch.stack(
            [(each * torch.linspace(-1, 1, each.shape[1])).square().sum() for each in found]
        ).sum()
    loss.backward()
    for each in job.optimizers:
        each.step()
        each.zero_grad()


class Keeper:
    """An object with a state, which it keeps just as it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def batches() -> DataLoader[int]:
    return DataLoader(range(20), batch_size=3)  # type: ignore[arg-type]  # a range is a data set


def halved(step: int) -> float:
    return float(0.5**step)


def stateful(seed: int) -> Job:
    """Schedulers, an object that keeps anything, and extra state in the model."""
    job = users(seed, 12, 3, extra=Extra({"seed": seed, "at": (1, 2.5)}))
    optimizer = SGD([{"params": job.model["users"].parameters(), "name": "first"}], lr=0.1)
    job.optimizers = [optimizer]
    job.objects = {
        "cosine": CosineAnnealingLR(optimizer, 10),
        "steps": MultiStepLR(optimizer, [2, 2, 5]),
        "lambda": LambdaLR(optimizer, halved),
        "keeper": Keeper(seed),
    }
    return job


def grown(names: Mapping[str, tuple[int, int]]) -> Callable[[int], Job]:
    """Tables of these shapes under Adagrad."""

    def make(seed: int) -> Job:
        torch.manual_seed(seed)
        model = nn.ModuleDict({name: nn.Embedding(*shape, sparse=True) for name, shape in names.items()})
        return Job(model, [Adagrad(model.parameters(), lr=0.1)])

    return make


def imported(seed: int) -> Job:
    """A model whose state dict is imported from a file."""
    job = users(seed, 30, 6, norm=nn.BatchNorm1d(6), extra=Extra([seed, None]))
    job.model["ads"] = embedding(hard_rows(15, 4, seed, torch.bfloat16))
    return job


def plain(seed: int) -> Job:
    """The same without what a safetensors file can't hold."""
    job = imported(seed)
    del job.model["extra"]
    return job


def tall(seed: int) -> Job:
    """Rows enough for offsets of 32 bits, nearly all alike."""
    weight = torch.full((70_000, 1), float(seed), dtype=torch.float16)
    return Job(nn.ModuleDict({"tall": embedding(weight)}))


def large(seed: int) -> Job:
    """A dense tensor of two chunks, the second of which hangs over its edge."""
    job = users(seed, 5, 2)
    values = torch.full((3, 12 << 20), seed, dtype=torch.uint8)
    values[:, :: 1 << 20] = torch.arange(3, dtype=torch.uint8)[:, None] + 10
    job.model.register_buffer("large", values)
    return job


JOBS: Mapping[str, Callable[[int], Job]] = {
    "uniform": tables(UNIFORM, 22, 9),
    "kmeans": kmeans,
    "compressed": tables(FOLLOWED, 22, 9),
    "users": users,
    "averaged": averaged,
    "decaying": decaying,
    "meeting": lambda seed: users(seed, 20, 4, Users=nn.Embedding(9, 3), con=nn.Linear(3, 2)),
    "stepped": stepped,
    "bare": bare,
    "widths": lambda seed: users(seed, 264, 16, small=nn.Embedding(30, 16)),
    "elements": elements,
    "dense": lambda seed: Job(Dense(seed)),
    "named": lambda seed: Job(Named(seed)),
    "optimizers": optimizers,
    "squares": squares,
    "stateful": stateful,
    "changing-1": grown({"a": (20, 8), "b": (16, 2)}),
    "changing-2": grown({"a": (29, 8), "b": (16, 2)}),
    "changing-3": grown({"a": (29, 8), "b": (16, 2), "c": (10, 4)}),
    "changing-4": grown({"a": (29, 8), "c": (10, 4)}),
    "imported": imported,
    "plain": plain,
    "pair": pair,
    "shards": shards,
    "tall": tall,
    "large": large,
}
