"""Rows that a save turns into zeros: of tables that begin small, and of one that has a huge row."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cnr_store
from benchmarks.codec_bench.rows import Rows
from cnr_codecs.lattice.steps import lattice_step
from cnr_store.catalog.catalog import open_record

_DIM, _SPREAD, _SHARE_A_STEP = 16, 1e-4, 0.01
_RMS_STEPS = (0.35, 0.1)
STEPS = (200, 1_000, 2_000)


def lines(rows: int, steps: tuple[int, ...] = STEPS) -> Iterator[dict[str, Any]]:
    """Of each table and step: the shares of its rows that are not zero and are loaded as zeros, and of others."""
    random = np.random.default_rng(20261128)
    huge = random.normal(0, 1, (rows, _DIM)).astype(np.float32)
    huge[rows // 2] = 1e30
    runs: dict[tuple[str, int], Callable[[], dict[str, Rows]]] = {
        ("one row of 1e30", 0): lambda: {"rows": huge}
    }
    for count in steps:
        runs["begun at 1e-4, Adam", count] = partial(_trained, rows, count, towers=1)
        runs["two towers begun at 1e-4, Adam", count] = partial(_trained, rows, count, towers=2)
    for (name, count), make in runs.items():
        tables = make()
        for rms_step in _RMS_STEPS:
            line = {"rows": name, "steps": count, "rms_step": rms_step, **_stored(tables, rms_step)}
            print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            yield line


def _trained(rows: int, steps: int, towers: int) -> dict[str, Rows]:
    """Tables that learn planted signs of products of two rows: both of one table, or one of each tower's."""
    random = torch.Generator().manual_seed(1)
    names = ("user", "item")[-towers:]
    tables = nn.ModuleDict({name: nn.Embedding(rows, _DIM) for name in names})
    planted = {name: torch.randn(rows, _DIM, generator=random) for name in names}
    for table in tables.values():
        nn.init.normal_(table.weight, std=_SPREAD, generator=random)
    optimizer = torch.optim.Adam(tables.parameters(), lr=1e-3, fused=True)
    frequency = 1 / torch.arange(10.0, rows + 10)
    for _ in range(steps):
        ids = torch.multinomial(frequency.expand(2, -1), round(rows * _SHARE_A_STEP), generator=random)
        pairs = [*zip((names[0], names[-1]), ids, strict=True)]
        wanted = torch.stack([planted[name][each] for name, each in pairs]).prod(0).sum(1) > 0
        scores = torch.stack([tables[name](each) for name, each in pairs]).prod(0).sum(1)
        loss = functional.binary_cross_entropy_with_logits(scores, wanted.float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    return {name: table.weight.detach().numpy() for name, table in tables.items()}


def _stored(tables: Mapping[str, Rows], rms_step: float) -> dict[str, float]:
    """What a save of the tables and a read of it make of their rows; beside them, a step from the root mean square."""
    model = nn.ModuleDict(
        {name: nn.Embedding.from_pretrained(torch.from_numpy(rows)) for name, rows in tables.items()}
    )
    with tempfile.TemporaryDirectory() as url:
        cnr_store.save(url, model, codec={"id": "cnr_lattice", "rms_step": rms_step})
        loaded = cnr_store.state_dict(url)
        entries = open_record(url, "latest")[1].arrays.values()
    total = sum(map(len, tables.values()))
    became = {"became_zero": 0, "of_root_mean_square": 0}
    for name, rows in tables.items():
        is_some = rows.any(axis=1)
        became["became_zero"] += int((is_some & ~loaded[f"{name}.weight"].any(axis=1)).sum())
        step = lattice_step(rms_step * float(np.sqrt(np.mean(rows.astype(np.float64) ** 2))))
        became["of_root_mean_square"] += int((is_some & ~np.rint(rows / np.float32(step)).any(axis=1)).sum())
    counts = {name: sum(entry.counts[name] for entry in entries) for name in ("raw", "finer")}
    return {name: count / total for name, count in (became | counts).items()}
