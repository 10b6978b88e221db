"""A small store of several versions, copies of it with one object damaged, and what each version holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer
from cnr_store.policies.policy import PolicyName

ROWS, DIM = 20_000, 16
WEIGHT, SLOT = "tables/emb/weight", "tables/emb/sum"
Values = Mapping[str, np.ndarray[Any, Any]]


class Model(nn.Module):
    """A table of several chunks, and a dense layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(ROWS, DIM, sparse=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top: torch.Tensor = self.top(self.emb(ids))
        return top


def new_job() -> tuple[Model, torch.optim.Adagrad]:
    model = Model(1)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change some rows: most of them in no other step."""
    optimizer.zero_grad()
    ids = torch.cat(
        [torch.arange(100), torch.randint(ROWS, (400,), generator=torch.Generator().manual_seed(step))]
    )
    model(ids).sum().backward()
    optimizer.step()


class SavedStore:
    """Five versions under one policy, and the values of each."""

    def __init__(
        self, folder: Path, policy: PolicyName, bits: int = 32, versions: int = 5, **options: Any
    ) -> None:
        self.folder = folder
        model, optimizer = new_job()
        options = options or {"bits": bits}
        with Checkpointer(folder, model, optimizer, policy=policy, **options) as checkpointer:
            self.ids = []
            for step in range(versions):
                train(model, optimizer, step)
                self.ids.append(checkpointer.save(step).result().id)
        self.values = [load(folder, version)[0] for version in self.ids]

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.folder, folder))


def load(folder: Path, version: Any = "latest", **options: Any) -> tuple[Values, cnr_store.Restored]:
    """What a version loads to, and what the load says."""
    model, optimizer = new_job()
    restored = cnr_store.load(folder, model, optimizer, version, **options)
    return values_of(model, optimizer), restored


def values_of(model: Model, optimizer: torch.optim.Optimizer) -> Values:
    values = {"emb": model.emb.weight, "emb/sum": optimizer.state[model.emb.weight]["sum"]}
    return {name: tensor.detach().numpy().copy() for name, tensor in values.items()} | {
        "top": model.top.weight.detach().numpy().copy()
    }


def shard_of(folder: Path, version: str, path: str = WEIGHT) -> Path:
    """The first shard of an array in a version, or in its fold."""
    return next(each for each in sorted(folder.rglob("c/0/0")) if version in str(each) and path in str(each))


def chunk_lengths(shard: Path) -> list[int]:
    """Bytes of each chunk of a shard, its checksum counted; 0 where there is none."""
    home = next(folder for folder in shard.parents if (folder / "zarr.json").exists())
    record = json.loads((home / "zarr.json").read_text())
    node = record["consolidated_metadata"]["metadata"][str(shard.parents[2].relative_to(home))]
    sharded, inner = node["chunk_grid"]["configuration"]["chunk_shape"], node["codecs"][0]["configuration"]
    chunks = int(np.prod(sharded) // np.prod(inner["chunk_shape"]))
    index = np.frombuffer(shard.read_bytes()[-(16 * chunks + 4) : -4], "<u8").reshape(chunks, 2)
    return [0 if length == 2**64 - 1 else int(length) for length in index[:, 1]]


def _flip(shard: Path, position: int) -> None:
    data = bytearray(shard.read_bytes())
    data[position] ^= 0x10
    shard.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": lambda shard: shard.unlink(),
    "cut": lambda shard: shard.write_bytes(shard.read_bytes()[:-30]),
    "emptied": lambda shard: shard.write_bytes(b""),
    "head flipped": lambda shard: _flip(shard, 6),
    "codes flipped": lambda shard: _flip(shard, chunk_lengths(shard)[0] - 40),
    "checksum flipped": lambda shard: _flip(shard, chunk_lengths(shard)[0] - 2),
    "index flipped": lambda shard: _flip(shard, shard.stat().st_size - 12),
    "last byte flipped": lambda shard: _flip(shard, -1),
}
"""What may happen to a shard."""
