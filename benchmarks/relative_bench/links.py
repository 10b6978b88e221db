"""Ten rows of one chunk through eight deltas that each changed them: what is fetched, and how long decoding takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cnr_store
from benchmarks.reading_bench.counting import CountingBackend
from benchmarks.relative_bench.stores import adaptive, lattice
from benchmarks.relative_bench.trace import DIM
from benchmarks.volumes_bench.ledger import Ledger
from cnr_store.format.layout import weight_path

_CODECS = {"lattice 0.35": lattice(0.35), "adaptive 4": adaptive(4)}
_LINKS, _READ, _SHARE, _ROUNDS = 8, 10, 0.05, 5


def few_rows(rows: int, seed: int) -> list[dict[str, Any]]:
    """Read by ids, of relative rows and of adaptive ones."""
    return [{"setting": name, "rows": rows} | _few_rows(rows, codec, seed) for name, codec in _CODECS.items()]


def _few_rows(rows: int, codec: Any, seed: int) -> dict[str, Any]:
    """Eight deltas of 5 % of a table, and of ten rows of its first chunk."""
    torch.manual_seed(seed)
    random, ledger = np.random.default_rng(seed), Ledger("links", whole=True)
    model = nn.Embedding(rows, DIM)
    ids = np.arange(0, 1000, 1000 // _READ)
    with _checkpointer(ledger, model, codec) as checkpointer:
        for save in range(_LINKS + 1):
            changed = np.union1d(ids, random.choice(rows, int(rows * _SHARE), replace=False))
            _move(model, changed, checkpointer)
            checkpointer.save(save).result()
        kept = _code_bytes(checkpointer)

    def opened() -> tuple[CountingBackend, Any]:
        counting = CountingBackend(ledger)
        return counting, cnr_store.open(counting)[weight_path("weight")]

    opened()[1].oindex[ids, :]  # the first call compiles
    milliseconds = []
    for _ in range(_ROUNDS):
        counting, array = opened()
        counting.reset()
        began = time.process_time()
        array.oindex[ids, :]
        milliseconds.append((time.process_time() - began) * 1e3)
    asked = [key for _, key in counting.log if "/c/" in key]
    return {
        "requests_of_shards": len(asked),
        "shards": len(set(asked)),
        "kilobytes": counting.nbytes / 1e3,
        "milliseconds": min(milliseconds),
        "code_bytes_share": kept / (rows * DIM * 4),
    }


def restores(rows: int, seed: int) -> list[dict[str, Any]]:
    """Seconds of the processor to restore a whole version, and one of 8 deltas of 5 %, beside `torch.load`."""
    torch.manual_seed(seed)
    model, random = nn.Embedding(rows, DIM), np.random.default_rng(seed)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "model.pt"
        torch.save(model.state_dict(), plain)
        runs: dict[str, Callable[[], object]] = {
            "torch.load": lambda: model.load_state_dict(torch.load(plain))
        }
        for name, codec in _CODECS.items():
            store, whole = Path(folder) / name, ""
            with _checkpointer(store, model, codec) as checkpointer:
                for save in range(_LINKS + 1):
                    info = checkpointer.save(save).result()
                    whole = whole or info.id
                    _move(model, random.choice(rows, int(rows * _SHARE), replace=False), checkpointer)
            runs[f"{name}, whole"] = partial(cnr_store.load, store, model, version=whole)
            runs[f"{name}, 8 deltas"] = partial(cnr_store.load, store, model)
        seconds = _race(runs)
    for name, value in seconds.items():
        ratio = value / seconds["torch.load"]
        lines.append({"setting": name, "rows": rows, "seconds": value, "of_torch_load": ratio})
    return lines


def _race(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of the processor of each, which took turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    return best


def _checkpointer(url: Any, model: nn.Module, codec: Any) -> cnr_store.Checkpointer:
    return cnr_store.Checkpointer(url, model, policy="consecutive", codec=codec, max_chain=None)


def _move(model: nn.Embedding, ids: Any, checkpointer: cnr_store.Checkpointer) -> None:
    with torch.no_grad():
        model.weight[torch.from_numpy(ids)] += 0.1 * torch.randn(len(ids), DIM)
    checkpointer.touch("weight", ids)


def _code_bytes(checkpointer: cnr_store.Checkpointer) -> int:
    """What the process keeps of the table's codes."""
    cache = checkpointer._saves.planner._code_cache  # nothing public tells
    return sum(each.codes.nbytes for each in cache._known.values())
