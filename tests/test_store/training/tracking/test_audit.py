"""Rows that changed although nothing told of it are found, and rows that didn't raise no alarm."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

import cnr_store
from cnr_store.errors import OptionError, SaveError, TrackingError
from cnr_store.training.model.row_arrays import RowArray, RowArrays, SlotNames
from cnr_store.training.model.tables import find_tables
from cnr_store.training.tracking.audit import Audit
from cnr_store.training.tracking.bitmap import Bitmap, empty_bitmap, full_bitmap, mark

ROWS = 20_000
SAVES = 20


def arrays_of(
    rows: int = ROWS, dim: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[RowArray]:
    """Those of a model with one table `t`."""
    table = nn.Embedding(rows, dim, dtype=dtype, device=device)
    return RowArrays(SlotNames()).now(find_tables(nn.ModuleDict({"t": table})))


class Job:
    """Trains a table on Zipf's ids, and forgets one in a thousand of those that it looks up, or of those that changed.

    Its audit sees a fifth of the table.
    """

    def __init__(self, seed: int, forgets: str) -> None:
        self.random = np.random.default_rng(seed)
        self.forgets = forgets
        self.arrays = arrays_of()
        self.values = self.arrays[0].parts[0].tensor.detach().numpy()
        self.order = self.random.permutation(ROWS)
        self.audit = Audit(limit_bytes=64 << 10, seed=seed)
        self.forgotten = 0

    def interval(self) -> dict[str, Bitmap]:
        """Train, and return the rows that are flagged."""
        changed, flagged = empty_bitmap(ROWS), empty_bitmap(ROWS)
        for _ in range(8):
            ids = np.unique(self.order[self.random.zipf(1.2, 512) % ROWS])
            self.values[ids] += 1
            mark(changed, ROWS, ids)
            mark(flagged, ROWS, ids[self.kept(len(ids))])
        if self.forgets == "rows":
            rows = np.flatnonzero(np.unpackbits(changed, bitorder="little"))
            flagged = empty_bitmap(ROWS)
            mark(flagged, ROWS, rows[self.random.random(len(rows)) >= 1e-3])
        self.forgotten += int(np.unpackbits(changed & ~flagged).sum())
        return {"t": flagged}

    def kept(self, ids: int) -> Any:
        return self.random.random(ids) >= (1e-3 if self.forgets == "lookups" else 0)

    def is_caught(self) -> bool:
        self.audit.renew(self.arrays)
        for _ in range(SAVES):
            flagged = self.interval()
            try:
                self.audit.check(self.arrays, flagged, lambda *_: None)
            except TrackingError:
                return True
            self.audit.renew(self.arrays, flagged)
        return False


@pytest.mark.slow
@pytest.mark.parametrize("forgets", ["lookups", "rows"])
def test_a_tracker_that_forgets_one_in_a_thousand_is_caught_within_20_saves(forgets: str) -> None:
    caught = [Job(seed, forgets).is_caught() for seed in range(100)]
    assert sum(caught) >= 99


@pytest.mark.slow
def test_a_tracker_that_forgets_nothing_is_never_accused() -> None:
    for seed in range(5):
        job = Job(seed, "nothing")
        assert not job.is_caught()
        assert job.forgotten == 0


ELEMENTS = [torch.float32, torch.bfloat16, torch.float16]


_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_GPU)])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_a_changed_bit_of_a_sampled_row_is_named_with_its_table(dtype: torch.dtype, device: str) -> None:
    arrays, audit, distrusted = arrays_of(9, 3, dtype, device), Audit(), []
    audit.renew(arrays)
    arrays[0].parts[0].tensor.data.view(torch.uint8)[[2, 4, 7], 1] ^= 1
    flagged = empty_bitmap(9)
    mark(flagged, 9, np.array([4]))
    with pytest.raises(TrackingError, match=r"table 't': rows 2, 7 of tables/t/weight.*touch"):
        audit.check(arrays, {"t": flagged}, lambda *why: distrusted.append(why))
    assert [name for name, _ in distrusted] == ["t"]
    audit.check(arrays, {"t": full_bitmap(9)}, lambda *why: distrusted.append(why))
    assert len(distrusted) == 1


def test_a_step_may_give_nan_other_bits_in_rows_without_a_gradient() -> None:
    arrays, audit = arrays_of(9, 16, torch.bfloat16), Audit()
    weight = arrays[0].table.parameter
    weight.data[7] = float("nan")
    audit.renew(arrays)
    weight.grad = torch.zeros_like(weight)
    SGD([weight], lr=0.1).step()
    audit.check(arrays, {"t": empty_bitmap(9)}, lambda *_: None)
    weight.data[7] = 0
    with pytest.raises(TrackingError, match="row 7 of"):
        audit.check(arrays, {"t": empty_bitmap(9)}, lambda *_: None)


@pytest.fixture
def flushing() -> Iterator[None]:
    """Arithmetic that takes subnormal numbers for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_a_step_may_flush_subnormal_numbers_to_zero_in_rows_without_a_gradient(
    dtype: torch.dtype, flushing: None
) -> None:
    arrays, audit = arrays_of(9, 16, dtype), Audit()
    weight = arrays[0].table.parameter
    bits = weight.data.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    least_normal = 1 << round(math.log2(1 / torch.finfo(dtype).eps))
    bits[2:5] = torch.tensor([[1], [5], [least_normal - 1]], dtype=bits.dtype)
    bits[5], bits[6] = bits[4] | torch.iinfo(bits.dtype).min, least_normal
    audit.renew(arrays)
    weight.grad = torch.zeros_like(weight)
    SGD([weight], lr=0.1).step()
    if dtype is torch.float32:
        assert not (bits[2:6] & torch.iinfo(bits.dtype).max).any()
    audit.check(arrays, {"t": empty_bitmap(9)}, lambda *_: None)
    bits[6] = 0
    with pytest.raises(TrackingError, match="row 6 of"):
        audit.check(arrays, {"t": empty_bitmap(9)}, lambda *_: None)


def test_many_tables_are_sampled_by_turns() -> None:
    model = nn.ModuleDict({f"t{number}": nn.Embedding(3, 2) for number in range(70)})
    arrays, audit, found = RowArrays(SlotNames()).now(find_tables(model)), Audit(), []
    flagged = {array.table.name: empty_bitmap(3) for array in arrays}
    for _ in range(3):
        audit.renew(arrays, flagged)
        for array in arrays:
            array.parts[0].tensor.data += 1
        with pytest.raises(TrackingError):
            audit.check(arrays, flagged, lambda name, _: found.append(name))
        audit.check(arrays, {name: full_bitmap(3) for name in flagged}, lambda name, _: found.append(name))
    assert {*found} == {*flagged}
    assert len(found) < 2 * len(flagged)


def test_samples_keep_to_their_bytes_and_small_tables_are_whole() -> None:
    model = nn.ModuleDict({"big": nn.Embedding(5000, 8), "small": nn.Embedding(10, 8)})
    arrays, audit = RowArrays(SlotNames()).now(find_tables(model)), Audit(limit_bytes=200 * 32)
    audit.renew(arrays)
    moved = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(1)
    for name, array in zip(model, arrays, strict=True):
        with pytest.raises(TrackingError) as caught:
            audit.check([array], {name: empty_bitmap(array.shape[0])}, lambda *_: None)
        found = re.search(r"and (\d+) more sampled", str(caught.value))
        assert found is not None
        moved[name] = 5 + int(found[1])
    assert moved["small"] == 10
    assert 150 <= moved["big"] <= 190  # a row drawn twice is kept once


def test_a_table_of_another_size_is_not_compared() -> None:
    (array,), audit = arrays_of(9, 3), Audit()
    audit.renew([array])
    array.table.parameter.data = torch.zeros(12, 3)
    audit.check([array], {"t": empty_bitmap(12)}, lambda *_: None)


@pytest.mark.parametrize("wrong", [-1, 1.5, "yes"])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="audit="):
        cnr_store.Checkpointer("memory://audit", nn.Embedding(3, 2), tracking=cnr_store.Tracking(audit=wrong))


def looked_up(table: nn.Embedding) -> Any:
    return table(torch.arange(5)).square().sum()


class Trained:
    """A model of one table, that trains on its first rows and is saved in a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.table = nn.Embedding(600, 8, sparse=True)
        self.model = nn.ModuleDict({"t": self.table})
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1)
        self.folder = str(folder)
        self.options: dict[str, Any] = {"policy": "consecutive", "bits": 32, **options}
        self.checkpointer = cnr_store.Checkpointer(self.folder, self.model, self.optimizer, **self.options)

    def train(self) -> None:
        looked_up(self.table).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, full: bool = False) -> cnr_store.VersionInfo:
        return self.checkpointer.save(step, full=full).result()

    def stored(self) -> np.ndarray[Any, Any]:
        return np.asarray(cnr_store.state_dict(self.folder)["t.weight"])


def by_data(job: Trained) -> None:
    job.table.weight.data[7] = 3


def by_numpy(job: Trained) -> None:
    job.table.weight.detach().numpy()[7] = 3


def by_data_of_state(job: Trained) -> None:
    job.optimizer.state[job.table.weight]["sum"].data[7] = 3


@pytest.mark.parametrize("change", [by_data, by_numpy, by_data_of_state])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_change_that_torch_does_not_count_is_an_error_and_then_saved_whole(
    tmp_path: Path, change: Any, loaded: bool
) -> None:
    job = Trained(tmp_path)
    with job.checkpointer:
        job.train()
        job.save(1)
        if loaded:
            job.checkpointer.load()
        job.train()
        change(job)
        with pytest.raises(TrackingError, match=r"table 't': row 7 of tables/t/(weight|sum)") as caught:
            job.save(2)
        assert isinstance(caught.value, SaveError)
        assert [info.step for info in cnr_store.versions(job.folder)] == [1]
        job.save(3)
        assert (job.stored() == job.table.weight.detach().numpy()).all()
        job.train()
        assert job.save(4).kind != "full"
        assert (job.stored() == job.table.weight.detach().numpy()).all()


@pytest.mark.parametrize("remedy", ["touch", "full", "off", "policy"])
def test_what_to_do_about_such_changes(tmp_path: Path, remedy: str) -> None:
    by_option: dict[str, dict[str, Any]] = {
        "off": {"tracking": cnr_store.Tracking(audit=False)},
        "policy": {"policy": "full"},
    }
    options = by_option.get(remedy, {})
    job = Trained(tmp_path, **options)
    with job.checkpointer:
        job.save(1)
        by_data(job)
        if remedy == "touch":
            job.checkpointer.touch("t", 7)
        job.save(2, full=remedy == "full")
        assert (job.stored()[7] == 3).all() == (remedy != "off")


def test_an_optimizer_that_lies_about_its_class_is_caught(tmp_path: Path) -> None:
    job = Trained(tmp_path)

    def decay(*_: object) -> None:
        job.table.weight.data.mul_(0.99)

    job.optimizer.register_step_post_hook(decay)
    with job.checkpointer:
        job.save(1)
        job.train()
        with pytest.raises(TrackingError, match="rows 5, 6, 7, 8, 9 and 590 more sampled"):
            job.save(2)
