"""Rows that hooks can't tell of are compared with what is stored: each version gives back what its codecs make of the
model at that moment, whatever changed it, and deltas hold the rows alone whose stored form changed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_codecs import decode_into, parse, row_codec
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CheckpointError
from cnr_store.training.model.tensors import array_dtype, dtype_name

ROWS, DIM = 700, 12
LATTICE = {"id": "cnr_lattice", "rms_step": 0.1}
RELATIVE = LATTICE | {"relative": True}
Values = np.ndarray[Any, Any]
Make = Callable[[Any], Optimizer]

MAKERS: dict[str, Make] = {
    "Adam": lambda parameters: Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
}
# Codec and bits of state.
FORMS: dict[str, dict[str, Any]] = {
    "relative": {"codec": RELATIVE, "state_bits": "m3"},
    "lattice": {"codec": LATTICE, "state_bits": "m3"},
    "uniform": {"bits": 4, "state_bits": 4},
    "exact": {"codec": {"id": "cnr_floating", "mantissa_bits": 23, "relative": True}, "state_bits": "m23"},
    "lossless": {"bits": 32},
    "parents": {"budget": 0, "limits": cnr_store.Limits(exact_parents=True)},
}


class Job:
    """A model of two tables of which one is small, and what each version of it has to give back."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.make = make
        self.model = nn.ModuleDict(
            {"a": nn.Embedding(ROWS, DIM, dtype=dtype), "b": nn.Embedding(90, 4, dtype=dtype)}
        )
        self.optimizer = make(self.model.parameters())

    @property
    def weight(self) -> torch.Tensor:
        return self.model.get_parameter("a.weight")

    def train(self, random: np.random.Generator, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for table in self.model.values():
                assert isinstance(table, nn.Embedding)
                ids = torch.from_numpy(random.integers(table.num_embeddings, size=9))
                rows = table(ids)
                (rows * torch.from_numpy(random.normal(size=rows.shape)).to(rows.dtype)).sum().backward()
            self.optimizer.step()

    def arrays(self) -> dict[str, torch.Tensor]:
        """What is stored by rows, by path."""
        found = {}
        for name, table in self.model.items():
            assert isinstance(table, nn.Embedding)
            found[f"tables/{name}/weight"] = table.weight.detach()
            for key, value in self.optimizer.state[table.weight].items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    found[f"tables/{name}/{key}"] = value
        return found

    def expected(self, backend: Any, version: str) -> dict[str, Values]:
        """What the version's codecs make of the arrays as they are now."""
        entries = Catalog(open_backend(backend)).record(version).arrays
        return {path: stored(tensor, entries[path].codec) for path, tensor in self.arrays().items()}


def stored(tensor: torch.Tensor, config: Any) -> Values:
    """The rows of a tensor, once they were encoded and decoded."""
    element, dtype = dtype_name(tensor.dtype), array_dtype(tensor.dtype)
    values = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
    rows = np.ascontiguousarray(values.numpy().reshape(len(tensor), -1).astype(dtype))
    if config["id"] == "cnr_raised":  # of state that is divided by: not a codec of the registry
        from cnr_store.training.saving.never_below_codec import CeilingRows

        codec: Any = CeilingRows(config["bits"])
    else:
        codec = row_codec(config)
    out = np.empty_like(rows)
    payload = parse(codec.encode_rows(rows, None, len(rows), element=element))
    decode_into(payload, out, np.ones(len(rows), np.uint8))
    return out


def assert_holds(
    url: Any,
    version: str,
    expected: dict[str, Values],
    make: Make,
    dtype: torch.dtype,
    live: dict[str, torch.Tensor] | None = None,
) -> None:
    """A load of the version gives exactly this; or `live` rows as they are, which were restored and not moved since."""
    other = Job(make, dtype)
    cnr_store.load(url, other.model, other.optimizer, version=version)
    found = other.arrays()
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        values = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
        rows = values.numpy().reshape(expected[path].shape)
        if live is not None:
            unmoved = (rows == live[path].to(torch.float32).numpy().reshape(rows.shape)).all(axis=1)
            expected[path][unmoved] = rows[unmoved]
        np.testing.assert_array_equal(rows, expected[path], path)


@pytest.mark.slow
@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("policy", ["intermittent", "one-shot", "consecutive", "auto"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAKERS)
def test_each_version_holds_what_its_codecs_make_of_the_model(
    tmp_path: Path, policy: Any, form: str, name: str
) -> None:
    check_history(tmp_path, policy, form, MAKERS[name], seed=1, operations=14)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_long_histories(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    policy, form, name = (
        random.choice(each)
        for each in (["intermittent", "one-shot", "consecutive", "auto"], [*FORMS], [*MAKERS])
    )
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3 if name != "Adam" else 0]
    check_history(tmp_path, policy, form, MAKERS[name], seed, 60, dtype)


def check_history(
    url: Path,
    policy: Any,
    form: str,
    make: Make,
    seed: int,
    operations: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Trainings, writes that nobody sees, saves that fail, loads of older versions, folds and removals, at random."""
    random, job, fails = np.random.default_rng(seed), Job(make, dtype), [False]
    held: dict[str, dict[str, Values]] = {}

    def fault(operation: str, key: str, index: int) -> Any:
        return "before" if fails[0] and operation == "create" and key.startswith("versions/") else None

    backend = FaultyBackend(open_backend(url), fault)
    options = FORMS[form] | {
        "policy": policy,
        "failures": cnr_store.Failures(retry_seconds=0),
        "tracking": cnr_store.Tracking(audit=False),
    }
    with cnr_store.Checkpointer(backend, job.model, job.optimizer, **options) as checkpointer:
        for number in range(operations):
            job.train(random, int(random.integers(1, 4)))
            kind = random.choice(["none", "none", "data", "fail", "load", "fold", "gc", "zero"])
            if kind in ("data", "zero") and make is MAKERS["SGD"]:
                kind = "counted"  # hooks know its rows, and can't see what torch does not count
            if kind == "data":
                job.weight.data[torch.from_numpy(random.integers(ROWS, size=2))] += 0.5
            elif kind == "counted":
                with torch.no_grad():
                    job.weight[int(random.integers(ROWS))] *= 2
            elif kind == "zero":
                job.weight.data[int(random.integers(ROWS))] = 0
            elif kind == "fail":
                fails[0] = True
                with suppress(CheckpointError):
                    checkpointer.save(number).result()
                fails[0] = False
                job.train(random)
            elif kind == "load" and held:
                chosen = str(random.choice([*held]))
                checkpointer.load(chosen)
                found = job.arrays()
                for path, values in held[chosen].items():
                    now = found[path].to(torch.float32).numpy().reshape(values.shape)
                    np.testing.assert_array_equal(now, values.astype(np.float32))
                job.train(random)
            elif kind == "fold" and held:
                cnr_store.compact(str(url))
            elif kind == "gc" and len(held) > 2:
                with suppress(CheckpointError):
                    cnr_store.gc(str(url), keep_last=2)
                there = {info.id for info in cnr_store.versions(str(url))}
                held = {version: each for version, each in held.items() if version in there}
            version = checkpointer.save(number).result().id
            held[version] = job.expected(str(url), version)
            live = job.arrays() if form == "uniform" else None  # of which no code gives the same code again
            assert_holds(str(url), version, held[version], make, dtype, live)
    for version, each in held.items():
        assert_holds(str(url), version, each, make, dtype)
    assert not cnr_store.verify(str(url), deep=True).problems


@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("policy", ["intermittent", "consecutive", "auto"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_folded", [False, True])
def test_a_job_that_goes_on_writes_few_rows_at_once(
    tmp_path: Path, policy: Any, form: str, is_folded: bool
) -> None:
    """A load notes what it reads: the first save after it is a delta, of the rows that changed since."""
    random, options = (
        np.random.default_rng(5),
        FORMS[form] | {"policy": policy, "tracking": cnr_store.Tracking(audit=False)},
    )
    job = Job(MAKERS["Adam"])
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
        for step in range(2):
            job.train(random, 3)
            checkpointer.save(step).result()
        job.weight.data[7, 0] = torch.nan  # raw, and so noted by its bits
        checkpointer.save(2).result()
    if is_folded:
        cnr_store.compact(str(tmp_path))
    newer = Job(MAKERS["Adam"])
    with cnr_store.Checkpointer(tmp_path, newer.model, newer.optimizer, **options) as checkpointer:
        checkpointer.load()
        rows = checkpointer.save(3).result().rows
        if policy == "consecutive":
            assert rows == 0
        by_data(newer.weight)
        info = checkpointer.save(4).result()
        assert info.kind == "delta"
        assert info.rows in (1, rows + 1)
        expected, live = newer.expected(str(tmp_path), info.id), newer.arrays() if form == "uniform" else None
        assert_holds(str(tmp_path), info.id, expected, newer.make, torch.float32, live)


def by_data(weight: torch.Tensor) -> None:
    weight.data[5] += 1


def by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[5] += 1


def by_dlpack(weight: torch.Tensor) -> None:
    np.from_dlpack(weight.detach())[5] += 1


def by_ctypes(weight: torch.Tensor) -> None:
    place = weight.data_ptr() + 5 * DIM * 4
    ctypes.memset(place, 0x3F, DIM * 4)


def by_a_view(weight: torch.Tensor) -> None:
    weight.data.view(-1)[5 * DIM] = 9


def by_foreach(weight: torch.Tensor) -> None:
    torch._foreach_add_([weight.data[5:6]], 1.0)


def by_new_data(weight: torch.Tensor) -> None:
    values = weight.detach().clone()
    values[5] += 1
    weight.data = values


def by_set(weight: torch.Tensor) -> None:
    values = weight.detach().clone()
    values[5] += 1
    with torch.no_grad():
        weight.set_(values)  # type: ignore[call-overload]  # torch takes a tensor, too


def by_its_storage(weight: torch.Tensor) -> None:
    weight.untyped_storage()[5 * DIM * 4 + 3] = 0x42


def by_a_copy(weight: torch.Tensor) -> None:
    weight.data[5].copy_(torch.full((DIM,), 7.0))


def by_an_operator(weight: torch.Tensor) -> None:
    weight.data.index_put_((torch.tensor([5]),), torch.ones(DIM), accumulate=True)


def by_a_swap_of_signs(weight: torch.Tensor) -> None:
    weight.data[5].neg_()


WAYS = [
    by_data,
    by_numpy,
    by_dlpack,
    by_ctypes,
    by_a_view,
    by_foreach,
    by_new_data,
    by_set,
    by_its_storage,
    by_a_copy,
    by_an_operator,
    by_a_swap_of_signs,
]


@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("form", ["relative", "uniform", "exact", "lossless", "parents"])
@pytest.mark.parametrize("way", WAYS)
def test_a_comparison_finds_what_nobody_sees(tmp_path: Path, way: Callable[[Any], None], form: str) -> None:
    job = Job(MAKERS["Adam"])
    options = FORMS[form] | {"policy": "consecutive", "tracking": cnr_store.Tracking(audit=False)}
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
        for step in range(2):
            job.train(np.random.default_rng(step))
            checkpointer.save(step).result()
        assert checkpointer.save(2).result().rows == 0
        way(job.weight)
        info = checkpointer.save(3).result()
    assert info.rows == 1
    assert_holds(tmp_path, info.id, job.expected(tmp_path, info.id), job.make, torch.float32)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "cnr_store")
    return lambda: [each.getMessage() for each in caplog.records if "compared" in each.getMessage()]


def test_under_adam_few_rows_are_written(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    """Rows alone whose codes changed, array by array: and the table says so, once."""
    job, random = Job(MAKERS["Adam"]), np.random.default_rng(0)
    with cnr_store.Checkpointer(
        tmp_path, job.model, job.optimizer, policy="consecutive", **FORMS["relative"]
    ) as checkpointer:
        job.train(random, 3)
        checkpointer.save(0).result()
        job.train(random, 1)
        (explained, _) = checkpointer.explain()
        assert (explained.whole, explained.compared) == (False, True)
        assert 0 < explained.changed < 60
        info = checkpointer.save(1).result()
        assert info.rows < 70
    entries = Catalog(open_backend(str(tmp_path))).record(info.id).arrays
    written = {slot: entries[f"tables/a/{slot}"].rows for slot in ("weight", "exp_avg", "exp_avg_sq")}
    assert written["weight"] == explained.changed
    assert 0 < written["exp_avg_sq"] < ROWS
    assert len(set(written.values())) > 1
    (line,) = told()
    assert line.startswith("2 tables are compared with what is stored: 'a', 'b': Adam")


def test_a_save_that_failed_counts_no_row_twice_and_forgets_none(tmp_path: Path) -> None:
    job, fails, random = Job(MAKERS["momentum"]), [False], np.random.default_rng(0)
    backend = FaultyBackend(
        open_backend(tmp_path),
        lambda operation, key, _: "before" if fails[0] and operation == "put" and "/c/" in key else None,
    )
    with cnr_store.Checkpointer(
        backend,
        job.model,
        job.optimizer,
        policy="consecutive",
        failures=cnr_store.Failures(retry_seconds=0),
        tracking=cnr_store.Tracking(audit=False),
        **FORMS["relative"],
    ) as checkpointer:
        job.train(random)
        checkpointer.save(0).result()
        fails[0] = True
        by_data(job.weight)
        with pytest.raises(CheckpointError):
            checkpointer.save(1).result()
        fails[0] = False
        info = checkpointer.save(2).result()
        assert info.rows == 1
        assert_holds(str(tmp_path), info.id, job.expected(str(tmp_path), info.id), job.make, torch.float32)
        assert checkpointer.save(3).result().rows == 0


@pytest.mark.some_by_day(8)
@pytest.mark.parametrize("form", ["relative", "uniform", "lossless"])
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize("way", WAYS)
def test_an_audit_of_all_rows_finds_what_hooks_miss(
    tmp_path: Path, way: Callable[[Any], None], policy: Any, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under SGD, whose rows hooks know: what nobody sees is written, and told of."""
    job = Job(MAKERS["SGD"])
    options = FORMS[form] | {"policy": policy, "tracking": cnr_store.Tracking(audit="all")}
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
        checkpointer.save(0).result()
        job.train(np.random.default_rng(1))
        before = checkpointer.save(1).result()
        assert not [each for each in caplog.messages if "without being tracked" in each]
        way(job.weight)
        info = checkpointer.save(2).result()
    assert info.kind == "delta"
    assert info.rows == 1 + (before.rows if policy == "intermittent" else 0)
    if way not in (by_new_data, by_set):  # of which hooks know that something changed
        assert [
            each
            for each in caplog.messages
            if "without being tracked" in each and "row 5 of tables/a" in each
        ]
    assert_holds(tmp_path, info.id, job.expected(tmp_path, info.id), job.make, torch.float32)


def test_an_audit_of_all_rows_goes_on_after_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = FORMS["lossless"] | {"policy": "consecutive", "tracking": cnr_store.Tracking(audit="all")}
    job, newer = Job(MAKERS["SGD"]), Job(MAKERS["SGD"])
    with cnr_store.Checkpointer(tmp_path, job.model, job.optimizer, **options) as checkpointer:
        checkpointer.save(0).result()
    with cnr_store.Checkpointer(tmp_path, newer.model, newer.optimizer, **options) as checkpointer:
        checkpointer.load()
        by_data(newer.weight)
        info = checkpointer.save(1).result()
    assert (info.kind, info.rows) == ("delta", 1)
    assert "row 5 of tables/a/weight" in caplog.text
