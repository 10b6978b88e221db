"""Any part of any version into any model that differs, against a plain account of what must and mustn't change."""

from __future__ import annotations

import fnmatch
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError
from tests.nightly import histories
from tests.test_store.support.faults import forget
from tests.test_store.support.oracle import POLICIES
from tests.test_store.support.same_arrays import assert_same_arrays

NAMES = ("users", "ads", "tags")
DIM = 6
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)
OPTIMIZERS: dict[str, Any] = {"none": None, "sgd": SGD, "adagrad": Adagrad, "sparse-adam": SparseAdam}

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Shape:
    """A model: rows and element type of each table, and its optimizer."""

    tables: Mapping[str, tuple[int, torch.dtype]]
    optimizer: str


@dataclass(frozen=True)
class Wish:
    """What is to be loaded, as `Checkpointer.load` takes it."""

    tables: tuple[str, ...] | None
    tensors: tuple[str, ...] | None
    rows: Mapping[str, Sequence[int]] | None
    strict: str

    @property
    def everything(self) -> bool:
        return self.tables is None and self.tensors is None and self.rows is None

    def takes_table(self, name: str) -> bool:
        patterns = (
            ("*",) if self.everything else self.tables if self.tables is not None else tuple(self.rows or ())
        )
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def takes_tensors(self) -> bool:
        return self.everything or bool(self.tensors)

    def rows_of(self, name: str) -> Sequence[int] | None:
        rows = self.rows or {}
        return next((ids for pattern, ids in rows.items() if fnmatch.fnmatchcase(name, pattern)), None)


class Model(nn.Module):
    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = nn.ModuleDict(
            {
                name: nn.Embedding(rows, DIM, sparse=True, dtype=dtype)
                for name, (rows, dtype) in shape.tables.items()
            }
        )
        self.top = nn.Linear(DIM, 1)
        kind = OPTIMIZERS[shape.optimizer]
        owned = self.tables.parameters() if shape.optimizer == "sparse-adam" else self.parameters()
        self.optimizers: list[Optimizer] = [] if kind is None else [kind(owned, lr=0.1)]

    def train_on(self, seed: int, few: bool) -> None:
        draw, total = np.random.default_rng(seed), self.top(torch.ones(1, DIM)).sum()
        for table in self.tables.children():
            assert isinstance(table, nn.Embedding)
            ids = draw.integers(0, table.num_embeddings, 2 if few else 8)
            total = total + (table(torch.from_numpy(ids)).float() * torch.linspace(0.5, 1.5, DIM)).sum()
        self.zero_grad()
        total.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def contents(model: Model) -> Arrays:
    """By name, copies of weights, optimizer state by rows, and dense tensors; bfloat16 as float32."""
    found = {f"top.{name}": value for name, value in model.top.state_dict().items()}
    for name, table in model.tables.items():
        assert isinstance(table.weight, nn.Parameter)
        found[f"tables.{name}/weight"] = table.weight
        for optimizer in model.optimizers:
            for slot, value in optimizer.state.get(table.weight, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    found[f"tables.{name}/{slot}"] = value
    return {
        name: (each.float() if each.dtype is torch.bfloat16 else each).detach().numpy().copy()
        for name, each in found.items()
    }


def as_dtype(values: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    cast = torch.from_numpy(values).to(dtype)
    return (cast.float() if dtype is torch.bfloat16 else cast).numpy()


def refused(stored: Shape, model: Shape, wish: Wish) -> bool:
    """Whether the load must be an error, by the table in docs/loading.md."""
    if _fits_nothing(stored, model, wish):
        return True
    if wish.strict == "raise" and (_differs(stored, model, wish) or not _optimizer_fits(stored, model)):
        return True
    for name in stored.tables.keys() & model.tables.keys():
        if not wish.takes_table(f"tables.{name}"):
            continue
        old, new = stored.tables[name][0], model.tables[name][0]
        ids = wish.rows_of(f"tables.{name}")
        if (old > new) if ids is None else (bool(ids) and max(ids) >= min(old, new)):
            return True
    return False


def _differs(stored: Shape, model: Shape, wish: Wish) -> bool:
    names = [name for name in {*stored.tables, *model.tables} if wish.takes_table(f"tables.{name}")]
    for name in names:
        if name not in stored.tables or name not in model.tables:
            return True
        (old, old_type), (new, new_type) = stored.tables[name], model.tables[name]
        grew = old < new and wish.rows_of(f"tables.{name}") is None
        if grew or old_type != new_type:
            return True
    # Its settings are whole training's alone, and name the tables.
    return wish.everything and model.optimizer != "none" and stored.tables.keys() != model.tables.keys()


def _fits_nothing(stored: Shape, model: Shape, wish: Wish) -> bool:
    """A pattern but ``*`` that neither side has a table for; rows of no table chosen, or none of one."""
    names = [f"tables.{name}" for name in {*stored.tables, *model.tables}]
    chosen = [name for name in names if wish.takes_table(name)]
    of_tables = wish.tables if wish.tables is not None else tuple(wish.rows or ())
    if any(pattern != "*" and not fnmatch.filter(names, pattern) for pattern in of_tables):
        return True
    if wish.rows is None:
        return False
    unused = any(pattern != "*" and not fnmatch.filter(chosen, pattern) for pattern in wish.rows)
    return unused or any(wish.rows_of(name) is None for name in chosen)


def _optimizer_fits(stored: Shape, model: Shape) -> bool:
    return model.optimizer == "none" or model.optimizer == stored.optimizer


def expected_after(before: Arrays, saved: Arrays, stored: Shape, model: Shape, wish: Wish) -> Arrays:
    """What the model must hold, from what it and the version held."""
    found = dict(before)
    if wish.takes_tensors():
        found |= {name: saved[name] for name in saved if name.startswith("top.")}
    for name in stored.tables.keys() & model.tables.keys():
        if not wish.takes_table(f"tables.{name}"):
            continue
        rows, dtype = model.tables[name]
        ids = wish.rows_of(f"tables.{name}")
        chosen = np.arange(stored.tables[name][0]) if ids is None else np.unique(np.asarray(ids, np.int64))
        slots = [path for path in saved if path.startswith(f"tables.{name}/")]
        for path in slots if _optimizer_fits(stored, model) and model.optimizer != "none" else slots[:1]:
            values = (
                found[path].copy()
                if path in found
                else np.zeros((rows, DIM), as_dtype(saved[path], dtype).dtype)
            )
            values[chosen] = as_dtype(saved[path], dtype)[chosen]
            found[path] = values
    return found


def shapes(draw: st.DrawFn) -> Shape:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    tables = {name: (draw(st.integers(3, 40)), draw(st.sampled_from(DTYPES))) for name in names}
    return Shape(tables, draw(st.sampled_from(list(OPTIMIZERS))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """What was saved, and a model like it but for a few differences."""
    stored = shapes(draw)
    tables, alike = dict(stored.tables), draw(st.booleans())
    for name in NAMES:
        kinds = ["none"] if alike else ["none", "none", "rows", "rows", "type", "drop", "add"]
        change = draw(st.sampled_from(kinds))
        if change == "drop":
            tables.pop(name, None)
        elif change == "add" or name in tables:
            rows, dtype = tables.get(name, (5, torch.float32))
            grown = max(1, rows + draw(st.integers(-2, 9)))
            tables[name] = (
                grown if change == "rows" else rows,
                draw(st.sampled_from(DTYPES)) if change == "type" else dtype,
            )
    optimizer = draw(st.sampled_from([stored.optimizer] * (3 if alike else 1) + ["none", "sgd"]))
    return stored, Shape(tables or dict(stored.tables), optimizer)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    some = st.lists(
        st.sampled_from([f"tables.{name}" for name in NAMES]), min_size=1, max_size=2, unique=True
    )
    patterns = st.one_of(
        st.none(), st.just(("*",)), st.just(("tables.*",)), st.just(("*s",)), some.map(tuple)
    )
    ids = st.lists(st.integers(0, 12) if draw(st.booleans()) else st.integers(0, 2), max_size=5)
    return Wish(
        tables=draw(patterns),
        tensors=draw(st.sampled_from([None, None, ("*",), ("top.*",)])),
        rows=draw(
            st.one_of(st.none(), st.none(), st.dictionaries(st.sampled_from(["*", "*", "tables.users"]), ids))
        ),
        strict=draw(st.sampled_from(["raise", "ignore", "ignore", "report"])),
    )


def options_of(wish: Wish) -> dict[str, Any]:
    return {"tables": wish.tables, "tensors": wish.tensors, "rows": wish.rows, "strict": wish.strict}


@pytest.mark.slow
@settings(max_examples=histories(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pair=pairs(),
    wish=wishes(),
    policy=st.sampled_from([*POLICIES, "consecutive", "consecutive"]),
    saves=st.integers(1, 3),
    data=st.data(),
)
def test_what_is_chosen_is_loaded_and_nothing_else_changes(
    pair: tuple[Shape, Shape], wish: Wish, policy: str, saves: int, data: st.DataObject
) -> None:
    stored, shape = pair
    url = f"memory://{uuid.uuid4().hex}"
    options: dict[str, Any] = {
        "policy": policy,
        "bits": 32,
        "job": cnr_store.Job(restores_per_save=0, rng=False),
        "limits": cnr_store.Limits(workers=1),
    }
    source, versions = Model(stored, 1), []
    with Checkpointer(url, source, source.optimizers, **options) as checkpointer:
        for step in range(saves):
            source.train_on(step, few=step > 0)
            info = checkpointer.save(step).result()
            versions.append((info.id, contents(source)))
    version, saved = data.draw(st.sampled_from(versions))
    model = Model(shape, 2)
    if data.draw(st.booleans(), label="trained"):
        model.train_on(99, few=False)
    before = contents(model)
    with Checkpointer(url, model, model.optimizers, **options) as checkpointer:
        event("refused" if refused(stored, shape, wish) else "loaded")
        if refused(stored, shape, wish):
            with pytest.raises(ModelMismatchError):
                checkpointer.load(version, **options_of(wish))
            assert_same_arrays(contents(model), before)
        else:
            checkpointer.load(version, **options_of(wish))
            assert_same_arrays(contents(model), expected_after(before, saved, stored, shape, wish))
        model.train_on(7, few=True)
        after, info = contents(model), checkpointer.save(50).result()
        event(f"next save: {info.kind}")
    again = Model(shape, 3)
    cnr_store.load(url, again, again.optimizers, info)
    assert_same_arrays(contents(again), after)
    forget(url)
