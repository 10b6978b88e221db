"""A checkpointer outlives no change of what its model's tables are or where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrizations
from torch.optim import SGD

import cnr_store
from cnr_store import Checkpointer
from cnr_store.errors import CheckpointError, ModelMismatchError, UnsupportedModelError
from cnr_store.training.distributed.pieces import local_of
from tests.test_store.support.tracked_table import backward, ids

ROWS = 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.same = (nn.Embedding(ROWS, 3) for _ in range(3))
        self.same.weight = self.item.weight
        self.top = nn.Linear(3, ROWS)

    def forward(self, *rows: int) -> Any:
        return self.top(self.user(ids(*rows)) + self.item(ids(*rows)) + self.same(ids(*rows))).square().sum()


def another(net: Net) -> None:
    net.user = nn.Embedding(ROWS, 3)


def another_over_the_same_parameter(net: Net) -> None:
    net.user = nn.Embedding(ROWS, 3, _weight=net.user.weight.detach())
    net.user.weight = net.user.weight


def another_that_compares_its_weights(net: Net) -> None:
    class Elementwise(nn.Embedding):
        def __eq__(self, other: object) -> Any:
            return self.weight == getattr(other, "weight", other)

        __hash__ = nn.Embedding.__hash__

    net.user = Elementwise(ROWS, 3)


def more(net: Net) -> None:
    net.country = nn.Embedding(4, 3)


def one_more_name(net: Net) -> None:
    net.alias = net.user


def fewer(net: Net) -> None:
    del net.user


def wrapped(net: Net) -> None:
    net.user = nn.Sequential(net.user)  # type: ignore[assignment]


def exchanged(net: Net) -> None:
    net.user, net.item = net.item, net.user


def computed(net: Net) -> None:
    parametrizations.weight_norm(net.user)


def tied(net: Net) -> None:
    net.top.weight = net.user.weight


def tied_tables(net: Net) -> None:
    net.user.weight = net.item.weight


def untied(net: Net) -> None:
    net.same.weight = nn.Parameter(torch.ones(ROWS, 3))


CHANGES = [
    another,
    another_over_the_same_parameter,
    another_that_compares_its_weights,
    more,
    one_more_name,
    fewer,
    wrapped,
    exchanged,
    computed,
    tied,
    tied_tables,
    untied,
]
CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "save": lambda ckpt: ckpt.save(2),
    "load": lambda ckpt: ckpt.load(),
    "load a part": lambda ckpt: ckpt.load(tables="item", strict="ignore"),
}


def refuses(folder: Path, net: Net, change: Callable[[Net], object], kind: type[CheckpointError]) -> str:
    """What every call says; nothing has been written, or loaded."""
    said: set[str] = set()
    with Checkpointer(folder, net, bits=32) as ckpt:
        ckpt.save(1).result()
        change(net)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        for call in CALLS.values():
            with pytest.raises(kind) as refusal:
                call(ckpt)
            said.add(str(refusal.value))
        after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(
        torch.equal(value, after[name])
        for name, value in before.items()
        if value.is_cpu and not value.is_sparse
    )
    assert [version.step for version in cnr_store.versions(folder)] == [1]
    (message,) = said
    return message


@pytest.mark.parametrize("change", CHANGES)
def test_other_tables_than_those_watched_are_refused(tmp_path: Path, change: Callable[[Net], None]) -> None:
    assert "make a new checkpointer" in refuses(tmp_path, Net(), change, ModelMismatchError)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda net: net.double(), "float64"),
        (lambda net: net.to("meta"), "meta device"),
        (lambda net: setattr(net.user.weight, "data", torch.zeros(5)), r"shape \(5,\)"),
        (lambda net: setattr(net.user.weight, "data", torch.zeros(0, 3)), r"shape \(0, 3\)"),
        (lambda net: setattr(net.user, "weight", nn.Parameter(torch.zeros(ROWS, 0))), r"shape \(30, 0\)"),
        (
            lambda net: setattr(net.user, "weight", nn.Parameter(torch.zeros(ROWS, 3).to_sparse())),
            "sparse_coo",
        ),
    ],
)
def test_tables_that_can_be_stored_no_more_are_refused(
    tmp_path: Path, change: Callable[[Net], object], why: str
) -> None:
    message = refuses(tmp_path, Net(), change, UnsupportedModelError)
    assert why.replace("\\", "") in message
    assert "table 'user'" in message


def integers(net: Net) -> None:
    net.user.weight = nn.Parameter(torch.zeros(ROWS, 3, dtype=torch.int8), requires_grad=False)


def test_the_refusal_names_what_differs(tmp_path: Path) -> None:
    for change, why in (
        (another, "made: user.weight. Each came or went, is in another module"),
        (more, "made: country.weight. Each"),
        (fewer, "made: user.weight. Each"),
        (integers, "made: user.weight. Each"),
        (untied, "made: item.weight, same.weight. Each"),
    ):
        assert why in refuses(tmp_path / change.__name__, Net(), change, ModelMismatchError)


def test_what_was_refused_goes_on_once_it_is_undone(tmp_path: Path) -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path, net, optimizer, policy="consecutive", bits=32) as ckpt:
        ckpt.save(1).result()
        user, own, weight = net.user, net.user.weight, net.item.weight
        for change in (another, tied_tables):
            change(net)
            with pytest.raises(ModelMismatchError):
                ckpt.save(2)
            net.user = user
            net.item.weight = net.same.weight = weight
            net.user.weight = own
        ckpt.save(2).result()
        backward(net(4, 5))
        optimizer.step()
        info = ckpt.save(3).result()
    assert (info.kind, info.rows) == ("delta", 4)
    loaded = Net()
    cnr_store.load(tmp_path, loaded)
    assert torch.equal(loaded.user.weight, net.user.weight)


@pytest.mark.slow
def test_wrappers_and_other_parameters_in_the_same_modules_are_followed(tmp_path: Path) -> None:
    net = Net()
    with Checkpointer(tmp_path, net, bits=32) as ckpt:
        ckpt.save(1).result()
        net.user = torch.compile(net.user, backend="eager")  # type: ignore[assignment]
        net.item.weight = net.same.weight = nn.Parameter(torch.randn(ROWS, 3))
        ckpt.touch("user", [1])
        ckpt.save(2).result()
        assert ckpt.load().step == 2
    loaded = Net()
    cnr_store.load(tmp_path, loaded)
    assert torch.equal(loaded.item.weight, net.item.weight)


def test_a_parameter_that_was_replaced_is_loaded(tmp_path: Path) -> None:
    net = Net()
    with Checkpointer(tmp_path, net, bits=32) as ckpt:
        ckpt.save(1).result()
        saved = net.user.weight.detach().clone()
        net.user.weight = nn.Parameter(torch.zeros(ROWS, 3))
        ckpt.load()
    assert torch.equal(net.user.weight, saved)


def test_tables_that_were_spread_over_ranks_are_refused(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))

        def spread(net: Net) -> None:
            net.user.weight = nn.Parameter(
                distribute_tensor(net.user.weight.detach(), mesh)  # type: ignore[no-untyped-call, unused-ignore]
            )

        with Checkpointer(tmp_path, net := Net(), bits=32) as ckpt:
            ckpt.save(1).result()
            spread(net)
            with pytest.raises(ModelMismatchError, match=r"made: user.weight\. Each .* a DTensor only now"):
                ckpt.save(2)
        with Checkpointer(tmp_path, net, bits=32) as ckpt:
            ckpt.load()
            ckpt.save(2).result()
            user = net.user.weight.detach().clone()
        with Checkpointer(tmp_path, again := Net(), bits=32) as ckpt:
            ckpt.load()
        assert torch.equal(again.user.weight, local_of(user))
    finally:
        distributed.destroy_process_group()
