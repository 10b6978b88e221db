"""Tables on a device that are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cnr_store
from benchmarks.gpu_bench.place import Place


class State:
    """A model of tables alone, and its optimizer.

    Attributes
    ----------
    nbytes
        Of the tables.
    """

    def __init__(self, place: Place) -> None:
        sizes = place.sizes
        torch.manual_seed(0)
        with torch.device(place.device):
            tables = (nn.Embedding(sizes.rows, sizes.dim, sparse=True) for _ in range(sizes.tables))
            self.model = nn.ModuleDict({f"table{number}": table for number, table in enumerate(tables)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.nbytes = sum(each.nbytes for each in self.model.parameters())
        self._place = place

    def checkpointer(self, folder: Path) -> cnr_store.Checkpointer:
        """One of 4 bits that has room for all rows in host memory."""
        return cnr_store.Checkpointer(
            folder,
            self.model,
            self.optimizer,
            limits=cnr_store.Limits(snapshot_bytes=self.nbytes),
            **self._place.options,
        )

    def touch(self, checkpointer: cnr_store.Checkpointer, share: float) -> None:
        """Flag a share of the rows of each table, at random."""
        for name in self.model:
            chosen = torch.rand(self._place.sizes.rows, device=self._place.device) < share
            checkpointer.touch(name, chosen.nonzero()[:, 0])

    def clear(self) -> None:
        """Set all rows to 0."""
        with torch.no_grad():
            for each in self.model.parameters():
                each.zero_()

    def state(self) -> dict[str, Any]:
        """What others save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
