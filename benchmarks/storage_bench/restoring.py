"""Restoring from the page cache, beside others; a chain of deltas; and verifying."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import cnr_store
from benchmarks.codec_bench.targets import Target
from benchmarks.codec_bench.timing import race

DELTAS, SHARE = 8, 20


def measure(rows: int, dim: int, folder: Path) -> dict[str, Any]:
    """Seconds of each, the best of several in turns. Deltas hold a twentieth of the rows each."""
    model = nn.Module()
    model.table = nn.Embedding(rows, dim, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store, whole, safe = folder / "store", folder / "model.pt", folder / "model.safetensors"
    torch.save(model.state_dict(), whole)
    save_file(model.state_dict(), safe)
    draw = np.random.default_rng(0)
    with cnr_store.Checkpointer(store, model, optimizer, policy="consecutive", bits=4) as checkpointer:
        for step in range(DELTAS + 1):
            info = checkpointer.save(step).result()
            if step == 0:
                baseline = info.id
            optimizer.zero_grad()
            changed = torch.from_numpy(draw.choice(rows, rows // SHARE, replace=False))
            model.table(changed).square().sum().backward()
            optimizer.step()
        seconds = race(
            {
                "ours, 4 bits": lambda: checkpointer.load(baseline),
                f"ours, a chain of {DELTAS} deltas": lambda: checkpointer.load(info.id),
                "torch.load, float32": lambda: model.load_state_dict(torch.load(whole)),
                "safetensors, float32": lambda: model.load_state_dict(load_file(safe)),
            },
            rounds=7,
        )
    versions = DELTAS + 1
    deep = race({"deep": lambda: cnr_store.verify(store, deep=True)}, rounds=2)["deep"]
    found = {f"{name} (s)": value for name, value in seconds.items()}
    found["chain: times the baseline"] = (
        seconds[f"ours, a chain of {DELTAS} deltas"] / seconds["ours, 4 bits"]
    )
    found["baseline: times torch.load's pace"] = seconds["torch.load, float32"] / seconds["ours, 4 bits"]
    found[f"verify, every byte of {versions} versions (s)"] = deep
    return found


def targets(figures: dict[str, Any]) -> Iterator[Target]:
    peer = figures["torch.load, float32 (s)"]
    for what, most in (("4 bits", 0.4), (f"a chain of {DELTAS} deltas", 0.6)):
        seconds = figures[f"ours, {what} (s)"]
        yield Target("restore: of torch.load's time", most, seconds / peer, what, at_most=True)
