"""Trains a table that another process holds."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from torch import nn


def train_shared(model: nn.Module, rows: Connection) -> None:
    """Take a step on the rows of the table ``t`` that each message names, and answer it; an empty one is the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while chosen := rows.recv():
        optimizer.zero_grad()
        model.get_submodule("t")(torch.tensor(chosen)).square().sum().backward()
        optimizer.step()
        rows.send(chosen)
