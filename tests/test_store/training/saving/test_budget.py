"""``budget``: the steps that versions take, and what the restores of a run have spent of it by its record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.format.record import Record
from tests.nightly import histories
from tests.test_store.support.places import memory_url

ROWS, DIM = 600, 16
BUDGET = 0.01
FACTOR = 0.2  # per cent of the loss that a restore is said to cost, over the square of its step
FIRST = math.sqrt(BUDGET / 10 / FACTOR)
Values = dict[str, np.ndarray[Any, Any]]


class Model(nn.Module):
    """A table, one of one column, and one too small for any but lossless codes."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)
        self.column = nn.Embedding(9_000, 1, sparse=True, dtype=dtype)
        self.tiny = nn.Embedding(8, DIM, sparse=True, dtype=dtype)

    def values(self) -> Values:
        return {name: value.float().numpy().copy() for name, value in self.state_dict().items()}


def record(url: Any, version: str) -> Record:
    return Catalog(open_backend(str(url))).record(version)


def step_of(found: Record, table: str = "table") -> float:
    codec = found.arrays[f"tables/{table}/weight"].codec or {}
    return float(codec.get("rms_step", 0.0))


def assert_within_half_a_step(found: Record, restored: Values, saved: Values) -> None:
    for name, values in saved.items():
        codec = found.arrays[f"tables/{name.removesuffix('.weight')}/weight"].codec or {}
        error = np.abs(restored[name] - values).max()
        assert error <= (codec["step"] / 2 * 1.0001 if codec["id"] == "cnr_lattice" else 0), (name, codec)


class Run:
    """A run and its restarts, beside a plain model of what is spent: numbers by version."""

    def __init__(self, url: str, policy: Any) -> None:
        self.url, self.policy, self.versions = url, policy, list[str]()
        self.spent, self.steps, self.saved = list[float](), list[float](), list[Values]()
        self.under: int | None = None  # the version that the next one continues, and what it has spent then
        self.now = 0.0
        self.start()

    def start(self) -> None:
        self.model = Model()
        self.checkpointer = Checkpointer(
            self.url,
            self.model,
            policy=self.policy,
            budget=BUDGET,
            tracking=cnr_store.Tracking(audit=False),
            job=cnr_store.Job(rng=False, unloaded="warn"),
        )

    def train(self, random: np.random.Generator) -> None:
        for name, table in (("table", self.model.table), ("column", self.model.column)):
            ids = torch.from_numpy(random.integers(table.num_embeddings, size=9))
            with torch.no_grad():
                table.weight[ids] = torch.from_numpy(random.normal(size=(9, table.embedding_dim))).float()
            self.checkpointer.touch(name, ids)

    def load(self, number: int) -> None:
        self.checkpointer.load(self.versions[number])
        assert_within_half_a_step(
            record(self.url, self.versions[number]), self.model.values(), self.saved[number]
        )
        self.under, self.now = number, self.spent[number] + FACTOR * self.steps[number] ** 2

    def save(self, full: bool) -> None:
        version = self.checkpointer.save(len(self.versions), full=full).result().id
        found, left = record(self.url, version), BUDGET - self.now
        held = None if self.under is None else self.steps[self.under]
        must = held is None or FACTOR * held**2 > 1.0001 * left / 5
        if full or must:
            assert found.policy["full"]
        assert found.spent == pytest.approx(self.now)
        assert found.spent < BUDGET
        fresh = min(math.sqrt(left / 10 / FACTOR), 0.2)
        expected = fresh if found.policy["full"] or held is None else held
        assert step_of(found) == step_of(found, "column") == pytest.approx(expected)
        assert step_of(found, "tiny") == 0
        self.versions.append(version)
        self.spent.append(self.now)
        self.steps.append(expected)
        self.saved.append(self.model.values())
        self.under = len(self.versions) - 1

    def end(self) -> None:
        self.checkpointer.close()


OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("load"), st.integers(0, 99)),
    st.tuples(st.just("load latest"), st.integers(1, 3)),  # so often, before anything new is committed
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


@settings(max_examples=histories(9))
@given(
    st.lists(OPERATIONS, min_size=4, max_size=14),
    st.sampled_from(["consecutive", "intermittent", "auto"]),
    st.integers(0, 99),
)
def test_what_is_spent_is_that_of_the_lineage(operations: list[Any], policy: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    with memory_url() as url:
        run = Run(url, policy)
        run.save(False)
        for name, what in operations:
            if name == "save":
                run.train(random)
                run.save(what)
            elif name == "load":
                run.load(what % len(run.versions))
            elif name == "load latest":
                for _ in range(what):
                    run.load(len(run.versions) - 1)
            elif name == "read":  # as a server does: nothing is saved after
                cnr_store.load(url, Model(1))
            else:
                run.end()
                run.start()
                run.load(len(run.versions) - 1)
        run.end()


@pytest.mark.slow
def test_restores_one_after_the_other_never_spend_it_all() -> None:
    random = np.random.default_rng(0)
    with memory_url() as url:
        run = Run(url, "consecutive")
        run.save(False)
        for _ in range(30):
            run.load(len(run.versions) - 1)
            run.train(random)
            run.save(False)
        assert len({*run.steps}) > 2
        assert 0.8 * BUDGET < run.spent[-1] < BUDGET
        run.end()


def test_a_table_that_shrank_is_counted_at_what_it_is(tmp_path: Path) -> None:
    """The step stays that of the whole version, and is a larger share of the table by now."""
    model = Model()
    with Checkpointer(tmp_path, model, budget=BUDGET, policy="consecutive") as checkpointer:
        checkpointer.save(0)
        with torch.no_grad():
            model.table.weight.div_(2)
        checkpointer.touch("table", torch.arange(ROWS))
        checkpointer.save(1)
        checkpointer.load()
        first = record(tmp_path, checkpointer.save(2).result().id)
        assert first.spent == pytest.approx(FACTOR * (2 * FIRST) ** 2, rel=0.1)
        checkpointer.load()
        checkpointer.load()
        second = record(tmp_path, checkpointer.save(3).result().id)
    assert second.policy["full"] or second.spent < BUDGET
    assert FACTOR * step_of(second) ** 2 <= 1.0002 * (BUDGET - second.spent) / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_budget_at_all_is_lossless(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    optimizer = torch.optim.Adagrad(model.parameters())
    model.table(torch.arange(9)).float().square().sum().backward()
    optimizer.step()
    saved, sums = model.values(), optimizer.state[model.table.weight]["sum"].clone()
    with Checkpointer(tmp_path, model, optimizer, budget=0) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
        with torch.no_grad():
            model.table.weight.zero_()
        optimizer.state[model.table.weight]["sum"].zero_()
        checkpointer.load()
        assert record(tmp_path, checkpointer.save(1).result().id).spent == 0
    assert {(entry.codec or {}).get("id") for entry in found.arrays.values() if entry.codec} == {"cnr_rows"}
    for name, values in model.values().items():
        np.testing.assert_array_equal(values, saved[name])
    assert torch.equal(optimizer.state[model.table.weight]["sum"], sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_16_bits_are_within_half_a_step(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    saved = model.values()
    with Checkpointer(tmp_path, model, budget=1) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
        checkpointer.load()
        assert record(tmp_path, checkpointer.save(1).result().id).spent == pytest.approx(FACTOR * 0.2**2)
    assert step_of(found) == 0.2
    for name, values in model.values().items():
        codec = found.arrays[f"tables/{name.removesuffix('.weight')}/weight"].codec or {}
        rounding = 2.0**-8 * np.abs(values)
        assert (np.abs(values - saved[name]) <= codec.get("step", 0.0) / 2 + rounding).all()


def test_rows_out_of_the_ordinary_change_no_scale(tmp_path: Path) -> None:
    """Rows that are stored as they are, and those of zeros, are not what a restore is counted by."""
    model = Model()
    with torch.no_grad():
        for row, value in enumerate((1e30, math.nan, math.inf, -torch.finfo(torch.float32).max)):
            model.table.weight[row] = value
        model.table.weight[4:50] = 0
        model.column.weight.zero_()
    saved = model.table.weight.detach().clone()
    with Checkpointer(tmp_path, model, budget=BUDGET) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
        checkpointer.load()
        assert record(tmp_path, checkpointer.save(1).result().id).spent == pytest.approx(0.001)
    restored = model.table.weight.detach()
    torch.testing.assert_close(restored[:50], saved[:50], rtol=0, atol=0, equal_nan=True)
    codec = found.arrays["tables/table/weight"].codec or {}
    assert (restored[50:] - saved[50:]).abs().max() <= codec["step"] / 2 * 1.0001


@pytest.mark.parametrize(("budget", "grid"), [(0.01, True), (0.009, False)])
def test_state_takes_at_most_a_tenth(tmp_path: Path, budget: float, grid: bool) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    with Checkpointer(tmp_path, model, optimizer, budget=budget) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
    ids = {path: (entry.codec or {}).get("id") for path, entry in found.arrays.items()}
    assert ids["tables/table/sum"] == ("cnr_floating" if grid else "cnr_rows")
    assert ids["tables/tiny/sum"] == "cnr_rows"


def test_options_that_name_tables_or_state_overrule_it(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    options: dict[str, Any] = {
        "codec": {"col*": "cnr_rows"},
        "bits": {"tiny": 4},
        "state_bits": {"table": 32},
    }
    with Checkpointer(tmp_path, model, optimizer, budget=BUDGET, **options) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
    ids = {
        path.removeprefix("tables/"): (entry.codec or {}).get("id") for path, entry in found.arrays.items()
    }
    assert (ids["table/weight"], ids["column/weight"], ids["tiny/weight"]) == (
        "cnr_lattice",
        "cnr_rows",
        "cnr_uniform",
    )
    assert (ids["table/sum"], ids["column/sum"]) == ("cnr_rows", "cnr_floating")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.02, "bits": 4}, "budget=0.02 and bits=4: each says"),
        ({"budget": 0.02, "bits": {"table": 4, "*": 8}}, "budget=0.02 and bits={'table': 4, "),
        ({"budget": 0, "codec": "cnr_lattice"}, "budget=0 and codec='cnr_lattice': each says"),
        ({"budget": 0, "bits": 32, "codec": "cnr_rows"}, "budget=0 and bits=32 and codec='cnr_rows'"),
        ({"codec": "auto", "bits": 4}, "budget=0.01 and bits=4"),
        (
            {
                "budget": 0.02,
                "job": cnr_store.Job(expected_restores={"failures_per_node_hour": 1, "nodes": 1, "hours": 1}),
            },
            "expected",
        ),
        ({"budget": -1}, "budget=-1; give a number of at least 0 and at most 100"),
        *(
            ({"budget": each}, f"budget={each}; give a number")
            for each in (float("nan"), float("inf"), 100.5)
        ),
        ({"budget": True}, "budget=True; give a number"),
        ({"codec": {"id": "auto", "fast_restore": False}}, "codec"),
    ],
)
def test_options_that_contradict_it(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Checkpointer(tmp_path, Model(), **options)


@pytest.mark.parametrize("options", [{}, {"codec": "auto"}, {"bits": "auto"}, {"bits": {"*": "auto"}}])
def test_auto_is_the_budget_that_holds_by_default(tmp_path: Path, options: dict[str, Any]) -> None:
    with Checkpointer(tmp_path, Model(), **options) as checkpointer:
        found = record(tmp_path, checkpointer.save(0).result().id)
    assert found.policy["budget"] == {"percent": 0.01, "rms_step": pytest.approx(FIRST)}
    assert step_of(found) == step_of(found, "column") == pytest.approx(FIRST)


def test_auto_policy_goes_on_from_the_previous_version(tmp_path: Path) -> None:
    """Under Adam a delta since the baseline held absolute rows, three times what it was offered for."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Embedding(4_000, DIM)})
    optimizer, ids = torch.optim.Adam(model.parameters()), torch.randint(4_000, (6, 100))
    with Checkpointer(tmp_path, model, optimizer, policy="auto") as checkpointer:
        for step, rows in enumerate(ids):
            model["a"](rows).square().sum().backward()
            optimizer.step()
            checkpointer.save(step).result()
    found = [record(tmp_path, info.id) for info in cnr_store.versions(tmp_path)]
    assert [each.policy["full"] for each in found] == [True, *[False] * 5]
    assert [each.policy["since"] for each in found[2:]] == ["previous"] * 4
    assert all("relative" in each.requires for each in found[2:])


EXPECTED = {"failures_per_node_hour": 1, "nodes": 1, "hours": 1}


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"bits": 4}, 4),
        ({"bits": {"table": 4, "*": 8}}, 4),
        ({"codec": {"id": "cnr_uniform", "scheme": "adaptive", "bits": 3}}, 3),
        ({"job": cnr_store.Job(expected_restores=EXPECTED)}, 2),
        ({"bits": "auto", "job": cnr_store.Job(expected_restores=EXPECTED)}, 2),
        ({"budget": None}, 8),
    ],
)
def test_what_takes_the_place_of_the_default(tmp_path: Path, options: dict[str, Any], bits: int) -> None:
    with Checkpointer(tmp_path, Model(), **options) as checkpointer:
        assert checkpointer.explain().budget is None
        found = record(tmp_path, checkpointer.save(0).result().id)
    assert "budget" not in found.policy
    codec = found.arrays["tables/table/weight"].codec or {}
    assert (codec["id"], codec["bits"]) == ("cnr_uniform", bits)


def test_another_rule_beneath_makes_the_first_version_whole(tmp_path: Path) -> None:
    """Rows on another grid than those of the whole version would have a step a chunk."""
    model, kinds = Model(), list[tuple[str, float]]()
    for options in ({"bits": 8}, {"budget": BUDGET}, {"budget": BUDGET}, {"budget": 1e-4}, {"bits": 8}):
        with Checkpointer(tmp_path, model, policy="consecutive", **options) as checkpointer:
            if kinds:
                checkpointer.load()
            found = record(tmp_path, checkpointer.save(len(kinds)).result().id)
        kinds.append((found.kind, step_of(found)))
    assert [kind for kind, _ in kinds] == ["baseline", "baseline", "delta", "baseline", "delta"]
    assert kinds[1][1] == kinds[2][1] == pytest.approx(FIRST)
    assert kinds[3][1] == 0  # more than that budget was spent before
    assert found.spent == pytest.approx(2 * 0.001)  # the count goes on without a budget


def test_versions_that_others_continue_hand_on_what_was_spent(tmp_path: Path) -> None:
    model = Model()
    with Checkpointer(tmp_path, model, budget=BUDGET) as checkpointer:
        checkpointer.save(0)
        checkpointer.load()
        last = checkpointer.save(1).result()
    after = cnr_store.save(tmp_path, model, step=2, after=last, budget=BUDGET)
    weight = next((tmp_path / "versions" / after.id / "tables/table/weight").glob("c/*/0"))
    weight.write_bytes(weight.read_bytes()[:-9])
    repaired = cnr_store.repair(tmp_path, after.id).repaired
    assert repaired is not None
    assert record(tmp_path, after.id).spent == record(tmp_path, repaired).spent == pytest.approx(0.001)


def test_explain_tells_of_step_and_budget(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Model(), budget=BUDGET) as checkpointer:
        checkpointer.save(0)
        checkpointer.load()
        explained = checkpointer.explain()
    assert explained.budget is not None
    assert explained.budget.percent == BUDGET
    assert explained.budget.spent == pytest.approx(0.001)
    said = "Budget: 0.01 % of the loss, 0.001 % spent: steps of 0.0707 of a table's scale."
    assert said in repr(explained)
