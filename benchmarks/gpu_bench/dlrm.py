"""A DLRM on a device, with random batches that are there already."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_bench.place import Place

_DENSE, _BATCHES = 13, 4


def _layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(
            part
            for inner, outer in itertools.pairwise(widths)
            for part in (nn.Linear(inner, outer), nn.ReLU())
        )
    )


class _Dlrm(nn.Module):
    """Sums of embeddings, a net over dense features, and one over the products of all pairs of these."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(tables)
        )
        self.bottom = _layers(_DENSE, 512, 256, dim)
        self.over = nn.Sequential(
            _layers(dim + (tables + 1) * tables // 2, 1024, 1024, 512, 256), nn.Linear(256, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(table(own) for table, own in zip(self.tables, ids, strict=True))], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        found: torch.Tensor = self.over(torch.cat([low, products[:, self.pairs[0], self.pairs[1]]], 1))
        return found


class Dlrm:
    """The model, its optimizer, and steps.

    Attributes
    ----------
    ids
        (tables, batch, pooling): those of one batch.
    """

    def __init__(self, place: Place) -> None:
        sizes, device = place.sizes, place.device
        torch.manual_seed(0)
        with torch.device(device):
            self.model = _Dlrm(sizes.lookup_tables, sizes.lookup_rows, sizes.dim)
            shape = sizes.lookup_tables, sizes.batch, sizes.pooling
            batches = [
                (torch.randn(sizes.batch, _DENSE), torch.randint(sizes.lookup_rows, shape))
                for _ in range(_BATCHES)
            ]
            self._wanted = torch.rand(sizes.batch, 1)
        self.ids = batches[0][1]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._batches, self._place = itertools.cycle(batches), place

    def step(self) -> None:
        """Train on one batch. It does not wait for the device."""
        dense, ids = next(self._batches)
        self.optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), self._wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def steps(self) -> None:
        """As many steps as are timed together."""
        for _ in range(self._place.sizes.steps):
            self.step()

    def state(self) -> dict[str, Any]:
        """What others save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
