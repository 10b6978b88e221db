"""State of parameters that are not C-contiguous: fused kernels walk memory, so it comes back laid out as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cnr_store


def _made() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"table": nn.Embedding(6, 4), "conv": nn.Conv2d(3, 4, 3)})
    model["table"].weight = nn.Parameter(torch.randn(4, 6).t())
    model["conv"].to(memory_format=torch.channels_last)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
    optimizer.step()


def test_fused_steps_go_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = _made()
    _step(model, optimizer, 1)
    cnr_store.save(str(tmp_path / "s"), model, optimizer, bits=32)
    again, other = _made()
    cnr_store.load(str(tmp_path / "s"), again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert other.state[two]["exp_avg"].stride() == optimizer.state[one]["exp_avg"].stride()
    _step(model, optimizer, 2)
    _step(again, other, 2)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
