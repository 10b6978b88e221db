"""Training jobs to be killed: one process that has imported everything, and forks a job whenever it is told to.

Run as a script, it answers what `fork_jobs` does; a job is ``{"url", "side", "policy", "bits", "seed", "job"}``.

A job resumes from the newest version if there is one, then trains and saves until it is killed. Before each save it
writes what the save is given to ``side/JOB-SAVE.npz``, durably, and says so by one byte in the pipe ``side/JOB.pipe``.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn

import cnr_codecs.plugins.zarr  # noqa: F401 - once here, rather than by zarr in each job
from cnr_codecs import FloatingRows, LatticeRows, LosslessRows, RowCodec, UniformRows, decode_into, parse
from cnr_store import Checkpointer, versions
from cnr_store.policies.policy import PolicyName
from cnr_store.training.tracking import bitmap
from tests.test_store.support.fork_server import fork_jobs

TABLES = {"user": (4096, 24), "item": (3000, 16), "ad": (2048, 32)}
LOOKUPS = 48
RELATIVE = 1
"""Stands for the bits of a lattice whose deltas are relative, as is the state beside them."""


class Job(TypedDict):
    url: str
    side: str
    policy: PolicyName
    bits: int
    seed: int
    job: int


class Model(nn.Module):
    """Three tables and a layer on what they look up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, dim, sparse=True) for name, (rows, dim) in TABLES.items()}
        )
        self.top = nn.Linear(sum(dim for _, dim in TABLES.values()), 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        looked_up = [self.tables[name](ids[name]) for name in TABLES]
        top: torch.Tensor = self.top(torch.cat(looked_up, dim=1))
        return top


def make_training(seed: int) -> tuple[Model, torch.optim.Adagrad]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def state_arrays(model: Model, optimizer: torch.optim.Adagrad) -> dict[str, np.ndarray[Any, Any]]:
    """Every value that a version of this model holds, by kind and name."""
    arrays = {f"model/{name}": tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        arrays[f"sum/{name}"] = optimizer.state[parameter]["sum"].numpy().copy()
    return arrays


def codec_of(bits: int) -> RowCodec:
    if bits == RELATIVE:
        return LatticeRows(step=2.0**-6, relative=True)
    return LosslessRows() if bits == 32 else UniformRows(bits=bits)


def state_codec_of(bits: int) -> RowCodec:
    return FloatingRows(3) if bits == RELATIVE else LosslessRows()


def train(job: Job) -> None:
    """Resume, then train and save without end."""
    model, optimizer = make_training(job["seed"])
    codec = codec_of(job["bits"])
    state_bits = "m3" if job["bits"] == RELATIVE else 32
    checkpointer = Checkpointer(
        job["url"], model, optimizer, policy=job["policy"], codec=codec, state_bits=state_bits
    )
    step = 0
    if versions(job["url"]):
        restored = checkpointer.load()
        step = restored.reader["step"]
    with (Path(job["side"]) / f"{job['job']}.pipe").open("wb", buffering=0) as pipe:
        save = 0
        while True:
            touched: dict[str, set[int]] = {name: set() for name in TABLES}
            for _ in range(2):
                step += 1
                ids = _batch(job["seed"], step)
                for name, looked_up in ids.items():
                    touched[name].update(looked_up.tolist())
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
            arrays = state_arrays(model, optimizer)
            arrays |= {f"touched/{name}": np.array(sorted(rows)) for name, rows in touched.items()}
            _write_durably(Path(job["side"]) / f"{job['job']}-{save}.npz", {**arrays, "step": np.array(step)})
            pipe.write(b"s")
            checkpointer.save(step, reader={"step": step}, metadata=[job["job"], save])
            save += 1


def _batch(seed: int, step: int) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng([seed, step])
    return {
        name: torch.from_numpy(draw.integers(0, rows, LOOKUPS) ** 2 // rows)
        for name, (rows, _) in TABLES.items()
    }


def _write_durably(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    data = io.BytesIO()
    np.savez(data, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle
    with path.open("wb") as file:
        file.write(data.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def warm_up() -> None:
    """Do once for all jobs what takes seconds: imports and compiled code. No thread is started: forks stay sound."""
    make_training(seed=0)
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    for bits in (2, 8):
        payload = parse(UniformRows(bits=bits).encode_rows(rows, None, 4, element="float32"))
        decode_into(payload, np.empty_like(rows), np.ones(4, np.uint8))
    for _ in bitmap.compile_kernels():
        pass


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
    warm_up()
    fork_jobs(train)


if __name__ == "__main__":
    main()
