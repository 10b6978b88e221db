"""Training jobs that die and are resumed: one process that has imported everything, and forks a job when told to.

Run as a script, it answers what `fork_jobs` does; a job is ``{"url", "side", "policy", "bits", "kind", "job"}``.
Without a policy it trains from the first step to the last and saves nothing.

A job resumes from the newest version if there is one. Before each step it takes a byte from the pipe
``side/JOB.permits``, after it puts one into ``side/JOB.done``. At the end it writes all that training has to
``side/JOB.npz``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from cnr_store import Checkpointer, TrackedReader, versions
from cnr_store.policies.policy import PolicyName
from tests.test_store.support import killed_trainer
from tests.test_store.support.fork_server import fork_jobs

ROWS, DIM = {"user": 1500, "item": 1000}, 16
SAMPLES, BATCH, EPOCHS = 2048, 64, 4
STEPS = EPOCHS * SAMPLES // BATCH
STEPS_PER_SAVE = 3


class Job(TypedDict):
    url: str
    side: str
    policy: PolicyName | None
    bits: int
    kind: str
    job: int


class Model(nn.Module):
    """Two tables whose product, with noise from dropout, goes through a small layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, DIM, sparse=sparse) for name, rows in ROWS.items()}
        )
        self.top = nn.Sequential(nn.BatchNorm1d(DIM), nn.Dropout(0.1), nn.Linear(DIM, 1))
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = self.tables["user"](ids[:, 0]) * self.tables["item"](ids[:, 1])
        found: torch.Tensor = self.top(looked_up).squeeze(1)
        return found


class Training:
    """A model, its optimizers and schedulers, and where its data stands: alike in every job of one kind."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(7)
        self.model = Model(sparse=kind != "momentum")
        tables, top = self.model.tables.parameters(), self.model.top.parameters()
        self.optimizers: list[Optimizer]
        if kind == "adagrad":
            self.optimizers = [Adagrad(self.model.parameters(), lr=0.1)]
        elif kind == "momentum":
            self.optimizers = [SGD(self.model.parameters(), lr=0.05, momentum=0.9)]
        else:
            self.optimizers = [SparseAdam(tables, lr=0.01), AdamW(top, lr=0.01)]
        self.schedulers = {
            str(position): StepLR(optimizer, 20, gamma=0.9)
            for position, optimizer in enumerate(self.optimizers)
        }
        self.ids, self.labels = planted()
        loader = DataLoader(TensorDataset(self.ids, self.labels), BATCH, shuffle=True)
        self.reader = TrackedReader(loader)

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(self.model(ids), labels)
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers.values(), strict=True):
            optimizer.step()
            scheduler.step()

    def everything(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights, optimizer state, learning rates, random numbers, the reader's position; and the loss."""
        found = {f"model {name}": tensor.numpy() for name, tensor in self.model.state_dict().items()}
        for position, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                found |= {
                    f"optimizer {position} {number} {key}": np.asarray(value) for key, value in state.items()
                }
            rates = [group["lr"] for group in optimizer.param_groups]
            found[f"optimizer {position} lr"] = np.array(rates)
        found["rng"] = torch.get_rng_state().numpy()
        found["reader"] = np.array([self.reader.epoch, self.reader.batch])
        self.model.eval()
        with torch.no_grad():
            found["loss"] = nn.functional.mse_loss(self.model(self.ids), self.labels).numpy()
        return found


def planted() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of ids, few of them frequent, and labels that hidden vectors of the ids explain."""
    draw = np.random.default_rng(3)
    ids = np.stack([(draw.random(SAMPLES) ** 3 * rows).astype(np.int64) for rows in ROWS.values()], axis=1)
    hidden = [draw.normal(size=(rows, 4)) for rows in ROWS.values()]
    labels = (hidden[0][ids[:, 0]] * hidden[1][ids[:, 1]]).sum(axis=1) + draw.normal(0, 0.1, SAMPLES)
    return torch.from_numpy(ids), torch.from_numpy(labels.astype(np.float32))


def train(job: Job) -> None:
    """Resume if there is something to resume from, train to the end, and write down how it ended."""
    training, step = Training(job["kind"]), 0
    checkpointer = None
    if job["policy"] is not None:
        checkpointer = Checkpointer(
            job["url"],
            training.model,
            training.optimizers,
            policy=job["policy"],
            bits=job["bits"],
            state=training.schedulers,
        )
        if versions(job["url"]):
            restored = checkpointer.load()
            step = restored.step
            training.reader.load_state_dict(restored.reader)
    place = Path(job["side"]) / str(job["job"])
    with (
        place.with_suffix(".permits").open("rb", buffering=0) as permits,
        place.with_suffix(".done").open("wb", buffering=0) as done,
    ):
        while training.reader.epoch < EPOCHS:
            for ids, labels in training.reader:
                assert permits.read(1), "the test has ended"
                training.step(ids, labels)
                step += 1
                done.write(b"s")
                if checkpointer is not None and step % STEPS_PER_SAVE == 0:
                    checkpointer.save(step, reader=training.reader)
    assert step == STEPS
    if checkpointer is not None:
        checkpointer.close()
    np.savez(place.with_suffix(".npz"), **training.everything())  # type: ignore[arg-type]  # taken for allow_pickle


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
    killed_trainer.warm_up()
    Training("adam")
    fork_jobs(train)


if __name__ == "__main__":
    main()
