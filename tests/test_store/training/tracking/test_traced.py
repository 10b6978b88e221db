"""Models under programs that look into them: traces, exports, transforms, and ids without plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.tracker import Tracker
from tests.test_store.support.tracked_table import Bench, backward, ids, listed


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([ids(1, 2), ids(3)], layout=torch.jagged)


def test_rows_of_ragged_ids_are_flagged() -> None:
    bench = Bench("sgd")
    backward(bench.table(ragged()).values().sum())
    bench.step()
    assert bench.swap() == [1, 2, 3]


def vmapped(table: nn.Embedding) -> None:
    torch.func.vmap(table)(torch.tensor([[1, 2], [3, 4]]))


def differentiated(table: nn.Embedding) -> None:
    torch.func.jacrev(lambda scale: table(ids(1, 2)) * scale)(torch.ones(3))


def faked(table: nn.Embedding) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        table(ids(1))


def functionalized(table: nn.Embedding) -> None:
    torch.func.functionalize(table)(ids(1, 2))


def without_memory(table: nn.Embedding) -> None:
    table(torch._efficientzerotensor((2,), dtype=torch.int64))


def traced(table: nn.Embedding) -> None:
    torch.jit.trace(table, (ids(1, 2),))  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("look", [vmapped, differentiated, faked, functionalized, without_memory, traced])
def test_ids_without_values_are_left_to_steps(
    look: Callable[[nn.Embedding], None],
) -> None:
    bench = Bench()
    look(bench.table)
    assert bench.swap() == []
    bench.train(5)
    assert bench.swap() == [5]


def test_what_a_transform_computed_is_stepped() -> None:
    bench = Bench("adagrad")
    out: Any = torch.func.vmap(bench.table)(torch.tensor([[1, 2], [3, 4]]))
    backward(out.sum())
    bench.step()
    assert bench.swap() == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_steps_of_a_traced_program_are_seen() -> None:
    bench = Bench("adagrad")
    program = torch.jit.trace(bench.table, (ids(1, 2),))  # type: ignore[no-untyped-call]
    backward(program(ids(7, 8)).sum())
    bench.step()
    assert bench.swap() == [7, 8]


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("strict", [True, False])
def test_exports_run_without_hooks(norm: float | None, strict: bool) -> None:
    table = nn.Embedding(40, 3, max_norm=norm)
    tracker = Tracker(find_tables(nn.ModuleDict({"t": table})))
    program = torch.export.export(table, (ids(1, 2),), strict=strict)
    assert "cnr_store" not in str(program)
    tracker.close()


class FromBatch(nn.Embedding):
    """Takes a batch, not ids."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.embedding(batch["ids"], self.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_its_own_takes_anything_by_any_name(compiled: bool) -> None:
    torch.compiler.reset()
    table = FromBatch(40, 3)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    tracker = Tracker(find_tables(nn.ModuleDict({"t": table})), [optimizer])
    program: Any = torch.compile(table, backend="eager", fullgraph=True) if compiled else table
    calls: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: program(batch={"ids": ids(1, 2)}),
        lambda: program({"ids": ids(1, 2)}),
    )
    for call in calls:
        backward(call().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert tracker.whole_reasons() == {}
    assert listed(tracker.swap()["t"]) == [1, 2]


def test_a_lookup_in_another_tensor_is_left_to_the_steps() -> None:
    bench = Bench("sgd")
    other = {"weight": bench.table.weight * 2}
    backward(torch.func.functional_call(bench.table, other, (ids(1, 2),)).sum())
    assert bench.swap() == []
    bench.step()
    assert bench.swap() == [1, 2]
