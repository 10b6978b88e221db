"""Random histories of saves and loads on many ranks, beside the same on one: what is stored and loaded is the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store import ModelMismatchError, SaveError
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains import array_reader
from cnr_store.format import grid
from cnr_store.format.record import ArrayEntry
from cnr_store.ranks.protocol import Team
from cnr_store.training.saving import codec_choice, tally
from cnr_store.writing import exchange, stage, writer
from cnr_store.writing.plan import Plan
from tests.nightly import FACTOR, at_night
from tests.test_store.ranks.support.spread_model import Array, Random, TableKind, draw_cut
from tests.test_store.ranks.support.thread_job import ThreadJob, Truth, changed, find_spread_models
from tests.test_store.stateful.conftest import GRID_LIMITS_BYTES
from tests.test_store.support.places import quick_folder
from tests.test_store.support.same_arrays import assert_same_arrays, differing

pytestmark = pytest.mark.slow

PLAIN: tuple[dict[str, Any], ...] = (
    {"bits": 32},
    {"bits": 4},
    {"bits": 8},
    {"bits": 2, "state_bits": 8},
    {"bits": 3, "state_bits": 4},
    {},
    {"codec": {"id": "cnr_kmeans", "bits": 2}},
    {"codec": {"id": "cnr_kmeans", "bits": 3, "group": "block", "block_rows": 5}},
)
FOLLOWED: tuple[dict[str, Any], ...] = (
    {"codec": {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd"}]}},
    {"codec": {"id": "cnr_rows", "then": [{"id": "blosc"}]}},
)
RELATIVE: dict[str, Any] = {"codec": {"id": "cnr_lattice", "rms_step": 0.1, "relative": True}}
"""What rows take depends on which rank wrote them before."""
SLOTS: tuple[dict[str, bool], ...] = (
    {},
    {"momentum1": True},
    {"momentum1": True},
    {"momentum1": False},
    {"momentum1": False, "exp_avg_sq": True},
)
POLICIES = ("full", "one-shot", "consecutive", "intermittent", "auto")
BLOCK_ROWS = 64
HISTORIES = 10 if FACTOR == 1 else 20 * FACTOR
LONG = {4, 9}
"""Seeds of histories that take long."""
SEEDS = [at_night(seed) if seed in LONG else seed for seed in range(HISTORIES)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find models without TorchRec, and cut small tables as large ones are: chunks that ranks share, many rounds."""
    find_spread_models(monkeypatch)
    for name, nbytes in GRID_LIMITS_BYTES.items():
        monkeypatch.setattr(grid, name, nbytes)
    monkeypatch.setattr(grid, "BLOCK_ROWS", BLOCK_ROWS)
    monkeypatch.setattr(tally, "BLOCK_ROWS", BLOCK_ROWS)
    monkeypatch.setattr(array_reader, "REGION_BYTES", 2048)
    monkeypatch.setattr(exchange, "ROUND_BYTES", 1024)
    monkeypatch.setattr(stage, "_ENCODED_TOGETHER_BYTES", 512)
    monkeypatch.setattr(codec_choice, "LOSSLESS_BELOW_BYTES", 512)


def draw_kinds(random: Random) -> list[TableKind]:
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
    return [
        TableKind(
            name,
            int(random.choice([1, 2, 3, 7, 16, 41, 100, 300])),
            int(random.choice([1, 4, 5, 8, 16, 70])),
            dtypes[random.integers(len(dtypes))],
            SLOTS[random.integers(len(SLOTS))],
        )
        for name in "ABC"[: random.integers(1, 4)]
    ]


def draw_ids(random: Random, rows: int) -> Array:
    """Rows to change: none, a few, a range, about half, or all."""
    kind = random.integers(6)
    if kind == 0:
        return np.arange(0)
    if kind == 1:
        return np.arange(rows)
    if kind == 2:
        return np.flatnonzero(random.random(rows) < 0.5)
    if kind == 3:
        begin = int(random.integers(rows))
        return np.arange(begin, min(rows, begin + int(random.integers(1, 70))))
    return np.unique(random.integers(rows, size=random.integers(1, 6)))


def _size(entry: ArrayEntry, nbytes: int) -> int | None:
    """Bytes, if they depend on the rows alone: what compressors make of a seal, which has the version's id, doesn't."""
    codec = entry.codec or {}
    return None if "then" in codec or codec.get("relative") else nbytes


def facts(url: str) -> list[dict[str, Any]]:
    """What is stored of each version, oldest first: decisions, documents, and the names and sizes of shards."""
    catalog = Catalog(open_backend(url))
    records = catalog.oldest_first()
    place: dict[str | None, int | None] = {record.id: number for number, record in enumerate(records)}
    place[None] = None
    found = []
    for record in records:
        manifest = catalog.manifest(record)
        rows = {path: entry for path, entry in record.arrays.items() if entry.kind != "dense"}
        found.append(
            {
                "step": record.step,
                "previous": place[record.previous],
                "needs": [place[version] for version in record.needs],
                "restores": record.restores,
                "arrays": {
                    path: {**asdict(entry), "base": place[entry.base], "nbytes": _size(entry, entry.nbytes)}
                    for path, entry in record.arrays.items()
                },
                "nodes": dict(record.nodes),
                "decision": {name: record.policy.get(name) for name in ("full", "since", "whole")},
                "shards": {
                    path: {index: _size(entry, part.nbytes) for index, part in manifest.parts(path).items()}
                    for path, entry in rows.items()
                },
            }
        )
    return found


def labelled(truth: Truth) -> dict[str, Array]:
    return {f"{table}/{slot}": values for (table, slot), values in truth.items()}


def same(job: ThreadJob, alone: ThreadJob) -> Truth:
    found = job.found()
    assert_same_arrays(labelled(found), labelled(alone.found()))
    return found


def train(job: ThreadJob, alone: ThreadJob, random: Random, truth: Truth, step: int) -> int:
    """Some saves of both, each after changes."""
    for _ in range(random.integers(1, 5)):
        for kind in job.kinds.values():
            ids = draw_ids(random, kind.rows)
            truth = changed(truth, kind.name, ids, random, job)
            marks = random.spawn(1)[0]
            for each in (job, alone):
                each.change(kind.name, ids, truth, marks)
        for model in (*job.models, *alone.models):
            with torch.no_grad():
                model.over.weight.fill_(step)
        step += 1
        full, wait = random.random() < 0.1, random.random() < 0.7
        for each in (job, alone):
            each.save(step, full, wait)
    return step


@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_store_and_load_what_one_process_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = draw_kinds(random)
    policy = POLICIES[random.integers(len(POLICIES))]
    # What compressors make of the random id of a version would tip the scales, too.
    codecs = PLAIN if policy in ("intermittent", "auto") else (*PLAIN, *FOLLOWED)
    if seed % 4 == 3:
        codecs, policy = (RELATIVE,), ("consecutive", "one-shot")[seed // 4 % 2]
    options = {
        "policy": policy,
        "limits": cnr_store.Limits(snapshot_bytes=int(random.choice([1 << 30, 1 << 30, 3000, 0]))),
        "retention": cnr_store.Retention(max_chain=None),
        **codecs[random.integers(len(codecs))],
    }
    step = 0
    with quick_folder() as url, quick_folder() as other:
        for life in range(4):
            world = int(random.integers(1, 5))
            cuts = {kind.name: draw_cut(random, kind.rows, kind.dim, world) for kind in kinds}
            whole = {kind.name: cuts[kind.name].alone(kind.rows, kind.dim) for kind in kinds}
            with (
                ThreadJob(url, world, kinds, cuts, **options) as job,
                ThreadJob(other, 1, kinds, whole, **options) as alone,
            ):
                truth = job.new_truth(random)
                for each in (job, alone):
                    each.fill(truth)
                if life:
                    missing = [each.load(strict="ignore")[0].missing for each in (job, alone)]
                    assert missing[0] == missing[1]
                    truth = same(job, alone)
                step = train(job, alone, random, truth, step)
            for found, expected in zip(facts(url), facts(other), strict=True):
                different = {
                    name: (found[name], expected[name]) for name in found if found[name] != expected[name]
                }
                assert not different, different


@dataclass
class Saved:
    """What a version must hold, and the column shards of its tables."""

    truth: Truth
    columns: dict[str, tuple[int, ...]]


class LosslessHistory:
    """Saves that must come back bit for bit, on whatever ranks: some fail on one rank, are skipped, or go back."""

    def __init__(self, random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random
        self.kinds = draw_kinds(random)
        self.saved: dict[int, Saved] = {}
        self.step = 0
        self.failing: tuple[int, int] | None = None
        self.keeps_all = random.random() < 0.6

        def stage_or_fail(
            backend: Any, version: str, plan: Plan, transfer: Any, peers: Team, rows_done: Any
        ) -> Any:
            staged = stage.stage(backend, version, plan, transfer, peers, rows_done)
            if self.failing == (plan.step, peers.rank):
                raise OSError("the disk of this rank is full")
            return staged

        monkeypatch.setattr(writer, "stage", stage_or_fail)

    def life(self, url: str) -> None:
        """A job that loads what there is, trains and ends."""
        random = self.random
        world = int(random.integers(1, 5))
        cuts = {kind.name: draw_cut(random, kind.rows, kind.dim, world) for kind in self.kinds}
        options: dict[str, Any] = {
            "policy": POLICIES[random.integers(len(POLICIES))],
            "bits": 32,
            "limits": cnr_store.Limits(snapshot_bytes=int(random.choice([1 << 30, 3000, 0]))),
            "retention": cnr_store.Retention(max_chain=[None, 1, 2][random.integers(3)]),
            "keep_last": None if self.keeps_all else int(random.integers(1, 4)),
        }
        with ThreadJob(url, world, self.kinds, cuts, **options) as job:
            truth = job.new_truth(random)
            job.fill(truth)
            if self.saved:
                truth = self.load(job, truth)
            for _ in range(random.integers(1, 6)):
                truth = self.train(job, truth)

    def load(self, job: ThreadJob, truth: Truth) -> Truth:
        random, latest = self.random, max(self.saved)
        step = int(random.choice([*self.saved])) if self.keeps_all and random.random() < 0.3 else latest
        saved = self.saved[step]
        version = step if step != latest else "latest"
        left = {key for key in truth if key[1] and self.cannot_tell(job, saved, key[0])}
        if left:
            refused = job.attempt(lambda rank: job.checkpointers[rank].load(version))
            assert all(isinstance(each, ModelMismatchError) for each in refused), refused
            assert len({*map(str, refused)}) == 1
            assert_same_arrays(labelled(job.found()), labelled(truth))
            restored = job.load(version, strict="ignore")
            told = {f"ebc.embedding_bags.{table}/{slot}" for table, slot in left}
            assert all({*each.missing} == told for each in restored)
        else:
            job.load(version)
        found = job.found()
        assert_same_arrays(labelled(found), labelled({**saved.truth, **{key: truth[key] for key in left}}))
        return self.load_part(job, step, found, truth) if random.random() < 0.3 and not left else found

    def cannot_tell(self, job: ThreadJob, saved: Saved, table: str) -> bool:
        """Whether numbers a row of other column shards are among what is stored for a table."""
        return any(job.kinds[table].slots.values()) and job.cuts[table].columns != saved.columns[table]

    def load_part(self, job: ThreadJob, step: int, found: Truth, truth: Truth) -> Truth:
        """Load a table or some rows of it again, when all rows are others."""
        random = self.random
        kind = self.kinds[random.integers(len(self.kinds))]
        ids = None if random.random() < 0.5 else draw_ids(random, kind.rows)
        job.fill(truth)
        job.load(step, tables=f"*.{kind.name}", **({} if ids is None else {"rows": {f"*.{kind.name}": ids}}))
        expected = dict(truth)
        for key, values in found.items():
            if key[0] == kind.name:
                chosen = slice(None) if ids is None else ids
                expected[key] = truth[key].copy()
                expected[key][chosen] = values[chosen]
        again = job.found()
        for key, values in again.items():
            assert differing(values, expected[key]) is None, key
        return again

    def train(self, job: ThreadJob, truth: Truth) -> Truth:
        random = self.random
        for kind in job.kinds.values():
            ids = draw_ids(random, kind.rows)
            truth = changed(truth, kind.name, ids, random, job)
            job.change(kind.name, ids, truth, random)
        self.step += 1
        if random.random() < 0.25:
            self.failing = self.step, int(random.integers(job.world))
            found = job.attempt(lambda rank: job.checkpointers[rank].save(self.step).result())
            assert all(isinstance(each, SaveError) for each in found), found
            return truth
        job.save(self.step, full=random.random() < 0.1, wait=random.random() < 0.6)
        self.saved[self.step] = Saved(truth, {name: cut.columns for name, cut in job.cuts.items()})
        return truth


@pytest.mark.some_by_day(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_load_what_ranks_saved(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    history = LosslessHistory(np.random.default_rng(seed), monkeypatch)
    with quick_folder() as url:
        for _ in range(5):
            history.life(url)
