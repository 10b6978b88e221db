"""FSDP2: each rank has some rows of every parameter, and the ranks write one version of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import cnr_store
from tests.nightly import at_night
from tests.test_store.ranks.support.rank_processes import preload, run_ranks
from tests.test_store.support.distributed import rank_training
from tests.test_store.training.distributed.test_ddp import values

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    preload(*rank_training.PRELOAD)


@pytest.mark.parametrize(
    ("world", "how", "kind", "others"),
    [
        (2, "fsdp", "adagrad", [(1, "fsdp"), (3, "fsdp"), (2, "ddp"), (1, "bare")]),
        (3, "fsdp", "adam", [(2, "fsdp"), (1, "bare")]),
        at_night(4, "hsdp", "adam", [(3, "fsdp")]),
        (4, "hsdp", "adagrad", [(2, "fsdp")]),
    ],
)
def test_every_number_of_ranks_loads_what_some_saved(
    tmp_path: Path, world: int, how: str, kind: str, others: list[tuple[int, str]]
) -> None:
    saved = values(run_ranks(world, rank_training.train, tmp_path, how, kind, False, 3))
    first, *later = saved[0]["rows"]
    assert first == 3 * rank_training.ROWS
    # Adam moves every row that was ever looked up.
    assert all(0 < rows <= (5 if kind == "adam" else 2) * world * 15 for rows in later), later
    for number, other in others:
        loaded = values(run_ranks(number, rank_training.load_once, tmp_path, other, kind, False))
        assert loaded == [saved[0]["trained"]] * number


@pytest.mark.parametrize(("world", "how", "owners"), [at_night(4, "fsdp", 2), (4, "hsdp", 2), (3, "fsdp", 1)])
def test_few_ranks_own_what_all_have_pieces_of(tmp_path: Path, world: int, how: str, owners: int) -> None:
    arguments = (tmp_path / "few", how, "adam", False, 2)
    saved = values(run_ranks(world, rank_training.train_with_few_owners, owners, *arguments))
    assert [each["trained"] for each in saved] == [saved[0]["trained"]] * world
    for number, other in ((2, "fsdp"), (1, "bare")):
        loaded = values(run_ranks(number, rank_training.load_once, tmp_path / "few", other, "adam", False))
        assert loaded == [saved[0]["trained"]] * number


def test_the_same_ranks_go_on_where_each_stood(tmp_path: Path) -> None:
    whole = values(run_ranks(2, rank_training.train, tmp_path / "whole", "fsdp", "adagrad", False, 4))
    before = values(run_ranks(2, rank_training.train, tmp_path / "parts", "fsdp", "adagrad", False, 2))
    after = values(run_ranks(2, rank_training.train, tmp_path / "parts", "fsdp", "adagrad", False, 2))
    for rank in (0, 1):
        assert after[rank]["loaded"] == before[rank]["trained"]
        assert after[rank]["random"] == before[rank]["next"]
        assert after[rank]["trained"] == whole[rank]["trained"]
    assert max(after[0]["rows"]) <= 60  # deltas of what the others saved


@pytest.mark.parametrize("counts", [at_night((0, 2)), (2, 0), (1, 3)])
def test_objects_may_have_other_arrays_on_each_rank(tmp_path: Path, counts: tuple[int, int]) -> None:
    found = values(run_ranks(2, rank_training.uneven_objects, tmp_path, counts))
    assert [each["loaded"] for each in found] == [counts[0]] * 2


def wrap_by_fsdp1(url: Path) -> str:
    model = FullyShardedDataParallel(nn.Sequential(nn.Embedding(40, 4)), device_id=torch.device("cpu"))
    with pytest.raises(cnr_store.UnsupportedModelError) as caught:
        cnr_store.Checkpointer(url, model, torch.optim.SGD(model.parameters(), 0.1))
    return str(caught.value)


def test_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    for told in values(run_ranks(2, wrap_by_fsdp1, tmp_path)):
        assert "FSDP1" in told
        assert "fully_shard" in told


def test_what_is_not_exact_is_refused(tmp_path: Path) -> None:
    for alone, of_rows, of_layer, unowned in values(run_ranks(2, rank_training.refusals, tmp_path)):
        assert "saves alone, and other ranks have a part of it; give Checkpointer the group" in alone
        assert "table 'items': the optimizer's 'sum' is a Tensor of shape" in of_rows
        assert "'sum' of 'over.weight' in Adagrad is a Tensor of shape" in of_layer
        assert "it is not known which part" in of_rows
        assert unowned == [1209, 2]  # compared: the row that was looked up, of both tables


def train_few_rows(url: Path, kind: str) -> list[list[float]]:
    """Train a table of two rows, and return what a load brings back onto each rank."""
    model = nn.ModuleDict({"few": nn.Embedding(2, 4), "many": nn.Embedding(40, 4)})
    for part in model.values():
        fully_shard(part)
    (optimizer,) = rank_training.optimizers_of(kind, model)
    few: Any = model["few"]
    with cnr_store.Checkpointer(
        url, model, optimizer, bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        for step in range(3):
            optimizer.zero_grad()
            (few(torch.tensor([step % 2])).sum() + model["many"](torch.tensor([step])).sum()).backward()
            optimizer.step()
            checkpointer.save(step).result()
        trained = rank_training.digests(model, [optimizer])
        with torch.no_grad():
            few.weight.zero_()
        checkpointer.load()
        assert rank_training.alike(rank_training.digests(model, [optimizer])) == trained
    rows: list[list[float]] = few.weight.full_tensor().tolist()
    return rows


@pytest.mark.parametrize("kind", ["adagrad", at_night("adam"), at_night("sgd")])
def test_a_rank_may_have_no_rows_of_a_table(tmp_path: Path, kind: str) -> None:
    first, *others = values(run_ranks(3, train_few_rows, tmp_path, kind))
    assert others == [first] * 2
    assert all(any(row) for row in first)


def train_few_columns(url: Path, kind: str) -> list[Any]:
    """Train a table of which each rank has columns, and return what a load brings back onto each rank.

    And whether saves compare it, and why not.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Embedding(5000, 2)
    torch.manual_seed(0)
    model.weight = nn.Parameter(distribute_tensor(torch.randn(5000, 2), mesh, [Shard(1)]))
    (optimizer,) = rank_training.optimizers_of(kind, model)
    with cnr_store.Checkpointer(
        url, model, optimizer, bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        for step in range(3):
            gradient = torch.zeros(5000, 2)
            gradient[step] = 1
            model.weight.grad = distribute_tensor(gradient, mesh, [Shard(1)])
            optimizer.step()
            checkpointer.save(step).result()
        trained = rank_training.digests(model, [optimizer])
        with torch.no_grad():
            model.weight.zero_()
        checkpointer.load()
        assert rank_training.alike(rank_training.digests(model, [optimizer])) == trained
        (table,) = checkpointer.explain()
    weight: Any = model.weight
    return [weight.full_tensor()[:3].tolist(), table.compared, table.why]


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_a_rank_may_have_no_columns_of_a_table(tmp_path: Path, kind: str) -> None:
    first, *others = values(run_ranks(3, train_few_columns, tmp_path, kind))
    assert others == [first] * 2
    assert not first[1]
    is_whole = "rows held in parts of their columns are not compared" in first[2]
    assert is_whole == (kind == "adam"), first[2]


def save_over(url: Path, ranks: list[Any], placements: list[Any]) -> str:
    """What is said of a table over a mesh of these ranks."""
    mesh = DeviceMesh("cpu", ranks)
    model = nn.Embedding(8, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, placements))
    try:
        with cnr_store.Checkpointer(
            url, model, bits=32, failures=cnr_store.Failures(timeout_seconds=30)
        ) as checkpointer:
            checkpointer.save(1)
    except cnr_store.UnsupportedModelError as error:
        return str(error)
    return "saved"


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize(
    ("ranks", "placements"), [([1, 0], [Shard(0)]), ([[0, 1], [3, 2]], [Replicate(), Shard(0)])]
)
def test_a_mesh_with_ranks_out_of_order_is_refused(
    tmp_path: Path, ranks: list[Any], placements: list[Any]
) -> None:
    """torch gathers its rows in another order than the one in which it says that they lie."""
    world = torch.tensor(ranks).numel()
    for said in values(run_ranks(world, save_over, tmp_path / "mixed", ranks, placements)):
        assert f"a mesh with ranks out of order, {ranks}" in said
    ascending = torch.arange(world).reshape(torch.tensor(ranks).shape).tolist()
    assert set(values(run_ranks(world, save_over, tmp_path / "kept", ascending, placements))) == {"saved"}


class Scaled(nn.Module):
    """A table, and a parameter of no dimensions, as of logits that are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(40, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def train_scaled(url: Path, kind: str) -> list[float]:
    """Train, load into another model, and go on with both: return the scales of both."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make = getattr(torch.optim, kind)
    jobs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = distribute_module(Scaled(), mesh)
        jobs.append((model, make(model.parameters(), lr=0.1)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            whole: Any = torch.randn(parameter.shape)
            parameter.grad = distribute_tensor(whole, mesh)
        optimizer.step()

    (trained, optimizer), (loaded, other) = jobs
    with cnr_store.Checkpointer(
        url, trained, optimizer, bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        for seed in range(3):
            step(trained, optimizer, seed)
            checkpointer.save(seed).result()
    with cnr_store.Checkpointer(
        url, loaded, other, bits=32, failures=cnr_store.Failures(timeout_seconds=30)
    ) as checkpointer:
        checkpointer.load()
    assert rank_training.digests(loaded, [other]) == rank_training.digests(trained, [optimizer])
    for job in jobs:
        step(*job, seed=7)
    scales: list[Any] = [model.scale for model, _ in jobs]
    return [scale.full_tensor().item() for scale in scales]


@pytest.mark.parametrize("kind", ["Adam", *map(at_night, ["NAdam", "ASGD", "Adamax", "RMSprop"])])
def test_a_parameter_of_no_dimensions_is_spread(tmp_path: Path, kind: str) -> None:
    for trained, loaded in values(run_ranks(2, train_scaled, tmp_path, kind)):
        assert trained == loaded != 1.0
