"""`state_bits="auto"`, the default under a budget: first moments are on floating grids of 2 bits, other state of 3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, SparseAdam

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CheckpointError, OptionError
from cnr_store.training.model.tensors import dtype_name
from tests.test_store.support.rowwise_optimizers import OwnRowWise
from tests.test_store.training.saving.test_compared import LATTICE, RELATIVE, by_data, stored

ROWS, DIM = 700, 12
Values = np.ndarray[Any, Any]
Make = Callable[[Any], Optimizer]
AUTO: dict[str, Any] = {"codec": RELATIVE, "state_bits": "auto"}
PLAIN = {"id": "cnr_floating", "mantissa_bits": 3, "relative": True}
FIRST = PLAIN | {"mantissa_bits": 2}
FIRST_SLOTS = ("exp_avg", "momentum_buffer")

MAKERS: dict[str, Make] = {
    "Adam": lambda parameters: Adam(parameters, lr=0.002),
    "amsgrad": lambda parameters: Adam(parameters, lr=0.002, amsgrad=True, betas=(0.8, 0.99)),
    "AdamW": lambda parameters: AdamW(parameters, lr=torch.tensor(0.002), foreach=False),
    "NAdam": lambda parameters: NAdam(parameters, lr=0.002),
    "RAdam": lambda parameters: RAdam(parameters, lr=0.002),
    "momentum": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda parameters: SGD(parameters, lr=0.02, momentum=0.8, nesterov=True),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.001, momentum=0.9),
}
OTHERS: dict[str, Make] = {
    "Adagrad": lambda parameters: Adagrad(parameters, lr=0.05),
    "Adamax": lambda parameters: Adamax(parameters, lr=0.002),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.001, centered=True),
    "SparseAdam": lambda parameters: SparseAdam(parameters),
    "own": lambda parameters: OwnRowWise(parameters),
}


class Job:
    """A large table and a small one."""

    def __init__(
        self, make: Make, dtype: torch.dtype = torch.float32, sparse: bool = False, device: Any = "cpu"
    ) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict(
            {
                "a": nn.Embedding(ROWS, DIM, sparse=sparse, dtype=dtype),
                "b": nn.Embedding(90, 4, sparse=sparse, dtype=dtype),
            }
        )
        with torch.no_grad():
            self.weight.mul_(0.1)
        self.model.to(device)
        self.make = make
        self.optimizer = make(self.model.parameters())

    @property
    def weight(self) -> torch.Tensor:
        return self.model.get_parameter("a.weight")

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The large table's, by rows, in host memory."""
        state = self.optimizer.state[self.weight]
        return {
            key: each.cpu() for key, each in state.items() if isinstance(each, torch.Tensor) and each.ndim
        }

    def train(self, random: np.random.Generator, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for table in self.model.values():
                assert isinstance(table, nn.Embedding)
                ids = torch.from_numpy(random.integers(table.num_embeddings, size=9))
                rows = table(ids.to(self.weight.device))
                noise = torch.from_numpy(random.normal(size=(9, 1)) * random.normal(size=rows.shape))
                (rows * noise.to(rows)).sum().backward()
            self.optimizer.step()

    def check(self, url: Any, version: str, other: Job) -> None:
        """That a version gives the state back as it is stored."""
        cnr_store.load(url, other.model, other.optimizer, version=version)
        entries = Catalog(open_backend(url)).record(version).arrays
        for key, tensor in self.state.items():
            config = entries[f"tables/a/{key}"].codec
            assert config is not None
            moved = {each: config[each] for each in {"scale", "shift"} & config.keys()}
            assert {**config} == (FIRST if key in FIRST_SLOTS else PLAIN) | moved, key
            found = as_array(other.state[key])
            np.testing.assert_array_equal(found, stored(tensor, config), key)
            if key not in FIRST_SLOTS:
                assert ((found == 0) == (as_array(tensor) == 0)).all()


def as_array(tensor: torch.Tensor) -> Values:
    return np.asarray(tensor.to(torch.float32).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())


def codec_of(url: Path, version: str, slot: str, table: str = "a") -> Any:
    return Catalog(open_backend(url)).record(version).arrays[f"tables/{table}/{slot}"].codec


@pytest.mark.slow
@pytest.mark.some_by_day(5)
@pytest.mark.parametrize("policy", ["intermittent", "consecutive", "one-shot"])
@pytest.mark.parametrize("name", MAKERS)
def test_state_is_stored_by_the_rule(tmp_path: Path, name: str, policy: Any) -> None:
    check_history(tmp_path, MAKERS[name], policy, 2, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24))
def test_long_histories(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    policy, name = random.choice(["intermittent", "consecutive", "auto", "full"]), random.choice([*MAKERS])
    dtype = [torch.float32, torch.bfloat16, torch.float16][
        seed % 3 if name in ("momentum", "nesterov") else 0
    ]
    check_history(tmp_path, MAKERS[name], policy, seed, 40, dtype)


def check_history(
    url: Path, make: Make, policy: Any, seed: int, saves: int, dtype: torch.dtype = torch.float32
) -> None:
    """Trainings, writes that nobody sees, saves that fail, and loads."""
    random, job, fails = np.random.default_rng(seed), Job(make, dtype), [False]
    other, deltas = Job(make, dtype), 0

    def fault(operation: str, key: str, index: int) -> Any:
        return "before" if fails[0] and operation == "create" and key.startswith("versions/") else None

    backend = FaultyBackend(open_backend(url), fault)
    options = AUTO | {
        "policy": policy,
        "failures": cnr_store.Failures(retry_seconds=0),
        "tracking": cnr_store.Tracking(audit=False),
        "limits": cnr_store.Limits(snapshot_bytes=(seed % 2) << 30),
    }
    with cnr_store.Checkpointer(backend, job.model, job.optimizer, **options) as checkpointer:
        job.train(random, 6)
        for number in range(saves):
            job.train(random, int(random.integers(1, 9)))
            kind = random.choice(["none", "none", "data", "fail", "load", "replace"])
            if kind == "data":
                by_data(job.weight)
            elif kind == "fail":
                fails[0] = True
                with suppress(CheckpointError):
                    checkpointer.save(number).result()
                fails[0] = False
            elif kind == "load" and number:
                checkpointer.load()
                job.train(random)
            elif kind == "replace":
                state = job.optimizer.state[job.weight]
                state.update({key: each.clone() for key, each in job.state.items()})
            info = checkpointer.save(number).result()
            deltas += info.kind == "delta"
            job.check(str(url), info.id, other)
    assert deltas or policy == "full"
    assert not cnr_store.verify(str(url), deep=True).problems


@pytest.mark.parametrize(
    "options",
    [{"codec": None, "bits": 32}, {"codec": None, "bits": 4}, {"codec": {"b": LATTICE}, "budget": None}],
)
def test_state_beside_weights_on_no_lattice_is_absolute(tmp_path: Path, options: dict[str, Any]) -> None:
    job = Job(MAKERS["Adam"])
    job.train(np.random.default_rng(6), 20)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **AUTO | options) as checkpointer:
        version = checkpointer.save(0).result().id
    for slot, bits in (("exp_avg", 2), ("exp_avg_sq", 3)):
        assert codec_of(tmp_path, version, slot) == {"id": "cnr_floating", "mantissa_bits": bits}


@pytest.mark.parametrize("name", OTHERS)
def test_other_state_is_on_a_plain_grid_and_never_divides_by_0(tmp_path: Path, name: str) -> None:
    job, other = (Job(OTHERS[name], sparse=name == "SparseAdam") for _ in range(2))
    job.train(np.random.default_rng(7), 5)
    for tensor in job.state.values():
        if (tensor >= 0).all():
            tensor[::7] = 1e-42  # subnormal
            tensor[1::7] = 3e38  # beyond the grid
    options = AUTO | {
        "state_bits": {"*": "auto"},
        "tracking": cnr_store.Tracking(trusted_optimizers=[OwnRowWise]),
    }
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
        version = checkpointer.save(0).result().id
    cnr_store.load(str(tmp_path), other.model, other.optimizer)
    assert job.state
    for key, tensor in job.state.items():
        rule = FIRST if key in FIRST_SLOTS else PLAIN
        assert codec_of(tmp_path, version, key) == rule
        np.testing.assert_array_equal(other.state[key].numpy().reshape(ROWS, -1), stored(tensor, rule))
        if (tensor >= 0).all():
            assert ((other.state[key] == 0) == (tensor == 0)).all()


@pytest.mark.parametrize(
    ("moment", "divisor", "rules"),
    [
        (torch.bfloat16, torch.float32, (FIRST, PLAIN)),
        (torch.float16, torch.bfloat16, (FIRST, PLAIN)),
        (torch.float32, torch.float64, (FIRST, None)),  # which is not stored by rows
    ],
)
def test_state_of_other_types(tmp_path: Path, moment: torch.dtype, divisor: torch.dtype, rules: Any) -> None:
    job, other = Job(MAKERS["Adam"]), Job(MAKERS["Adam"])
    job.train(np.random.default_rng(8), 20)
    state = job.optimizer.state[job.weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].to(moment), state["exp_avg_sq"].to(divisor)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **AUTO) as checkpointer:
        version = checkpointer.save(0).result().id
    assert Catalog(open_backend(tmp_path)).record(version).arrays["tables/a/exp_avg"].element == dtype_name(
        moment
    )
    assert codec_of(tmp_path, version, "exp_avg") == rules[0]
    if rules[1] is not None:
        job.check(str(tmp_path), version, other)


def test_what_is_not_finite_stays(tmp_path: Path) -> None:
    job, other = Job(MAKERS["Adam"]), Job(MAKERS["Adam"])
    job.train(np.random.default_rng(9), 20)
    moment, divisor = job.state["exp_avg"], job.state["exp_avg_sq"]
    moment[0, 0], moment[1, 0], divisor[2, 0], divisor[3, 0] = torch.nan, torch.inf, torch.nan, torch.inf
    moment[4], divisor[4], moment[5], divisor[5] = 1e30, 3e38, 1e-40, 0.0
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **AUTO) as checkpointer:
        checkpointer.save(0).result()
    cnr_store.load(str(tmp_path), other.model, other.optimizer)
    found = other.state["exp_avg"]
    assert found[0, 0].isnan()
    assert found[1, 0].isinf()
    np.testing.assert_array_equal(found[2, :1], stored(moment[2, :1, None], FIRST)[:, 0])
    assert found[4].eq(2.0**99 * 1.5).all()  # 1e30: the nearest on the grid


def test_explain_goes_by_the_rule(tmp_path: Path) -> None:
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(10)
    job.train(random, 20)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **AUTO) as checkpointer:
        checkpointer.save(0).result()
        (one, _) = checkpointer.explain()
        assert (one.compared, one.changed) == (True, 0)


def test_widths_by_optimizer_are_for_state_alone(tmp_path: Path) -> None:
    model = Job(MAKERS["Adam"]).model
    with pytest.raises(OptionError, match=r"state_bits 'automatic': use 2, .* 'm23', 'auto', or a mapping"):
        cnr_store.Checkpointer(tmp_path, model, state_bits="automatic")


def test_the_default_is_auto(tmp_path: Path) -> None:
    job = Job(MAKERS["Adam"])
    job.train(np.random.default_rng(6), 20)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer) as checkpointer:
        job.check(str(tmp_path), checkpointer.save(0).result().id, Job(MAKERS["Adam"]))
