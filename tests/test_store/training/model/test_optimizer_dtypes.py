"""Optimizer state comes back in the types that it had, whatever the types of its parameters are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.optim import ASGD, LBFGS, Adafactor, Adagrad, Adam, NAdam, Optimizer

import cnr_store
from cnr_store import StateError

ROWS = 40
HALVES = [torch.bfloat16, torch.float16]


class ByHand(Optimizer):
    """Keeps what torch would cast: wider, narrower, whole, complex, nested, and a text."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        generator = torch.Generator().manual_seed(3)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            exact = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            state = self.state[parameter]
            state["main"] = exact.float()
            state["wide"] = exact
            state["half"] = exact.half()
            state["counts"] = (exact * 2**40).long()
            state["mask"] = exact > 0
            state["waves"] = torch.complex(exact, -exact).to(torch.complex64)
            state["nested"] = {"list": [exact[:3].float(), 7, (exact[:1], 2.5)], "none": None}
            state["kind"] = "by hand"
            state["step"] = torch.tensor(3.0, dtype=torch.float64)
            with torch.no_grad():
                parameter.sub_(state["main"] * 0.1)


Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "by hand": ByHand,
    "nadam": lambda parameters: NAdam(parameters, eps=1e-3),
    "asgd": lambda parameters: ASGD(parameters, t0=1),
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.1),
    "adagrad": lambda parameters: Adagrad(parameters, eps=1e-3),
    "adam": lambda parameters: Adam(parameters, eps=1e-3, amsgrad=True),
    "lbfgs": lambda parameters: LBFGS(parameters, max_iter=2),
}


class Job:
    """Two tables and a layer that train in one element type."""

    def __init__(self, make: Make, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict(
            {"u": nn.Embedding(ROWS, 4), "i": nn.Embedding(ROWS, 4), "top": nn.Linear(4, 1)}
        ).to(dtype)
        self.optimizer = make(self.model.parameters())

    def train(self, steps: int = 1) -> Job:
        def loss() -> Any:
            self.optimizer.zero_grad()
            ids = torch.tensor([1, 5])
            found: Any = self.model["top"](self.model["u"](ids) + self.model["i"](ids)).square().sum()
            found.backward()
            return found

        for _ in range(steps):
            loss()
            self.optimizer.step(loss)
        return self

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.model.get_parameter(name)]
        return found

    def assert_is(self, other: Job) -> None:
        for (name, left), right in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            assert torch.equal(left, right)
            assert_same(self.state(name), other.state(name))


def assert_same(left: Any, right: Any) -> None:
    """Values and types of two trees, bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.some_by_day(10)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", MAKERS)
def test_state_is_exactly_as_it_was_saved_and_trains_on_so(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    job = Job(MAKERS[name], dtype).train(3)
    cnr_store.save(tmp_path, job.model, job.optimizer, bits=32)
    fresh, trained = Job(MAKERS[name], dtype, 1), Job(MAKERS[name], dtype, 2).train()
    for other, options in ((fresh, {}), (trained, {}), (fresh, {"strict": "ignore"})):
        cnr_store.load(tmp_path, other.model, other.optimizer, **options)  # type: ignore[arg-type]  # of several
        other.assert_is(job)
    for each in (job, fresh, trained):
        each.train(2)
    fresh.assert_is(job)
    trained.assert_is(job)


@pytest.mark.parametrize("name", ["by hand", "nadam", "asgd", "adam"])
@pytest.mark.parametrize("options", [{"tables": "u"}, {"rows": {"u": range(ROWS)}}, {"tensors": "top.*"}])
def test_state_that_is_not_chosen_is_not_touched(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    job = Job(MAKERS[name], torch.bfloat16).train(3)
    cnr_store.save(tmp_path, job.model, job.optimizer, bits=32)
    other = Job(MAKERS[name], torch.bfloat16, 1).train()
    kept = {each: copy.deepcopy(other.state(each)) for each, _ in other.model.named_parameters()}
    cnr_store.load(tmp_path, other.model, other.optimizer, **options)
    for each in kept:
        chosen = each.startswith("top" if "tensors" in options else "u.")
        if not chosen:
            assert_same(other.state(each), kept[each])
        elif "rows" not in options:
            assert_same(other.state(each), job.state(each))
        else:  # what stands beside rows is the optimizer's own
            for key, value in other.state(each).items():
                assert_same(value, (job if _by_rows(value) else other).state(each)[key])


def _by_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype.itemsize < 8


class Expanded(Optimizer):
    """Begins with state that is one number in memory."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["sum"] = torch.ones([1] * parameter.ndim).expand(parameter.shape)

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state["sum"] = state["sum"] + torch.arange(len(state["sum"])).view(
                -1, *[1] * (state["sum"].ndim - 1)
            )


@pytest.mark.parametrize("options", [{}, {"strict": "ignore"}, {"tables": "*"}, {"rows": range(3)}])
def test_state_that_shares_its_memory_is_loaded_into_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    job = Job(Expanded, torch.float32).train()
    cnr_store.save(tmp_path, job.model, job.optimizer, bits=32)
    other = Job(Expanded, torch.float32, 1)
    cnr_store.load(tmp_path, other.model, other.optimizer, **options)
    for name in ("u.weight", "i.weight"):
        wanted = job.state(name)["sum"].clone()
        wanted[len(options.get("rows", wanted)) :] = 1
        assert_same(other.state(name)["sum"], wanted)


class OwnWay(ByHand):
    """Loads in the type that it wants."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["main"] = state["main"].double()


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
def test_a_class_that_loads_its_own_way_has_it(tmp_path: Path) -> None:
    job = Job(OwnWay, torch.bfloat16).train()
    cnr_store.save(tmp_path, job.model, job.optimizer)
    other = Job(OwnWay, torch.bfloat16, 1)
    cnr_store.load(tmp_path, other.model, other.optimizer)
    assert other.state("u.weight")["main"].dtype is torch.float64


def test_a_hook_that_changes_types_has_its_way(tmp_path: Path) -> None:
    job = Job(ByHand, torch.bfloat16).train()
    cnr_store.save(tmp_path, job.model, job.optimizer)
    other = Job(ByHand, torch.bfloat16, 1)

    def change(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["main"] = state["main"].double()

    other.optimizer.register_load_state_dict_post_hook(change)
    cnr_store.load(tmp_path, other.model, other.optimizer)
    assert other.state("u.weight")["main"].dtype is torch.float64
    assert_same(other.state("u.weight")["wide"], job.state("u.weight")["wide"])


def test_state_of_a_converted_model_is_of_the_type_that_its_optimizer_has(tmp_path: Path) -> None:
    job = Job(MAKERS["adagrad"], torch.float32).train()
    cnr_store.save(tmp_path, job.model, job.optimizer, bits=32)
    fresh, narrow, wide = (Job(MAKERS["adagrad"], torch.bfloat16, seed) for seed in (1, 2, 3))
    narrow.train()
    wide.train()
    wide.state("u.weight")["sum"] = wide.state("u.weight")["sum"].float()
    wanted = job.state("u.weight")["sum"]
    for other, dtype in ((fresh, torch.bfloat16), (narrow, torch.bfloat16), (wide, torch.float32)):
        cnr_store.load(tmp_path, other.model, other.optimizer, strict="ignore")
        assert_same(other.state("u.weight")["sum"], wanted.to(dtype))


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Any]:
    """Optimizers that are spread over ranks; this process is the only one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch about its own modules
        from torch.distributed.optim import ZeroRedundancyOptimizer
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield ZeroRedundancyOptimizer
    distributed.destroy_process_group()


@pytest.mark.slow
def test_an_optimizer_that_can_not_tell_its_state(tmp_path: Path, sharded: Any) -> None:
    def make(parameters: Any) -> Any:
        return sharded(parameters, Adagrad, lr=0.1)

    url = tmp_path / "store"
    job = Job(make, torch.float32).train()
    with pytest.raises(StateError, match=r"the state_dict of ZeroRedundancyOptimizer failed: .*consolidate"):
        cnr_store.save(url, job.model, job.optimizer)
    assert cnr_store.versions(url) == []
    job.optimizer.consolidate_state_dict()  # type: ignore[attr-defined]  # of this class
    cnr_store.save(url, job.model, job.optimizer, bits=32)
    other = Job(make, torch.float32, 1)
    cnr_store.load(url, other.model, other.optimizer)
    own, restored = (each.optimizer.optim for each in (job, other))  # type: ignore[attr-defined]  # as above
    assert_same(restored.state_dict()["state"], own.state_dict()["state"])
