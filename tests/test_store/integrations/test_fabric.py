"""Models and optimizers that Lightning Fabric has set up are stored as they are without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import cnr_store
from cnr_store import OptionError, TrackedReader
from cnr_store.training.model import names, optimizer_state
from tests.test_store.integrations.lightning_fit import WARNINGS
from tests.test_store.support.wrapped_training import ROWS, Run, check_wrapped, paths

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


def setup(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    wrapped: tuple[Any, Any] = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    return wrapped


@pytest.mark.slow
def test_what_fabric_wraps_is_stored_as_without_it(tmp_path: Path) -> None:
    check_wrapped(tmp_path, setup)


@pytest.mark.slow
def test_what_fabric_compiles_is_stored_as_without_it(tmp_path: Path) -> None:
    def compile_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return setup(torch.compile(model, backend="eager"), optimizer)  # type: ignore[arg-type]

    def compile_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        wrapped, stepping = setup(model, optimizer)
        return torch.compile(wrapped, backend="eager"), stepping

    for way in (compile_before, compile_after):
        run = Run(way)
        assert run.save(tmp_path / way.__name__) == [ROWS, 2, 2]
        assert {path for path in paths(tmp_path / way.__name__) if "_" in path} == set()


def test_parts_that_fabric_wraps_have_their_own_names(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    tower: Any = nn.ModuleDict({"out": nn.Linear(2, ROWS), "t": nn.Embedding(ROWS, 2)})
    tower["out"].weight = tower["t"].weight  # which the state dict has first
    model = nn.ModuleDict({"tower": fabric.setup_module(tower)})
    optimizer = torch.optim.Adagrad(model.parameters())
    cnr_store.save(tmp_path, model, fabric.setup_optimizers(optimizer))
    assert [path for path in paths(tmp_path) if path.startswith("tables/tower.t/")] == [
        "tables/tower.t/sum",
        "tables/tower.t/weight",
    ]


def test_a_store_of_before_fabric_was_known_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unknown:
        unknown.setattr(names, "wrapped_parts", lambda _: ())
        unknown.setattr(optimizer_state, "unwrap_optimizer", lambda optimizer: optimizer)
        before = Run(setup)
        assert before.save(tmp_path) == [ROWS, 2, 2]
    run = Run(setup)
    with run.checkpointer(tmp_path) as checkpointer:
        checkpointer.load()
        assert run.same_as(before)
        run.train(7)
        assert checkpointer.save(3).result().rows == 1
    again = Run(setup)
    cnr_store.load(tmp_path, again.model, again.wrapped)
    assert again.same_as(run)


def test_optimizers_of_lightnings_own_loop_are_known(tmp_path: Path) -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = nn.Embedding(ROWS, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = LightningOptimizer(optimizer)
    with cnr_store.Checkpointer(tmp_path, model, wrapped, policy="consecutive") as checkpointer:
        checkpointer.save(1).result()
        model(torch.tensor([5])).sum().backward()
        optimizer.step()
        assert checkpointer.save(2).result().rows == 1


DATA = TensorDataset(torch.arange(40))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Told(Sampler[int]):
    """Shuffles by the epoch that it is told, as do those within it."""

    def __init__(self, sampler: Told | None = None) -> None:
        self.sampler = sampler
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order) if self.sampler is None else (order[each] for each in self.sampler)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(40))


def dealt_out(sampler: Sampler[int]) -> DataLoader[Any]:
    """As Fabric makes it of one with such a sampler in a job of two processes."""
    return DataLoader(DATA, 5, sampler=DistributedSamplerWrapper(sampler, num_replicas=2, rank=1))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    # Fabric puts such a sampler in by itself in jobs of more than one process.
    "distributed": lambda: DataLoader(DATA, 5, sampler=DistributedSampler(DATA, 1, 0, seed=3)),
    "stream": lambda: DataLoader(Stream(), 5),
    "persistent": lambda: DataLoader(
        DATA, 5, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "dealt out": lambda: dealt_out(SubsetRandomSampler(range(40), generator=seeded())),
    "dealt out by epoch": lambda: dealt_out(Told(Told())),
}


def fabric_loader(loader: DataLoader[Any]) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def reader(loader: DataLoader[Any], **options: Any) -> TrackedReader[Any]:
    return TrackedReader(fabric_loader(loader), **options)


def taken(batches: TrackedReader[Any], count: int) -> list[list[int]]:
    return [
        (batch if isinstance(batch, torch.Tensor) else batch[0]).tolist() for batch in batches.interval(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 8, 11, 19, 24])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_reader_of_a_loader_that_fabric_set_up_goes_on_in_the_epochs_own_order(
    tmp_path: Path, stop: int, kind: str
) -> None:
    make = LOADERS[kind]
    whole, first, second = taken(reader(make()), 32), reader(make()), reader(make())
    begun = taken(first, stop)
    cnr_store.save(tmp_path, nn.Embedding(4, 2), step=stop, reader=first)
    with cnr_store.Checkpointer(tmp_path, nn.Embedding(4, 2)) as checkpointer:
        assert checkpointer.resume(reader=second) == stop
    assert begun + taken(second, 32 - stop) == whole


def test_samplers_within_those_that_fabric_deals_out_are_told_the_epoch() -> None:
    inner = Told()
    taken(reader(dealt_out(Told(inner))), 9)
    assert inner.epoch == 2


def test_a_generator_that_is_named_has_no_other_name() -> None:
    mine = seeded()
    loader = dealt_out(SubsetRandomSampler(range(40), generator=mine))
    assert reader(loader, generators={"mine": mine}).state_dict()["generators"].keys() == {"mine"}


@pytest.mark.parametrize("stop", [0, 2])
def test_batches_are_on_the_device_of_fabrics_loader(stop: int) -> None:
    first = reader(LOADERS["distributed"]())
    taken(first, stop)
    loader = fabric_loader(LOADERS["distributed"]())
    loader._device = torch.device("meta")
    second: TrackedReader[Any] = TrackedReader(loader)
    second.load_state_dict(first.state_dict())
    assert [batch[0].device.type for batch in second] == ["meta"] * (8 - stop)


@pytest.mark.parametrize(
    "other", [DataLoader(DATA, 10), DataLoader(Stream(), 5), DataLoader(TensorDataset(torch.arange(30)), 5)]
)
def test_a_position_in_other_batches_is_refused(other: DataLoader[Any]) -> None:
    first = reader(DataLoader(DATA, 5))
    taken(first, 3)
    with pytest.raises(OptionError, match=r"its loader is .*'batches': 8"):
        reader(other).load_state_dict(first.state_dict())
