"""Tables on a lattice that several ranks save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store.format import grid
from tests.test_store.ranks.support.spread_model import TableKind, draw_cut
from tests.test_store.ranks.support.thread_job import ThreadJob, changed, find_spread_models
from tests.test_store.support.places import quick_folder
from tests.test_store.support.relative_rows import count_relative

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


@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
@pytest.mark.parametrize(
    "codec", [{"rms_step": RMS_STEP}, {"step": 0.0625}, {"rms_step": RMS_STEP, "relative": True}]
)
@pytest.mark.parametrize("seed", range(2))
def test_any_ranks_load_what_others_saved(quick: str, seed: int, codec: Any, policy: str) -> None:
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"codec": {"id": "cnr_lattice", **codec}, "policy": policy}
    found = {}
    for world in (1, 4):
        random = np.random.default_rng(seed)
        cuts = {
            kind.name: draw_cut(np.random.default_rng(seed), kind.rows, kind.dim, world) for kind in KINDS
        }
        url = str(Path(quick) / str(world))
        with ThreadJob(url, world, KINDS, cuts, **options) as job:
            truth = job.new_truth(random)
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
        for key, values in truth.items():
            finite = np.isfinite(values)
            rms = np.sqrt(np.mean(values[finite].astype(np.float64) ** 2))
            step = codec.get("step", 1.2 * RMS_STEP * rms)  # deltas keep the step of the whole
            assert np.abs(found[world][key][finite] - values[finite]).max() <= step / 2
    if codec.get("relative") and policy == "consecutive":
        for world in (1, 4):
            url = str(Path(quick) / str(world))
            assert count_relative(url, cnr_store.versions(url)[-1].id) > 100
    for key, values in found[1].items():
        np.testing.assert_array_equal(found[4][key], values)
