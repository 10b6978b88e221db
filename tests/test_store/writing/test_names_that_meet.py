"""Names that are one on disks that fold case, or none on Windows: stored apart, and known by their own names."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FoldingBackend
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.layout import place
from tests.test_docs import block
from tests.test_store.golden.golden_jobs import JOBS
from tests.test_store.golden.golden_values import Golden

TABLES = ("Users", "users", "USERS", "CON", "nul", "com1", "aux.x", "LPT9.weights.old", "Deep.a", "deep.A")
DENSE = ("Bias", "bias", "Zarr.Json", "prn")
ROWS, DIM = 40, 8


class Model(nn.Module):
    """Tables and dense tensors of these names."""

    def __init__(self, names: tuple[str, ...], rows: int = ROWS, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = {name: nn.Embedding(rows, DIM, sparse=True) for name in names}
        self.dense = {name: nn.Parameter(torch.randn(3)) for name in DENSE}
        for name, table in self.tables.items():
            folder, last = self._folder(name)
            folder.add_module(last, table)
        for name, values in self.dense.items():
            folder, last = self._folder(name)
            folder.register_parameter(last, values)

    def _folder(self, name: str) -> tuple[nn.Module, str]:
        """The module that a name's last part lies in."""
        *above, last = name.split(".")
        folder: nn.Module = self
        for part in above:
            if part not in dict(folder.named_children()):
                folder.add_module(part, nn.Module())
            folder = folder.get_submodule(part)
        return folder, last


@pytest.fixture
def backend() -> Backend:
    return FoldingBackend(open_backend(f"memory://{uuid.uuid4()}"))


def train(model: Model, optimizer: torch.optim.Optimizer, row: int) -> None:
    for table in model.tables.values():
        table(torch.tensor([row])).sum().backward()
    for values in model.dense.values():
        values.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()


def make(names: tuple[str, ...] = TABLES, rows: int = ROWS, seed: int = 0) -> tuple[Model, list[Any]]:
    model = Model(names, rows, seed)
    tables = [table.weight for table in model.tables.values()]
    return model, [torch.optim.Adagrad(tables, lr=0.1), torch.optim.SGD(model.dense.values(), lr=0.1)]


def step(model: Model, optimizers: list[Any], row: int) -> None:
    for optimizer in optimizers:
        train(model, optimizer, row)


def equal(model: Model, backend: Backend, version: Any = "latest") -> None:
    found = cnr_store.state_dict(backend, version)
    own = {name: values.detach().numpy() for name, values in model.state_dict().items()}
    assert found.keys() == own.keys()
    for name, values in own.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def paths(backend: Backend) -> dict[str, str]:
    record = Catalog(backend).find()
    return dict(record.stored_paths)


@pytest.mark.slow
def test_every_name_comes_back_under_itself(backend: Backend, tmp_path: Path) -> None:
    model, optimizers = make()
    options: dict[str, Any] = {"bits": 32, "policy": "consecutive", "job": cnr_store.Job(rng=False)}
    expected = []
    with Checkpointer(backend, model, optimizers, **options) as checkpointer:
        for row in range(3):
            step(model, optimizers, row)
            checkpointer.save(row).result()
            expected.append({name: values.clone() for name, values in model.state_dict().items()})
            equal(model, backend)
    stored = paths(backend)
    assert len({path.lower() for path in stored.values()}) == len(stored)
    assert stored["tables/Users/weight"] == "tables/Users/weight"
    assert stored["tables/users/weight"].startswith("tables/users~")
    other, others = make(seed=1)
    with Checkpointer(backend, other, others, **options) as checkpointer:
        assert checkpointer.load().step == 2
        equal(other, backend)
        for ours, theirs in zip(optimizers[0].state.values(), others[0].state.values(), strict=True):
            assert torch.equal(ours["sum"], theirs["sum"])
        step(other, others, 7)
        checkpointer.save(3).result()
    equal(other, backend)
    assert paths(backend) == stored
    report = cnr_store.verify(backend, deep=True)
    assert report.ok, report
    assert len(report.restorable) == 4
    group = cnr_store.open(backend)
    for name in ("users", "Users"):
        array = group[f"tables/{name}/weight"]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[:], other.tables[name].weight.detach())
    changed = {one.path for one in cnr_store.diff(backend, 2, 3) if one.rows_changed}
    assert changed == {path for path in stored if not path.startswith(("dense/optim", "dense/state"))}
    cnr_store.compact(backend)
    assert cnr_store.verify(backend, deep=True).ok
    equal(other, backend)
    with Checkpointer(backend, *make(seed=2), **options) as checkpointer:
        checkpointer.load(1)
    for name, values in expected[1].items():
        np.testing.assert_array_equal(cnr_store.state_dict(backend, 1)[name], values)


@pytest.mark.slow
def test_a_name_stays_where_its_parent_has_it(backend: Backend) -> None:
    """`users` came later and is escaped; it stays so when `Users` goes, and `Users` comes back escaped or not."""
    seen = []
    for number, names in enumerate([("Users",), ("users", "Users"), ("users",), ("Users", "users")]):
        model, optimizers = make(names)
        with Checkpointer(
            backend, model, optimizers, bits=32, policy="consecutive", job=cnr_store.Job(rng=False)
        ) as checkpointer:
            if number:
                checkpointer.load(strict="ignore")
            step(model, optimizers, number)
            checkpointer.save(number).result()
            step(model, optimizers, number + 10)
            checkpointer.save(number + 100).result()
        equal(model, backend)
        seen.append(paths(backend))
    escaped = seen[1]["tables/users/weight"]
    assert escaped.startswith("tables/users~")
    assert [one.get("tables/users/weight") for one in seen] == [None, escaped, escaped, escaped]
    assert [one.get("tables/Users/weight") for one in seen] == [
        "tables/Users/weight" if name else None for name in (1, 1, 0, 1)
    ]
    assert cnr_store.verify(backend, deep=True).ok


def test_files_and_followers_know_the_names(backend: Backend, tmp_path: Path) -> None:
    model, optimizers = make()
    with Checkpointer(backend, model, optimizers, bits=32, job=cnr_store.Job(rng=False)) as checkpointer:
        first = checkpointer.save(0).result()
        step(model, optimizers, 3)
        checkpointer.save(1).result()
    (update,) = cnr_store.follow(backend, first)
    assert set(update.arrays) == set(model.state_dict())
    found = dict.fromkeys(update.arrays, 0)
    for one in update.blocks():
        found[one.name] += len(one.values)
        own = model.state_dict()[one.name].numpy()
        np.testing.assert_array_equal(one.values, own if one.rows is None else own[one.rows])
    assert all(found.values())
    cnr_store.export(backend, tmp_path / "all.safetensors")
    imported = FoldingBackend(open_backend(f"memory://{uuid.uuid4()}"))
    cnr_store.import_file(tmp_path / "all.safetensors", imported, bits=32)
    equal(model, imported)
    assert cnr_store.verify(imported, deep=True).ok


def test_tables_grow_under_escaped_names(backend: Backend) -> None:
    model, optimizers = make(("users", "Users", "con"))
    with Checkpointer(backend, model, optimizers, bits=32, job=cnr_store.Job(rng=False)) as checkpointer:
        checkpointer.save(0).result()
    larger, others = make(("users", "Users", "con"), rows=2 * ROWS)
    with Checkpointer(backend, larger, others, bits=32, job=cnr_store.Job(rng=False)) as checkpointer:
        checkpointer.load(strict="ignore")
        checkpointer.save(1).result()
    equal(larger, backend)


@pytest.mark.parametrize("name", ["consecutive", "stateful", "named"])
def test_golden_stores_go_on_where_case_is_folded(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    backend = FoldingBackend(open_backend(golden.url))
    newest = golden.versions[-1]
    job = JOBS[newest["job"]](2)
    options: dict[str, Any] = {
        "policy": "consecutive",
        "job": cnr_store.Job(rng=newest["rng"] is not None),
    }
    before = paths(backend)
    with Checkpointer(backend, job.model, job.optimizers, state=job.objects, **options) as checkpointer:
        checkpointer.load()
        checkpointer.save(10_000).result()
    assert paths(backend).items() >= {path: before[path] for path in paths(backend) if path in before}.items()
    assert cnr_store.verify(backend, deep=True).ok


def test_only_what_meets_is_escaped() -> None:
    """Unless the version before has it as it is: stores of case-sensitive disks stay as they are."""
    both = ["tables/Users/weight", "tables/users/weight"]
    assert list(place(both, {path: path for path in both}).values()) == both
    slots = place(
        ["tables/t/M", "tables/t/m", "tables/u/m", "dense/model/t", "dense/model/T", "dense/optim/T"], {}
    )
    moved = {path: stored for path, stored in slots.items() if path != stored}
    assert moved.keys() == {"tables/t/m", "dense/model/T"}
    # What was dropped counts, too: the name is still taken in the version before.
    assert place(["dense/model/a"], {"dense/model/A": "dense/model/A"})["dense/model/a"] != "dense/model/a"


@pytest.mark.parametrize(
    "name", ["CON", "nul", "Com7", "lpt1.x.y", "a.", "...a.", "ZARR.JSON", "a" * 199 + "."]
)
def test_names_that_windows_can_not_hold(name: str) -> None:
    (stored,) = place([f"dense/model/{name}"], {}).values()
    segment = stored.rpartition("/")[2]
    assert segment[-9 if len(name) < 190 else -33] == "~"
    assert len(segment) <= 200
    assert not segment.startswith(("con", "CON", "nul", "Com", "lpt"))


def test_the_reader_of_the_formats_page_reads_escaped_arrays(tmp_path: Path) -> None:
    model, optimizers = make(("users", "Users"))
    with Checkpointer(
        FoldingBackend(open_backend(tmp_path)), model, optimizers, bits=32, job=cnr_store.Job(rng=False)
    ) as checkpointer:
        info = checkpointer.save(0).result()
    scope: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), scope)
    stored = Catalog(open_backend(tmp_path)).find().stored_paths["tables/Users/weight"]
    found = scope["read_rows"](tmp_path, info.id, stored)
    np.testing.assert_array_equal(found, model.tables["Users"].weight.detach())
