"""Ten rows of one chunk through eight deltas that each changed them: what is fetched, and how long decoding takes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Adagrad

import cnr_store
from benchmarks.reading_bench.counting import CountingBackend
from benchmarks.relative_bench.stores import adaptive, lattice
from benchmarks.relative_bench.trace import DIM
from benchmarks.volumes_bench.ledger import Ledger
from cnr_store.format.layout import weight_path
from cnr_store.policies.widths import LOSSLESS

_RESTORED = {
    "lattice 0.1, m3": (lattice(0.1), "m3"),
    "lattice 0.35, m3": (lattice(0.35), "m3"),
    "adaptive 4, lossless": (adaptive(4), LOSSLESS),
    "adaptive 8, lossless": (adaptive(8), LOSSLESS),
}
_CODECS = {"lattice 0.35": lattice(0.35), "adaptive 4": adaptive(4)}
_FROM_DISK = ", from the disk"
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
        kept = checkpointer.explain().code_bytes

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
    """Seconds to restore rows and Adagrad's sums beside `torch.load`: of a whole version, and after 8 deltas of 5 %.

    The files are in the memory of the system, or have to be read from the disk of this machine.
    """
    torch.manual_seed(seed)
    model, random = nn.Embedding(rows, DIM, sparse=True), np.random.default_rng(seed)
    optimizer = Adagrad(model.parameters(), lr=0.05)
    _train(model, optimizer, np.arange(rows))
    lines = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_ones:
        plain = Path(folder) / "model.pt"
        torch.save([model.state_dict(), optimizer.state_dict()], plain)

        def load() -> None:
            weights, state = torch.load(plain)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)

        runs: dict[str, Callable[[], object]] = {"torch.load": load}
        saving = {
            name: open_ones.enter_context(
                _checkpointer(Path(folder) / name, model, codec, optimizer, state_bits=state_bits)
            )
            for name, (codec, state_bits) in _RESTORED.items()
        }
        infos = {name: [checkpointer.save(0).result()] for name, checkpointer in saving.items()}
        for save in range(1, _LINKS + 1):
            _train(model, optimizer, random.choice(rows, int(rows * _SHARE), replace=False))
            for name, checkpointer in saving.items():
                infos[name].append(checkpointer.save(save).result())
        for name, found in infos.items():
            for what, version in (("whole", found[0]), ("8 deltas", found[-1])):
                runs[f"{name}, {what}"] = partial(
                    cnr_store.load, Path(folder) / name, model, optimizer, version=version
                )
        seconds = _race(runs)
        cold = _race(runs, lambda: _forget(Path(folder)))
        seconds |= {f"{name}{_FROM_DISK}": value for name, value in cold.items()}
    for name, value in seconds.items():
        peer = seconds["torch.load" + _FROM_DISK * name.endswith(_FROM_DISK)]
        ratios = {key: value[key] / peer[key] for key in value}
        lines.append(
            {
                "setting": name,
                "rows": rows,
                **value,
                "of_torch_load": ratios["seconds"],
                "processor_of_torch_load": ratios["processor_seconds"],
            }
        )
    return lines


def _train(model: nn.Embedding, optimizer: Adagrad, ids: Any) -> None:
    """A step of Adagrad by random gradients of some rows."""
    optimizer.zero_grad()
    model(torch.from_numpy(ids)).backward(torch.randn(len(ids), DIM))
    optimizer.step()


def _forget(folder: Path) -> None:
    """Drop files from the memory of the system, so that they are read from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _race(
    runs: Mapping[str, Callable[[], object]], prepare: Callable[[], None] = lambda: None
) -> dict[str, dict[str, float]]:
    """The least time of each, which took turns: that of a clock, and of the processor on all its cores."""
    best = {name: {"seconds": float("inf"), "processor_seconds": float("inf")} for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            prepare()
            began = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            for key, value in zip(best[name], took, strict=True):
                best[name][key] = min(best[name][key], value)
    return best


def _checkpointer(
    url: Any, model: nn.Module, codec: Any, optimizer: Adagrad | None = None, **options: Any
) -> cnr_store.Checkpointer:
    return cnr_store.Checkpointer(
        url,
        model,
        optimizer,
        policy="consecutive",
        codec=codec,
        retention=cnr_store.Retention(max_chain=None),
        **options,
    )


def _move(model: nn.Embedding, ids: Any, checkpointer: cnr_store.Checkpointer) -> None:
    with torch.no_grad():
        model.weight[torch.from_numpy(ids)] += 0.1 * torch.randn(len(ids), DIM)
    checkpointer.touch("weight", ids)
