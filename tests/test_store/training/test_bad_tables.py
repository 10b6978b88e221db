"""Tables and optimizers out of the ordinary, and trouble in a comparison: each version holds what was saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CheckpointError
from cnr_store.training.tracking import comparison
from tests.test_store.training.saving.test_compared import stored

TABLE_BYTES = 20 << 10
"""Of a table: more than those that are lossless."""
Fill = Callable[[torch.Tensor], Any]


def zeros(weight: torch.Tensor) -> None:
    weight.zero_()


def constant(weight: torch.Tensor) -> None:
    weight.fill_(0.3)


def constant_rows(weight: torch.Tensor) -> None:
    weight.copy_(torch.randn(len(weight), 1).expand_as(weight))


def broken(weight: torch.Tensor) -> None:
    weight[::50], weight[1::50], weight[2::50, -1] = 1e30, torch.nan, -torch.inf


def infinite(weight: torch.Tensor) -> None:
    weight.fill_(torch.inf)


class Job:
    """One table and its optimizer."""

    def __init__(
        self, make: Callable[[Any], Optimizer], dim: int = 4, fill: Fill | None = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.make, self.model = (
            make,
            nn.ModuleDict({"t": nn.Embedding(TABLE_BYTES // 4 // dim, dim, **options)}),
        )
        self.weight = self.model.get_parameter("t.weight")
        with torch.no_grad():
            if fill is not None:
                fill(self.weight)
        self.optimizer = make(self.model.parameters())

    def train(self, step: int) -> None:
        rows = self.model["t"](
            torch.randperm(len(self.weight), generator=torch.Generator().manual_seed(step))[:40]
        )
        self.optimizer.zero_grad()
        (rows.nan_to_num(0, 0, 0).clamp(-9, 9) + rows.new_ones(()) * rows).sum().backward()
        self.optimizer.step()

    def arrays(self) -> dict[str, torch.Tensor]:
        """What is stored by rows, by path; but for first moments, which may be stored without their small values."""
        state = {
            key: value
            for key, value in self.optimizer.state[self.weight].items()
            if isinstance(value, torch.Tensor)
            and value.shape[:1] == self.weight.shape[:1]
            and key not in ("exp_avg", "momentum_buffer")
        }
        return {f"tables/t/{key}": value.detach() for key, value in {"weight": self.weight, **state}.items()}

    def check(self, url: Any, version: str, make: Callable[[], Job]) -> None:
        """Check that a version gives back what its codecs make of the table, bit for bit but for bits of NaN."""
        entries, other = Catalog(open_backend(url)).record(version).arrays, make()
        cnr_store.load(url, other.model, other.optimizer, version=version)
        found = other.arrays()
        assert found.keys() == self.arrays().keys()
        for path, values in self.arrays().items():
            expected = values
            if path in entries:  # others are not stored by rows, as they are
                expected = torch.from_numpy(stored(values, entries[path].codec)).reshape(values.shape)
            torch.testing.assert_close(
                found[path].to(expected), expected, rtol=0, atol=0, equal_nan=True, msg=path
            )


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.01)


def check_history(
    url: Path, make: Callable[[], Job], between: Callable[[Job, int], None], **options: Any
) -> None:
    """Save, train and save, and go on in another process's stead: each version holds what was saved."""
    saved = []
    for life in range(2):
        job = make()
        with cnr_store.Checkpointer(
            url, job.model, job.optimizer, job=cnr_store.Job(unloaded="warn"), **options
        ) as checkpointer:
            checkpointer.resume()
            for step in range(3 * life, 3 * life + 3):
                between(job, step)
                info = checkpointer.save(step).result()
                job.check(url, info.id, make)
                saved.append(info.kind)
    assert saved[0] == "baseline"
    assert not cnr_store.verify(str(url), deep=True).problems


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("fill", [zeros, constant, constant_rows, broken, infinite])
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 7])
def test_tables_out_of_the_ordinary(tmp_path: Path, dim: int, fill: Fill, make: Any, policy: Any) -> None:
    check_history(tmp_path, lambda: Job(make, dim, fill), Job.train, policy=policy)


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    check_history(tmp_path, lambda: Job(adam, 8, broken, dtype=dtype), Job.train, policy="consecutive")


@pytest.mark.nightly
def test_a_hundred_million_rows_of_one_column(tmp_path: Path) -> None:
    rows = 10**8
    weight = torch.empty(rows, 1).normal_(std=0.1)
    model = nn.ModuleDict({"t": nn.Embedding(rows, 1, sparse=True, _weight=weight)})
    optimizer = SGD(model.parameters(), lr=0.1)
    with cnr_store.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(0).result()
        (model["t"](torch.arange(999, rows, 1000)) * 9).sum().backward()
        optimizer.step()
        info = checkpointer.save(1).result()
    assert (info.kind, info.rows) == ("delta", rows // 1000)
    saved = model.get_parameter("t.weight").detach().clone()
    with torch.no_grad():
        model.get_parameter("t.weight").zero_()
    cnr_store.load(tmp_path, model)
    codec = Catalog(open_backend(tmp_path)).record(info.id).arrays["tables/t/weight"].codec
    assert codec is not None
    assert float((model.get_parameter("t.weight").detach() - saved).abs().max()) <= codec["step"] / 2 * 1.0001


class Replacing(Adam):
    """Makes its state anew in each step."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for state in self.state.values():
            state.update({key: value.clone() for key, value in state.items()})
        return found


class Narrow(Adam):
    """Keeps its state in another type."""

    dtype = torch.bfloat16

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state.update({key: value.float() for key, value in state.items()})
        found = super().step(closure)
        for state in self.state.values():
            state.update({key: value.to(self.dtype) if value.ndim else value for key, value in state.items()})
        return found


class Wide(Narrow):
    """The same, in float64."""

    dtype = torch.float64


class Sharing(Adam):
    """Has one tensor for both of its moments."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"] = state["exp_avg"].square_()
            state["exp_avg"] = state["exp_avg_sq"]
        return found


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize("kind", [Replacing, Narrow, Wide, Sharing])
def test_optimizers_that_do_with_their_state_as_they_like(
    tmp_path: Path, kind: type[Adam], policy: Any
) -> None:
    check_history(tmp_path, lambda: Job(lambda each: kind(each, lr=0.01)), Job.train, policy=policy)


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("rate", [0.0, float("nan"), 1e30])
@pytest.mark.parametrize("make", [adam, sgd])
def test_rates_that_teach_nothing(tmp_path: Path, make: Any, rate: float) -> None:
    def train(job: Job, step: int) -> None:
        job.optimizer.param_groups[0]["lr"] = 0.01 if step % 2 == 0 else rate
        job.train(step)

    check_history(tmp_path, lambda: Job(make), train, policy="consecutive")


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("make", [adam, sgd])
def test_steps_without_backward(tmp_path: Path, make: Any) -> None:
    """Also the first one, of an optimizer that has no state yet; and one that goes by older gradients."""

    def step_alone(job: Job, step: int) -> None:
        if step == 1:
            job.train(step)
        job.optimizer.step()
        if step == 2:
            job.optimizer.zero_grad()

    check_history(tmp_path, lambda: Job(make), step_alone, policy="consecutive")


@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("what", ["SIGINT", "SIGTERM", "memory"])
def test_a_comparison_that_is_cut_short_forgets_no_row(
    tmp_path: Path, what: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, left, values = Job(adam), list[int](), comparison._values
    monkeypatch.setattr(comparison, "_BLOCK_BYTES", 4 << 10)

    def cut(array: Any, where: slice) -> Any:
        if left and not left.pop():
            if what == "memory":
                raise MemoryError
            signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals[what])
            assert seen.wait(10)
        return values(array, where)

    def handle(*_: object) -> None:
        seen.set()
        raise KeyboardInterrupt

    seen, before = (
        threading.Event(),
        [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)],
    )
    monkeypatch.setattr(comparison, "_values", cut)
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, policy="consecutive") as checkpointer:
        job.train(0)
        checkpointer.save(0).result()
        job.train(1)
        left.extend([0] + [1] * block)
        for number, _ in before:
            signal.signal(number, handle)
        try:
            with pytest.raises(MemoryError if what == "memory" else KeyboardInterrupt):
                checkpointer.save(1)
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        job.weight.data[5] += 1
        info = checkpointer.save(2).result()
        assert info.kind == "delta"
        job.check(tmp_path, info.id, lambda: Job(adam))
    assert len(cnr_store.versions(str(tmp_path))) == 2


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
def test_a_whole_save_that_fails_leaves_what_deltas_are_compared_with(tmp_path: Path, policy: Any) -> None:
    job, fails = Job(adam), [False]
    backend = FaultyBackend(
        open_backend(tmp_path),
        lambda operation, key, _: (
            "before" if fails[0] and (operation, key[:9]) == ("create", "versions/") else None
        ),
    )
    with cnr_store.Checkpointer(
        backend, job.model, job.optimizer, policy=policy, failures=cnr_store.Failures(retry_seconds=0)
    ) as checkpointer:
        job.train(0)
        checkpointer.save(0).result()
        fails[0] = True
        job.weight.data *= 3  # of another step
        with pytest.raises(CheckpointError):
            checkpointer.save(1, full=True).result()
        fails[0] = False
        job.weight.data /= 3
        job.weight.data[7] += 1
        info = checkpointer.save(2).result()
        assert (info.kind, info.rows < 100) == ("delta", True)
        job.check(tmp_path, info.id, lambda: Job(adam))


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
def test_hooks_and_comparison_go_on_from_one_another(tmp_path: Path, momenta: Any, policy: Any) -> None:
    """Without momentum hooks tell the changed rows; with it, a comparison does, from the first save of a job on."""
    for life, momentum in enumerate(momenta):
        job = Job(sgd)
        with cnr_store.Checkpointer(
            tmp_path, job.model, job.optimizer, policy=policy, job=cnr_store.Job(unloaded="warn")
        ) as checkpointer:
            checkpointer.resume()
            job.optimizer.param_groups[0]["momentum"] = momentum
            for step in range(2 * life, 2 * life + 2):
                job.train(step)
                (explained,) = checkpointer.explain()
                info = checkpointer.save(step).result()
                job.check(tmp_path, info.id, lambda: Job(sgd))
                assert info.kind == ("delta" if step else "baseline")
                assert explained.compared == (momentum > 0 and step > 0)
                assert step == 0 or info.rows < len(job.weight) / 2
