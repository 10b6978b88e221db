"""Modules of the models that golden stores were written from, and rows for their tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn


def hard_rows(rows: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Plain rows, and constant, distant, zero, subnormal and huge ones, ones with NaN, infinities and -0.0."""
    draw = np.random.default_rng(seed)
    values = draw.normal(0, 0.1, (rows, dim)).astype(np.float32)
    values[2::11] = values[2::11, :1]
    values[3::11] += 3000
    values[4::11] = 0
    values[5::11] *= 1e-39
    values[6::11] *= 1e38
    values[7::11, 0] = np.nan
    values[8::11, -1] = -np.inf
    values[9::11, 0] = -0.0
    if rows > 10:
        values.view(np.uint32)[10, 0] = 0xFFA00001  # a NaN with a sign and a payload
    return torch.from_numpy(values).to(dtype)


def embedding(rows: torch.Tensor, sparse: bool = True) -> nn.Embedding:
    found: nn.Embedding = nn.Embedding.from_pretrained(rows, freeze=False, sparse=sparse)  # type: ignore[no-untyped-call]
    return found


class Dense(nn.Module):
    """A tensor of each type and of many shapes, and tied ones."""

    DTYPES = (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        for name in self.DTYPES:
            dtype = getattr(torch, name)
            data = draw.integers(0, 2 if name == "bool" else 256, 6 * dtype.itemsize, np.uint8)
            # Any bits at all: NaNs of every kind among them.
            self.register_buffer(f"as_{name}", torch.from_numpy(data).view(dtype).reshape(2, 3))
        self.register_buffer("number", torch.tensor(seed + 0.5))
        self.register_buffer("one_half", torch.tensor(seed + 0.5, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("cube", torch.from_numpy(draw.normal(size=(2, 3, 4))).transpose(0, 2))
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(draw.normal(size=(3, 3))))
        self.table = embedding(hard_rows(12, 3, seed))


NAMES = ("a b", "ä/日本", "100%", "tilde~", "__lead", "zarr", "UPPER-x_y", "c0")


class Named(nn.Module):
    """Names that need percent-encoding, nested and reserved ones, and tables that share their weight."""

    zarr: Any
    c0: Any

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in NAMES:
            self.add_module(name, nn.Embedding(5, 3, sparse=True))
        self.weight = nn.Embedding(4, 2)  # its parameter is weight.weight
        self.inner = nn.ModuleDict({"weight": nn.Embedding(3, 2)})
        self.zarr.register_parameter("json", nn.Parameter(torch.rand(2)))  # called zarr.json
        self.register_parameter("__x y~", nn.Parameter(torch.rand(2)))
        self.again = nn.Embedding(5, 3, sparse=True)
        self.again.weight = self.c0.weight
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.c0.weight


class Extra(nn.Module):
    """A module with a state beside its tensors."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state
