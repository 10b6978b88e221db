"""Tables on a lattice: saved, loaded, read, folded, repaired, and what records say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_codecs import LatticeRows, Scheme
from cnr_codecs.lattice.steps import median_scale, scale_counts
from cnr_store import Checkpointer
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.errors import CorruptionError
from tests.test_codecs.references.lattice import codes_of, values_of
from tests.test_docs import block

ROWS, DIM, PATH = 3000, 8, "tables/songs/weight"
LATTICE = {"id": "cnr_lattice", "rms_step": 0.1}
Values = np.ndarray[Any, Any]


class Job:
    """A model of one table, the rows that each save should give back, and the table's steps."""

    def __init__(
        self, url: Path, codec: Any = LATTICE, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.url = url
        self.model = nn.ModuleDict({"songs": nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.expected: dict[str, Values] = {}
        self._codec, self._options = codec, options
        self._stored = np.zeros((ROWS, DIM), np.float32)
        self._step = 0
        self._saved = np.zeros((ROWS, DIM), np.float32)

    @property
    def weight(self) -> torch.Tensor:
        table = self.model["songs"]
        assert isinstance(table, nn.Embedding)
        return table.weight

    def checkpointer(self, **options: Any) -> Checkpointer:
        return Checkpointer(
            str(self.url), self.model, self.optimizer, codec=self._codec, **(self._options | options)
        )

    def train(self, seed: int) -> None:
        rows = torch.from_numpy(np.random.default_rng(seed).choice(ROWS, 100, replace=False))
        self.optimizer.zero_grad()
        (self.model["songs"](rows) * torch.randn(len(rows), DIM)).sum().backward()
        self.optimizer.step()

    def save(self, checkpointer: Checkpointer, full: bool = False) -> str:
        """Save, and note what the version should hold: codes of the rows that changed, on its table's step."""
        self._step += 1
        values = self.weight.detach().float().numpy().copy()
        version = checkpointer.save(self._step, full=full).result().id
        entry = recorded(self.url, version)[PATH]
        changed = (values != self._saved).any(axis=1) if entry.kind == "delta" else np.ones(ROWS, bool)
        element = entry.element
        codes, raw = codes_of(values, step_of(entry), 32767 if element == "float32" else 127)
        kept = np.where(raw[:, None], values, values_of(codes, step_of(entry), element))
        # A delta over the baseline holds what changed since: such rows are coded alike, their step being the same.
        self._stored[changed], self._saved = kept[changed], values
        self.expected[version] = self._stored.copy()
        return version


def recorded(url: Path, version: str) -> Any:
    record = Catalog(open_backend(str(url))).find_record(version)
    assert record is not None
    return record.arrays


def required(url: Path, version: str, room: str = "versions") -> list[str]:
    attributes = json.loads((url / room / version / "zarr.json").read_text())["attributes"]
    found: list[str] = attributes["cnr" if room == "versions" else "cnr_fold"]["requires"]
    return found


def step_of(entry: Any) -> float:
    return float(entry.codec["step"])


def array_of(url: Path, version: str) -> zarr.Array[Any]:
    found = cnr_store.open(str(url), version)[PATH]
    assert isinstance(found, zarr.Array)
    return found


def held(url: Path, version: str) -> Values:
    return np.asarray(array_of(url, version)[:])


def assert_reads(url: Path, version: str, expected: Values) -> None:
    """By each way of reading a version."""
    np.testing.assert_array_equal(held(url, version), expected)
    np.testing.assert_array_equal(array_of(url, version)[500:517], expected[500:517])
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    np.testing.assert_array_equal(names["read_rows"](url, version, PATH), expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent"])
def test_versions_give_back_the_codes_of_one_step(tmp_path: Path, policy: str) -> None:
    job = Job(tmp_path, policy=policy)
    with job.checkpointer() as checkpointer:
        for seed in range(4):
            job.train(seed)
            version = job.save(checkpointer)
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
        assert {"lattice"} <= set(required(tmp_path, version))
    assert_reads(tmp_path, version, expected)
    steps = {step_of(recorded(tmp_path, each)[PATH]) for each in job.expected}
    assert policy == "full" or len(steps) == 1
    report = cnr_store.verify(str(tmp_path), deep=True)
    assert not report.problems
    with torch.no_grad():
        job.weight.zero_()
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        np.testing.assert_array_equal(job.weight.detach().numpy(), expected)


def test_the_step_is_that_of_the_whole_table_and_outlives_processes(tmp_path: Path) -> None:
    job = Job(tmp_path, policy="consecutive")
    with job.checkpointer() as checkpointer:
        whole = job.save(checkpointer)
        own = LatticeRows(0.1).step_of(median_scale(scale_counts(job.weight.detach().numpy())))
        with torch.no_grad():
            job.weight[::2] *= 3
        checkpointer.touch("songs", np.arange(0, ROWS, 2))
        delta = job.save(checkpointer)
    with job.checkpointer() as checkpointer:
        checkpointer.load()
        job.train(5)
        later = job.save(checkpointer)
        again = job.save(checkpointer, full=True)
    entries = {version: recorded(tmp_path, version)[PATH] for version in (whole, delta, later, again)}
    assert [each.kind for each in entries.values()] == ["whole", "delta", "delta", "whole"]
    assert [step_of(each) for each in entries.values()][:3] == [own] * 3
    assert step_of(entries[again]) > own
    assert {each.codec["rms_step"] for each in entries.values()} == {0.1}
    for version in (whole, delta, again):
        np.testing.assert_array_equal(held(tmp_path, version), job.expected[version])


def test_another_share_takes_another_step(tmp_path: Path) -> None:
    job = Job(tmp_path, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
    other = Job(tmp_path, {"id": "cnr_lattice", "rms_step": 0.5}, policy="consecutive")
    with other.checkpointer() as checkpointer:
        checkpointer.load()
        other.train(1)
        version = checkpointer.save(9).result().id
    entry = recorded(tmp_path, version)[PATH]
    assert (entry.kind, dict(entry.codec)) == ("delta", {"id": "cnr_lattice", "rms_step": 0.5})
    # Each chunk has a step of its own.
    found = held(tmp_path, version)
    assert np.abs(found - other.weight.detach().numpy()).max() < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    job = Job(tmp_path, dtype=dtype)
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        with torch.no_grad():
            job.weight[3] = float("nan")
            job.weight[7, 2] = 300
        checkpointer.touch("songs", [3, 7])
        job.save(checkpointer)
    for version, expected in job.expected.items():
        found = held(tmp_path, version).astype(np.float32)
        np.testing.assert_array_equal(found, expected)


def test_a_fold_requires_what_its_rows_do(tmp_path: Path) -> None:
    """Also where only a delta is on a lattice, and the whole beneath it is not."""
    job = Job(tmp_path, {"id": "cnr_uniform", "bits": 8}, policy="consecutive")
    with job.checkpointer() as checkpointer:
        first = checkpointer.save(1).result().id
    assert not {"lattice"} & set(required(tmp_path, first))
    other = Job(tmp_path, policy="consecutive")
    with other.checkpointer() as checkpointer:
        checkpointer.load()
        other.train(3)
        version = checkpointer.save(2).result().id
    before = held(tmp_path, version)
    cnr_store.compact(str(tmp_path), version)
    assert {"lattice"} <= set(required(tmp_path, version, "folds"))
    reader = ArrayReader(catalog := Catalog(open_backend(str(tmp_path))), _record(catalog, version), PATH)
    schemes = {segment.scheme for segment in reader.take(0, np.ones(ROWS, np.uint8))[0]}
    assert schemes == {Scheme.ASYMMETRIC, Scheme.LATTICE}
    np.testing.assert_array_equal(held(tmp_path, version), before)


def _record(catalog: Catalog, version: str) -> Any:
    catalog.look_for_folds()
    record = catalog.find_record(version)
    assert record is not None
    return record


def test_plain_zarr_reads_a_baseline_and_export_its_rows(tmp_path: Path) -> None:
    job = Job(tmp_path / "store")
    with job.checkpointer() as checkpointer:
        version = job.save(checkpointer)
    group = zarr.open_group(tmp_path / "store" / "versions" / version, mode="r")
    np.testing.assert_array_equal(np.asarray(group[PATH][:]), job.expected[version])  # type: ignore[index]
    state = cnr_store.state_dict(str(tmp_path / "store"), version)
    np.testing.assert_array_equal(state["songs.weight"], job.expected[version])


def test_damaged_rows_are_an_error_and_salvage_finds_older_ones(tmp_path: Path) -> None:
    job = Job(tmp_path, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        job.train(1)
        version = job.save(checkpointer)
    (shard,) = (path for path in (tmp_path / "versions" / version / PATH / "c").rglob("*") if path.is_file())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(bytes(data))
    with pytest.raises(CorruptionError, match=r"crc32c|damaged"):
        held(tmp_path, version)
    assert cnr_store.verify(str(tmp_path), deep=True).problems
    with job.checkpointer() as checkpointer:
        restored = checkpointer.load(salvage=True)
    assert restored.salvaged


def test_follow_yields_the_codes(tmp_path: Path) -> None:
    job = Job(tmp_path, policy="consecutive")
    with job.checkpointer() as checkpointer:
        first = job.save(checkpointer)
        job.train(1)
        job.save(checkpointer)
        job.train(2)
        last = job.save(checkpointer)
    found = job.expected[first].copy()
    for update in cnr_store.follow(str(tmp_path), since=first):
        for each in update.blocks():
            if each.name == "songs.weight":
                found[each.rows] = each.values
    np.testing.assert_array_equal(found, job.expected[last])
