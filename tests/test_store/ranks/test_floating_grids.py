"""Tables on a floating grid that several ranks save: the codes do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_store.format import grid
from tests.test_codecs.references.floating import codes_of, floating_values
from tests.test_store.chains.test_relative import count_relative
from tests.test_store.ranks.support.spread_model import TableKind, draw_cut
from tests.test_store.ranks.support.thread_job import ThreadJob, changed, find_spread_models
from tests.test_store.support.places import quick_folder

KINDS = [TableKind(name, 3000 + 77 * place, 16, torch.float32, {}) for place, name in enumerate("ABC")]
OPTIONS: dict[str, Any] = {"codec": {"id": "cnr_floating", "mantissa_bits": 3}, "policy": "consecutive"}


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
@pytest.mark.parametrize(("world", "relative"), [(1, False), (4, False), (4, True)])
def test_any_ranks_load_the_codes_of_what_others_saved(quick: str, world: int, relative: bool) -> None:
    options = OPTIONS | {"codec": OPTIONS["codec"] | {"relative": relative}}
    random, url = np.random.default_rng(world), str(Path(quick) / "store")
    cuts = {kind.name: draw_cut(random, kind.rows, kind.dim, world) for kind in KINDS}
    if relative:  # tables whose columns are apart are not
        cuts = {kind.name: draw_cut(np.random.default_rng(9), kind.rows, kind.dim, world) for kind in KINDS}
        assert {cut.columns for cut in cuts.values()} == {(0,)}
    with ThreadJob(url, world, KINDS, cuts, **options) as job:
        truth = job.new_truth(random)
        job.fill(truth)
        job.save(1)
        for step in (2, 3, 4) if relative else (2,):
            for kind in KINDS:
                ids = np.flatnonzero(random.random(kind.rows) < 0.05)
                before, truth = truth, changed(truth, kind.name, ids, random, job)
                if relative:
                    truth[kind.name, ""][ids] = 1.05 * before[kind.name, ""][ids]
                job.change(kind.name, ids, truth, np.random.default_rng(2))
            job.save(step)
    assert (sum(count_relative(url, each.id) for each in cnr_store.versions(url)) > 0) == relative
    cuts = {kind.name: draw_cut(np.random.default_rng(9), kind.rows, kind.dim, 3) for kind in KINDS}
    with ThreadJob(url, 3, KINDS, cuts, **OPTIONS) as job:
        job.load()
        found = job.found()
    for key, values in truth.items():
        codes, raw = codes_of(values, 3, "float32")
        expected = np.where(raw[:, None], values, floating_values(codes, 3, "float32"))
        np.testing.assert_array_equal(found[key], expected)
