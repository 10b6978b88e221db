"""Train, checkpoint and resume with plain torch.

    python examples/plain_torch.py STORE [STEPS]

Stop it at any moment and start it again: it resumes from the newest checkpoint, with the next batch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cnr_store

USERS, ITEMS, DIM = 20_000, 5_000, 16
STEPS_PER_SAVE = 20


class Model(nn.Module):
    """Predicts how much a user likes an item, from the product of their embedding rows."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.user(ids[:, 0]) * self.item(ids[:, 1])
        return product.mean(dim=1)


def samples() -> TensorDataset:
    """Random ratings, the same at each start."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randint(rows, (64_000,), generator=generator) for rows in (USERS, ITEMS)], dim=1)
    return TensorDataset(ids, (ids.sum(dim=1) % 5).float() / 4)


def main(url: str, steps: int = 200) -> int:
    """Train to step `steps`, counting those of earlier starts. Returns the step that this start resumed from."""
    # torch skips these checks by default, and warns about it unless they are disabled explicitly.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
    reader = cnr_store.TrackedReader(DataLoader(samples(), batch_size=128, shuffle=True))
    with cnr_store.Checkpointer(url, model, optimizer, state={"schedule": scheduler}) as checkpointer:
        resumed = checkpointer.resume(reader=reader)  # model, optimizer and scheduler, too, in place
        for step, (ids, labels) in enumerate(reader.interval(max(0, steps - resumed)), resumed + 1):
            loss: Any = nn.functional.mse_loss(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % STEPS_PER_SAVE == 0:  # it is written in the background
                checkpointer.save(step, reader=reader, metadata={"loss": loss.item()})
    return resumed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {sys.argv[0]} STORE [STEPS]")
    start = main(sys.argv[1], *map(int, sys.argv[2:3]))
    print(f"resumed after step {start}; the store holds:")
    for version in cnr_store.versions(sys.argv[1]):
        print(f"  step {version.step}: {version.kind}, {version.rows} rows, {version.bytes} bytes")
