"""Tables on a lattice that several ranks save."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog, open_record
from cnr_store.format import grid
from cnr_store.ranks.placement import Piece
from tests.nightly import at_night
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.ranks.support.spread_model import Cut, TableKind, draw_cut
from tests.test_store.ranks.support.thread_job import ThreadJob, changed, find_spread_models
from tests.test_store.support.places import quick_folder

KINDS = [TableKind(name, 3000 + 77 * place, 16, torch.float32, {}) for place, name in enumerate("ABC")]
RMS_STEP = 0.05


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spread_models(monkeypatch)
    monkeypatch.setattr(grid, "TARGET_CHUNK_BYTES", 4 << 10)
    monkeypatch.setattr(grid, "TARGET_SHARD_BYTES", 16 << 10)


@pytest.fixture
def quick() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize(
    "codec", [{"rms_step": RMS_STEP}, {"step": 0.0625}, {"rms_step": RMS_STEP, "relative": True}]
)
@pytest.mark.parametrize("seed", range(2))
def test_any_ranks_load_what_others_saved(quick: str, seed: int, codec: Any, policy: str) -> None:
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"codec": {"id": "cnr_lattice", **codec}, "policy": policy}
    found, counts = {}, {}
    for world in (1, 4):
        random = np.random.default_rng(seed)
        cuts = {
            kind.name: draw_cut(np.random.default_rng(seed), kind.rows, kind.dim, world) for kind in KINDS
        }
        url = str(Path(quick) / str(world))
        with ThreadJob(url, world, KINDS, cuts, **options) as job:
            truth = job.new_truth(random)
            for values in truth.values():
                values[5::97], values[6::97], values[7::97] = np.nan, 1e-6, 0
            job.fill(truth)
            job.save(1)
            for step in (2, 3):
                for kind in KINDS:
                    ids = np.flatnonzero(random.random(kind.rows) < 0.05)
                    truth = changed(truth, kind.name, ids, random, job)
                    job.change(kind.name, ids, truth, np.random.default_rng(seed))
                job.save(step)
        cuts = {kind.name: draw_cut(np.random.default_rng(9), kind.rows, kind.dim, 3) for kind in KINDS}
        with ThreadJob(url, 3, KINDS, cuts, **options) as job:
            job.load()
            found[world] = job.found()
        records = [open_record(url, each.id)[1] for each in cnr_store.versions(url)]
        counts[world] = [{path: each.counts for path, each in record.arrays.items()} for record in records]
        for key, values in truth.items():
            finite = np.isfinite(values)
            rms = np.sqrt(np.mean(values[finite].astype(np.float64) ** 2))
            step = codec.get("step", 1.2 * RMS_STEP * rms)  # deltas keep the step of the whole
            assert np.abs(found[world][key][finite] - values[finite]).max() <= step / 2
    for key, values in found[1].items():
        np.testing.assert_array_equal(found[4][key], values)
    assert counts[1] == counts[4]
    assert all(all(each.values()) for path, each in counts[1][0].items() if path.startswith("tables/"))


@pytest.mark.slow
def test_ranks_hold_the_codes_of_their_rows(quick: str) -> None:
    """Bands that end within chunks, one of them on two ranks: of its rows each knows those that it encoded itself."""
    codec = {"id": "cnr_lattice", "step": 0.1875, "relative": True}
    found, counts = {}, {}
    for world in (1, 4):
        random = np.random.default_rng(5)
        edges = [0, 1001, 1777] if world == 4 else [0]
        cuts = {kind.name: _bands([*edges, kind.rows], kind.dim, world) for kind in KINDS}
        url = str(Path(quick) / str(world))
        with ThreadJob(url, world, KINDS, cuts, codec=codec, policy="consecutive") as job:
            truth = job.new_truth(random)
            job.fill(truth)
            job.save(1)
            for step in range(2, 6):
                for kind in KINDS:
                    ids = np.flatnonzero(random.random(kind.rows) < 0.05)
                    truth = changed(truth, kind.name, ids, random, job)
                    job.change(kind.name, ids, truth, np.random.default_rng(0))
                job.save(step)
        counts[world] = [count_relative(url, each.id) for each in cnr_store.versions(url)]
        cuts = {kind.name: _bands([0, 2000, kind.rows], kind.dim, 2) for kind in KINDS}
        with ThreadJob(url, 2, KINDS, cuts, codec=codec, policy="consecutive") as job:
            job.load()
            found[world] = job.found()
        assert not cnr_store.verify(url, deep=True).problems
    for key, values in found[1].items():
        np.testing.assert_array_equal(found[4][key], values)
    assert counts[1][0] == counts[4][0] == 0
    assert all(0 < many <= one for one, many in zip(counts[1][1:], counts[4][1:], strict=True))


@pytest.mark.slow
def test_one_rank_with_other_codes_writes_its_rows_absolute(
    quick: str, caplog: pytest.LogCaptureFixture
) -> None:
    codec: dict[str, Any] = {"id": "cnr_lattice", "step": 0.1875, "relative": True}
    kind, random = KINDS[0], np.random.default_rng(5)
    cuts, url = {kind.name: _bands([0, 1001, 1777, kind.rows], kind.dim, 3)}, str(Path(quick) / "store")
    counts = []
    with ThreadJob(url, 3, [kind], cuts, codec=codec, policy="consecutive") as job:
        truth = job.new_truth(random)
        job.fill(truth)
        for step in range(1, 6):
            job.save(step)
            counts.append(count_relative(url, cnr_store.versions(url)[-1].id))
            ids = np.flatnonzero(random.random(kind.rows) < 0.2)
            truth = changed(truth, kind.name, ids, random, job)
            job.change(kind.name, ids, truth, np.random.default_rng(0))
            if step == 4:
                (known,) = job.checkpointers[1]._saves.planner._code_cache._known.values()
                assert known.codes is not None
                known.codes[:, 1] += 1
        found = job.found()
    assert 0 < counts[4] < counts[3]
    assert sum("has other codes" in each.getMessage() for each in caplog.records) == 1
    assert not cnr_store.verify(url, deep=True).problems
    stored = cnr_store.state_dict(url, 5)
    (name,) = (name for name, values in stored.items() if values.shape == (kind.rows, kind.dim))
    unchanged = np.setdiff1d(np.arange(kind.rows), ids)
    assert np.abs(stored[name] - found[kind.name, ""])[unchanged].max() <= codec["step"] / 2


@pytest.mark.parametrize("columns", [(0,), (0, 4)])
def test_rows_that_several_ranks_have_count_once(quick: str, columns: tuple[int, ...]) -> None:
    """Else large rows on three ranks would make the step larger than what one process finds."""
    kind = KINDS[0]
    spans = [(left, right - left) for left, right in pairwise((*columns, kind.dim))]
    bands = [(0, 1000, (0,)), (1000, kind.rows - 1000, (1, 2, 3))]
    pieces = [
        Piece(first, rows, *span, rank) for first, rows, ranks in bands for span in spans for rank in ranks
    ]
    cut, steps = Cut(columns, tuple(pieces)), {}
    for world in (1, 4):
        url = str(Path(quick) / str(world))
        cuts = {kind.name: cut if world == 4 else cut.alone(kind.rows, kind.dim)}
        codec = {"id": "cnr_lattice", "rms_step": RMS_STEP}
        with ThreadJob(url, world, [kind], cuts, codec=codec) as job:
            truth = job.new_truth(np.random.default_rng(1))
            truth[kind.name, ""][1000:] *= 8
            job.fill(truth)
            job.save(1)
        (version,) = cnr_store.versions(url)
        arrays = Catalog(open_backend(url)).record(version.id).arrays
        (entry,) = (each for each in arrays.values() if each.shape == (kind.rows, kind.dim))
        steps[world] = (entry.codec or {})["step"]
    assert steps[1] == steps[4]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [(0,), (0, 4)])
def test_ranks_find_a_step_anew_when_one_process_does(quick: str, columns: tuple[int, ...]) -> None:
    """Where zeros are trained, rows turn to NaN, and where all grow; also where ranks have columns of a table."""
    codec, found = {"id": "cnr_lattice", "rms_step": RMS_STEP, "relative": True}, {}
    for world in (1, 4):
        random, url = np.random.default_rng(3), str(Path(quick) / str(world))
        cuts = {kind.name: _grid([0, 1001, kind.rows], columns, kind.dim, world) for kind in KINDS}
        with ThreadJob(url, world, KINDS, cuts, codec=codec, policy="consecutive") as job:
            truth = job.new_truth(random)
            truth["A", ""][:] = 0
            job.fill(truth)
            for step in range(1, 6):
                job.save(step)
                for kind in KINDS:
                    ids = np.sort(random.permutation(kind.rows)[:300])
                    truth = changed(truth, kind.name, ids, random, job)
                    if kind.name == "B" and step > 1:
                        truth["B", ""][ids] = np.nan
                    if kind.name == "C" and step == 1:
                        ids, truth["C", ""][:] = np.arange(kind.rows), 3 * truth["C", ""]
                    job.change(kind.name, ids, truth, np.random.default_rng(0))
        records = [open_record(url, each.id)[1] for each in cnr_store.versions(url)]
        found[world] = [
            {path: (each.kind, each.codec["step"]) for path, each in record.arrays.items() if each.codec}
            for record in records
        ]
        assert not cnr_store.verify(url, deep=True).problems
    assert found[1] == found[4]
    whole = [[path for path, (kind, _) in each.items() if kind == "whole"] for each in found[1][1:]]
    assert [len(each) for each in whole] == [0, 2, 0, 1]


def _grid(edges: list[int], columns: tuple[int, ...], dim: int, world: int) -> Cut:
    """Bands of rows, each in these columns, of one rank each."""
    if world == 1:
        edges, columns = [0, edges[-1]], (0,)
    spans = [(left, right - left) for left, right in pairwise((*columns, dim))]
    boxes = [(first, end - first, *span) for first, end in pairwise(edges) for span in spans]
    return Cut(columns, tuple(Piece(*box, rank) for rank, box in enumerate(boxes)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["consecutive", at_night("auto")])
def test_ranks_spend_a_budget_as_one_process_does(quick: str, policy: str) -> None:
    """Each rank samples the rows that it has, and their scales are other ones."""
    found = {}
    for world in (1, 4):
        random, url = np.random.default_rng(7), str(Path(quick) / str(world))
        edges = [0, 1001, 1777] if world == 4 else [0]
        cuts = {kind.name: _bands([*edges, kind.rows], kind.dim, world) for kind in KINDS}
        with ThreadJob(url, world, KINDS, cuts, budget=0.01, policy=policy) as job:
            truth = job.new_truth(random)
            for (_, slot), values in truth.items():
                if not slot:
                    values[1001:1777] *= 1.5
            job.fill(truth)
            job.save(1)
            for step in range(2, 10):
                if step > 2:
                    job.load()
                for kind in KINDS:
                    ids = np.flatnonzero(random.random(kind.rows) < 0.02)
                    truth = changed(truth, kind.name, ids, random, job)
                    job.change(kind.name, ids, truth, np.random.default_rng(0))
                job.save(step)
                budgets = job.each(lambda rank: job.checkpointers[rank]._options.codecs.budget)
                assert all(each == budgets[0] for each in budgets), budgets
        records = [Catalog(open_backend(url)).record(each.id) for each in cnr_store.versions(url)]
        found[world] = [(each.spent, each.kind, each.policy["budget"]) for each in records]
        assert not cnr_store.verify(url, deep=True).problems
    assert found[1] == found[4]
    spent, kinds, _ = zip(*found[1], strict=True)
    assert spent[-1] > 0.005
    assert kinds[-1] == "delta"
    assert kinds.count("baseline") == 2


def _bands(edges: list[int], dim: int, world: int) -> Cut:
    pieces = [Piece(begin, end - begin, 0, dim, rank) for rank, (begin, end) in enumerate(pairwise(edges))]
    last = pieces[-1]
    pieces += [last._replace(rank=rank) for rank in range(len(pieces), world)]
    return Cut((0,), tuple(pieces))
