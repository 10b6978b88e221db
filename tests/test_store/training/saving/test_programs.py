"""Random training programs: killed anywhere and resumed they end as without, exactly, or within half a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog

ROWS, DIM, STEPS = 1_200, 8, 24
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda parameters: Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "NAdam": lambda parameters: NAdam(parameters, lr=0.01),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=0.05),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
}
SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    lambda optimizer: StepLR(optimizer, 5, 0.5),
    lambda optimizer: CosineAnnealingLR(optimizer, 8),  # passes 0
    lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1, cycle_momentum=False),
]


class Program:
    """One life of a program. What a step does is drawn by the program's seed and the step's number alone."""

    def __init__(self, seed: int, optimizer: str) -> None:
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self._seed, self._accumulates = seed, int(random.integers(1, 4))
        self._freezes, self._is_mixed = bool(random.integers(2)), bool(random.integers(2))
        self.model = nn.ModuleDict(
            {"a": nn.Embedding(ROWS, DIM), "b": nn.Embedding(ROWS, DIM), "top": nn.Linear(DIM, 1)}
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[random.integers(len(SCHEDULERS))](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        self.state = {"scheduler": self.scheduler, "scaler": self.scaler}

    def step(self, number: int) -> None:
        random = np.random.default_rng([self._seed, number])
        frozen = self._freezes and number % 6 >= 4
        self.model.get_parameter("b.weight").requires_grad_(not frozen)
        for _ in range(self._accumulates):
            ids = torch.from_numpy(random.integers(ROWS, size=(2, 16)))
            with torch.autocast("cpu", torch.bfloat16, enabled=self._is_mixed):
                loss = self.model["top"](self.model["a"](ids[0]) * self.model["b"](ids[1])).square().mean()
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything, by path or name."""
        found = {name: value.detach().numpy().copy() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name.removesuffix('.weight')}/{key}"] = (
                    torch.as_tensor(value).detach().numpy().copy()
                )
        return found


def run(
    url: Path, seed: int, optimizer: str, look: Callable[[Program, str], None], **options: Any
) -> Program:
    """Run a program, killed and begun anew at random steps, and `look` at each version before training goes on."""
    random = np.random.default_rng([seed, 1])
    while True:
        program = Program(seed, optimizer)
        checkpointer = Checkpointer(
            url,
            program.model,
            program.optimizer,
            state=program.state,
            job=cnr_store.Job(unloaded="warn"),
            **options,
        )
        with checkpointer:
            begun = checkpointer.resume()
            dies = begun + int(random.integers(3, 12))
            for number in range(begun + 1, min(dies, STEPS) + 1):
                program.step(number)
                if random.integers(3) == 0:
                    look(program, checkpointer.save(number).result().id)
        if dies >= STEPS:
            return program


CASES = [
    pytest.param(seed, name, marks=[pytest.mark.nightly] if seed else [])
    for seed in range(6)
    for name in OPTIMIZERS
]


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("policy", ["intermittent", "consecutive"])
@pytest.mark.parametrize(("seed", "name"), CASES)
def test_lossless_programs_end_as_without_a_kill(tmp_path: Path, seed: int, name: str, policy: Any) -> None:
    resumed = run(tmp_path, seed, name, lambda *_: None, budget=0, policy=policy)
    plain = Program(seed, name)
    for number in range(1, STEPS + 1):
        plain.step(number)
    found, expected = resumed.arrays(), plain.arrays()
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, path)


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("policy", ["intermittent", "consecutive"])
@pytest.mark.parametrize(("seed", "name"), CASES)
def test_by_default_each_value_is_within_half_a_step(
    tmp_path: Path, seed: int, name: str, policy: Any
) -> None:
    seen = list[str]()

    def look(program: Program, version: str) -> None:
        entries = Catalog(open_backend(str(tmp_path))).record(version).arrays
        other = Program(seed, name)
        cnr_store.load(tmp_path, other.model, other.optimizer, version=version)
        found = other.arrays()
        for path, values in program.arrays().items():
            table, _, slot = path.partition("/")
            entry = entries.get(f"tables/{table.removesuffix('.weight')}/{slot or 'weight'}")
            codec = (entry and entry.codec) or {}
            error = np.abs(found[path] - values)
            if codec.get("id") == "cnr_lattice":
                assert error.max() <= codec["step"] / 2 * 1.0001, (path, version)
            elif codec.get("id") == "cnr_floating":
                share = 2.0 ** -(codec["mantissa_bits"] + 1) * 1.0001
                assert (error <= np.abs(values) * share + 2.0**-126).all(), (path, version)
            else:
                assert not error.any(), (path, version)
            seen.append(codec.get("id", ""))

    run(tmp_path, seed, name, look, policy=policy)
    assert {"cnr_lattice", "cnr_floating"} <= {*seen}
