"""How long a save holds training under Adam, whose steps change every row: beside a plain copy, and a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam

import cnr_store
from benchmarks.codec_bench.target import Target
from benchmarks.saving_bench.stall import ASYNC, OURS, Contenders, Wait, stall_of

COPY, STEP = "plain copy", "fused step"
_DIM, _SHARE, _WARM_SAVES = 32, 0.05, 2


@dataclass(frozen=True)
class Line:
    """One contender: seconds that it holds training, for weights of so many bytes and both moments beside them."""

    weight_bytes: int
    contender: str
    best_seconds: float
    median_seconds: float

    HEAD = "weights MB  contender         best ms  median ms"

    def show(self) -> str:
        return (
            f"{self.weight_bytes / 1e6:10.0f}  {self.contender:16} {self.best_seconds * 1e3:8.1f} "
            f"{self.median_seconds * 1e3:10.1f}"
        )


class DenseTraining:
    """Tables with gradients for all rows. One row in twenty is looked up in a step."""

    def __init__(self, tables: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.EmbeddingBag(rows, _DIM) for _ in range(tables))
        self.optimizer = Adam(self.model.parameters(), fused=True)
        self._random = torch.Generator().manual_seed(0)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.step()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight.detach() for weight in self.model.parameters()]

    @property
    def arrays(self) -> list[torch.Tensor]:
        """Weights and both moments."""
        slots = ("exp_avg", "exp_avg_sq")
        return [
            *self.weights,
            *(self.optimizer.state[each][slot] for each in self.model.parameters() for slot in slots),
        ]

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        for weight in self.model.parameters():
            assert weight.grad is not None
            rows = torch.randint(len(weight), (round(_SHARE * len(weight)),), generator=self._random)
            weight.grad.zero_()[rows] = 1e-3 * torch.randn(len(rows), _DIM, generator=self._random)
        self.optimizer.step()


class _Compared(Contenders):
    def __init__(self, training: DenseTraining, checkpointer: cnr_store.Checkpointer, folder: Path) -> None:
        super().__init__(training, checkpointer, folder)
        self._optimizer = training.optimizer

    def runs(self) -> dict[str, Callable[[torch.Tensor], Wait]]:
        theirs = super().runs()
        return {COPY: self._copy, OURS: theirs[OURS], ASYNC: theirs[ASYNC], STEP: self._step}

    def _copy(self, _: torch.Tensor) -> Wait:
        for tensor, buffer in zip(self._training.arrays, self._buffers, strict=True):
            buffer.copy_(tensor)
        return lambda: None

    def _step(self, _: torch.Tensor) -> Wait:
        self._optimizer.step()
        return lambda: None


def measure(tables: int, rows: int, rounds: int, folder: Path) -> list[Line]:
    """All of them in turns, each time after a step; another one begins each round."""
    training = DenseTraining(tables, rows)
    none, seconds = torch.empty(0), dict[str, list[float]]()
    with cnr_store.Checkpointer(
        folder / "ours", training.model, training.optimizer, keep_last=2
    ) as checkpointer:
        runs = _Compared(training, checkpointer, folder).runs()
        for _ in range(_WARM_SAVES):
            checkpointer.save(0).result()
            training.step()
        for turn in range(rounds):
            for name in itertools.islice(itertools.cycle(runs), turn, turn + len(runs)):
                training.step()
                seconds.setdefault(name, []).append(stall_of(runs[name], none))
    nbytes = sum(each.nbytes for each in training.weights)
    lines = [Line(nbytes, name, min(each), statistics.median(each)) for name, each in seconds.items()]
    print(*(line.show() for line in lines), sep="\n", flush=True)
    return lines


def targets(lines: list[Line]) -> Iterator[Target]:
    """Medians count, as of other stalls."""
    found = {line.contender: line.median_seconds for line in lines}
    for peer, most in ((COPY, 1.3), (ASYNC, 1.0), (STEP, 2.0)):
        yield Target(
            f"compared tables: stall, of a {peer}'s time",
            most,
            found[OURS] / found[peer],
            f"Adam, {lines[0].weight_bytes / 1e9:.1f} GB of weights and both moments",
            at_most=True,
        )
