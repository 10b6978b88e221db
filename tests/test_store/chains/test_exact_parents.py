"""Lossless rows whose integers stand in memory: deltas hold their differences, and every bit comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, Limits, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.training.saving import planner
from tests.test_docs import block
from tests.test_store.chains.test_relative import count_relative, no_findings
from tests.test_store.support.follower import Follower
from tests.test_store.writing.test_read_back import known_codes, warnings_of

ROWS, DIM, CHANGED = 1500, 8, 100
WEIGHT, SUM = "tables/songs/weight", "tables/songs/sum"
EXACT = Limits(exact_parents=True)
HARD = np.array(
    [0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001, 0x7F7FFFFF],
    np.uint32,
).view(np.float32)
"""NaN of several bits, of which the first has the least integer of all; infinities, zeros, subnormals, the largest."""
Values = np.ndarray[Any, Any]


class Job:
    """A table of lossless rows, and what versions have of it and of its state."""

    def __init__(self, dtype: torch.dtype = torch.float32, optimizer: Any = torch.optim.Adagrad) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict({"songs": nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)})
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.expected: dict[str, dict[str, Values]] = {}

    @property
    def weight(self) -> torch.Tensor:
        return self.model.get_parameter("songs.weight")

    def checkpointer(self, url: Any, **options: Any) -> Checkpointer:
        own = {"budget": 0, "limits": EXACT, "policy": "consecutive", **options}
        return Checkpointer(url, self.model, self.optimizer, **own)

    def train(self, seed: int, checkpointer: Checkpointer | None = None) -> None:
        """A step; then some rows get hard values, of which the checkpointer is told."""
        random = np.random.default_rng(seed)
        rows = torch.from_numpy(random.choice(ROWS, CHANGED, replace=False))
        self.optimizer.zero_grad()
        (self.model["songs"](rows) * torch.randn(CHANGED, DIM)).sum().backward()
        self.optimizer.step()
        if checkpointer is not None:
            drawn = rows[:9]
            with torch.no_grad():
                self.weight[drawn] = torch.from_numpy(random.choice(HARD, (9, DIM)))
            checkpointer.touch("songs", drawn)

    def save(self, checkpointer: Checkpointer, step: int, **options: Any) -> str:
        version = checkpointer.save(step, **options).result().id
        self.expected[version] = self.arrays()
        return version

    def arrays(self) -> dict[str, Values]:
        state = self.optimizer.state[self.weight]
        found = {f"tables/songs/{name}": each for name, each in state.items() if each.ndim}
        return {path: each.detach().numpy().copy() for path, each in {WEIGHT: self.weight, **found}.items()}


def assert_bits(found: Any, expected: Values) -> None:
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected.view(np.uint32))


def assert_holds(url: Path, expected: dict[str, dict[str, Values]]) -> None:
    """By each way of reading a version, bit for bit."""
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    for version, arrays in expected.items():
        overlay: Any = zarr.open_group(cnr_store.view(str(url), version), mode="r")
        group: Any = cnr_store.open(str(url), version)
        other, ids = Job(), np.arange(3, ROWS, 11)
        cnr_store.load(str(url), other.model, other.optimizer, version=version)
        for path, values in arrays.items():
            assert_bits(group[path][:], values)
            assert_bits(overlay[path][7:99], values[7:99])
            assert_bits(names["read_rows"](url, version, path), values)
            assert_bits(cnr_store.rows(str(url), path, ids, version), values[ids])
            assert_bits(other.arrays()[path], values)
    follower = Follower(open_backend(url))
    follower.catch_up()
    assert_bits(follower.arrays["songs.weight"], [*expected.values()][-1][WEIGHT])
    no_findings(url)


def kinds(url: Path, version: str) -> tuple[str, str]:
    """The identifier of the codec of rows, and of state."""
    arrays = Catalog(open_backend(url)).record(version).arrays
    found = (arrays[path].codec for path in (WEIGHT, SUM))
    one, other = ("" if each is None else str(each["id"]) for each in found)
    return one, other


@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent", "auto"])
def test_versions_have_every_bit_and_deltas_are_relative(tmp_path: Path, policy: str) -> None:
    job = Job()
    with torch.no_grad():
        job.weight[:40] = torch.from_numpy(np.random.default_rng(0).choice(HARD, (40, DIM)))
    with job.checkpointer(tmp_path, policy=policy) as checkpointer:
        relative = []
        for step in range(6):
            job.train(step % 4, checkpointer)
            version = job.save(checkpointer, step)
            relative.append([count_relative(str(tmp_path), version, path) for path in (WEIGHT, SUM)])
            if step == 3:
                cnr_store.compact(str(tmp_path), version)
            if step == 4:
                checkpointer.load()
                assert_bits(job.arrays()[WEIGHT], job.expected[version][WEIGHT])
    assert kinds(tmp_path, version) == ("cnr_floating", "cnr_floating")
    if policy == "full":
        assert not np.any(relative)
    else:
        assert np.max(relative, axis=0).min() > 0.8 * CHANGED
    assert_holds(tmp_path, job.expected)
    for version in job.expected:
        cnr_store.compact(str(tmp_path), version)
    assert_holds(tmp_path, job.expected)
    cnr_store.export(str(tmp_path), out := f"{tmp_path}.zarr", version)
    exported: Any = zarr.open_group(out, mode="r")
    assert_bits(exported[WEIGHT][:], job.expected[version][WEIGHT])


def test_deltas_take_fewer_bytes(tmp_path: Path) -> None:
    sizes = {}
    for exact_parents in (False, True):
        torch.manual_seed(1)
        model = nn.ModuleDict({"songs": nn.Embedding(6_000, DIM, sparse=True)})
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        limits = Limits(exact_parents=exact_parents)
        url = str(tmp_path / str(exact_parents))
        with Checkpointer(url, model, optimizer, budget=0, limits=limits) as checkpointer:
            for step in range(40):
                optimizer.zero_grad()
                rows = model["songs"](torch.arange(0, 6_000, 2))
                (rows * torch.randn(3_000, DIM)).sum().backward()
                optimizer.step()
                if step >= 38:
                    info = checkpointer.save(step).result()
            explained = checkpointer.explain()
        assert info.kind == "delta"
        assert explained.exact_bytes == exact_parents * 2 * 4 * 6_000 * DIM
        assert explained.absolute == {}
        sizes[exact_parents] = info.bytes
        other = nn.ModuleDict({"songs": nn.Embedding(6_000, DIM, sparse=True)})
        cnr_store.load(url, other, torch.optim.Adagrad(other.parameters()))
        assert torch.equal(other.get_parameter("songs.weight"), model.get_parameter("songs.weight"))
    assert sizes[True] < 0.7 * sizes[False]


@pytest.mark.parametrize("is_compared", [False, True])
def test_a_failed_save_forgets_no_row_and_goes_on_from_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compared: bool
) -> None:
    job = Job(optimizer=torch.optim.Adam if is_compared else torch.optim.Adagrad)
    job.model["songs"].sparse = not is_compared  # type: ignore[assignment]  # a module's attribute
    with job.checkpointer(tmp_path, failures=cnr_store.Failures(retry_seconds=0)) as checkpointer:
        for step in range(2):
            job.train(step, checkpointer)
            job.save(checkpointer, step)
        job.train(2, checkpointer)
        with monkeypatch.context() as patched:

            def fail(*_: Any) -> Any:
                raise OSError("no record today")

            patched.setattr("cnr_store.writing.writer.finish_record", fail)
            with pytest.raises(cnr_store.SaveError):
                checkpointer.save(99).result()
        job.train(3, checkpointer)
        last = job.save(checkpointer, 3)
    assert count_relative(str(tmp_path), last, WEIGHT) > 1.5 * CHANGED
    check_model(tmp_path, job)


def check_model(url: Path, job: Job) -> None:
    for version, arrays in job.expected.items():
        group: Any = cnr_store.open(str(url), version)
        for path, values in arrays.items():
            assert_bits(group[path][:], values)
    no_findings(url)


@pytest.mark.parametrize("is_compared", [False, True])
@pytest.mark.parametrize("order", [(True, False, True), (False, True, True)])
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
def test_a_job_goes_on_with_the_option_and_without(
    tmp_path: Path, policy: str, order: tuple[bool, ...], is_compared: bool
) -> None:
    expected: dict[str, dict[str, Values]] = {}
    for life, exact_parents in enumerate(order):
        job = Job(optimizer=torch.optim.Adam if is_compared else torch.optim.Adagrad)
        job.model["songs"].sparse = not is_compared  # type: ignore[assignment]  # a module's attribute
        job.expected = expected
        limits = Limits(exact_parents=exact_parents)
        with job.checkpointer(tmp_path, policy=policy, limits=limits) as checkpointer:
            if life:
                loaded = checkpointer.load().version.id
                for path, values in expected[loaded].items():
                    assert_bits(job.arrays()[path], values)
            assert exact_parents or not checkpointer.explain().code_bytes
            for step in range(3):
                job.train(step, checkpointer)
                version = job.save(checkpointer, 5 * life + step)
                relative = count_relative(str(tmp_path), version, WEIGHT)
                assert not relative or exact_parents
            if life in (0, 2):
                job.save(checkpointer, 5 * life + 3, full=True)
                assert bool(checkpointer.explain().exact_bytes) == exact_parents
                job.train(9, checkpointer)
                version = job.save(checkpointer, 5 * life + 4)
                relative = count_relative(str(tmp_path), version, WEIGHT)
                assert (relative > 0.8 * CHANGED) == exact_parents
    check_model(tmp_path, job)


def test_a_load_notes_what_it_reads(tmp_path: Path) -> None:
    """Rows with the least integer of all are known by digests."""
    job = Job(optimizer=torch.optim.Adam)
    job.model["songs"].sparse = False  # type: ignore[assignment]  # a module's attribute
    with torch.no_grad():
        job.weight[:3] = torch.from_numpy(np.full((3, DIM), HARD[0]))
    with job.checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            job.train(step, checkpointer)
            job.save(checkpointer, step)
        assert checkpointer.save(2).result().rows == 0
    with job.checkpointer(tmp_path) as checkpointer:
        checkpointer.load()
        assert checkpointer.explain().exact_bytes == 3 * 4 * ROWS * DIM
        assert checkpointer.save(3).result().rows == 0
        job.weight.data[5, 3].neg_()
        version = job.save(checkpointer, 4)
        assert count_relative(str(tmp_path), version) == 1
    check_model(tmp_path, job)


def test_without_room_deltas_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "free_bytes", lambda: 2 * 2 * 4 * ROWS * DIM)  # of the first array alone
    job = Job()
    with job.checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            job.train(step, checkpointer)
            version = job.save(checkpointer, step)
        told = checkpointer.explain()
    assert told.exact_bytes == 4 * ROWS * DIM
    assert "exact_parents does nothing for songs/sum (no room in memory)." in str(told)
    assert count_relative(str(tmp_path), version, WEIGHT) > 0.8 * CHANGED
    assert count_relative(str(tmp_path), version, SUM) == 0
    check_model(tmp_path, job)


def test_other_integers_in_memory_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpointer:
        job.save(checkpointer, 0)
        job.train(1)
        job.save(checkpointer, 1)
        known_codes(checkpointer)[:, 3] += 1
        job.train(1)
        version = job.save(checkpointer, 2)
    (told,) = [each for each in warnings_of(caplog) if WEIGHT in each]
    assert "has other codes of" in told
    assert count_relative(str(tmp_path), version, WEIGHT) == 0
    check_model(tmp_path, job)


def test_what_is_relative_to_a_damaged_version_is_an_error_and_salvage_goes_on(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            job.train(step % 2)
            job.save(checkpointer, step)
    second = [*job.expected][1]
    spoil(tmp_path, second)
    with job.checkpointer(tmp_path) as checkpointer:
        with pytest.raises(cnr_store.CorruptionError, match=second):
            checkpointer.load()
        found = checkpointer.load(salvage=True)
        assert found.salvaged
        job.train(9)
        version = job.save(checkpointer, 9)
    check = cnr_store.open(str(tmp_path), version)
    array: Any = check[WEIGHT]
    assert_bits(array[:], job.expected[version][WEIGHT])


def spoil(url: Path, version: str) -> None:
    for shard in (url / "versions" / version / WEIGHT / "c").rglob("*"):
        if shard.is_file():
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 255
            shard.write_bytes(bytes(data))


EXACT_CODEC = {"id": "cnr_floating", "mantissa_bits": 23}
CASES: list[tuple[torch.dtype, dict[str, Any], str]] = [
    (torch.float32, {}, ""),
    (torch.float32, {"budget": 0.01, "bits": 32}, ""),
    (torch.float32, {"budget": 0.01, "codec": EXACT_CODEC}, ""),
    (torch.float32, {"budget": 0.01, "codec": {"id": "cnr_rows"}}, "cnr_rows"),
    (torch.float32, {"budget": 0.01}, "cnr_lattice"),
    (torch.float32, {"budget": 0.01, "bits": 4}, "cnr_uniform"),
    (torch.bfloat16, {}, "bfloat16"),
    (torch.float16, {"budget": 0.01, "codec": EXACT_CODEC}, "float16"),
]
"""Of a table: type, options, and what is told of its rows."""


@pytest.mark.parametrize(("dtype", "options", "why"), CASES)
def test_what_it_does_nothing_for_is_told(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], why: str
) -> None:
    """Then everything is as without the option."""
    told, found = [], []
    for limits in (Limits(), EXACT):
        job, url = Job(dtype), tmp_path / str(limits.exact_parents)
        with job.checkpointer(url, limits=limits, **options) as checkpointer:
            for step in range(3):
                job.train(step)
                version = checkpointer.save(step).result().id
            told.append(str(checkpointer.explain()))
        entry = Catalog(open_backend(url)).record(version).arrays[WEIGHT]
        found.append((entry.codec, count_relative(str(url), version, WEIGHT)))
    assert "exact_parents" not in told[0]
    assert (f"songs/weight ({why})" in told[1]) == bool(why)
    assert (found[0] == found[1]) == bool(why)
    if not why:
        assert found[1][1] > 0.8 * CHANGED


def test_tables_of_little_memory_stay_as_they_are(tmp_path: Path) -> None:
    model = nn.ModuleDict({"few": nn.Embedding(100, 8, sparse=True)})
    with Checkpointer(tmp_path, model, budget=0, limits=EXACT) as checkpointer:
        entries = Catalog(open_backend(tmp_path)).record(checkpointer.save(0).result().id).arrays
        assert "does nothing for few/weight (cnr_rows)." in str(checkpointer.explain())
    assert dict(entries["tables/few/weight"].codec or {}) == {"id": "cnr_rows"}


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"limits.exact_parents=.*: give True or False"):
        Limits(exact_parents=wrong)
