"""What each rank reads and writes: its own part, and little more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cnr_backends import Backend, index_nbytes, open_backend, parse_index
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.link import Link
from cnr_store.format import grid
from cnr_store.ranks.placement import Piece
from cnr_store.ranks.protocol import Team
from cnr_store.writing import writer
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import stage
from tests.test_store.ranks.support.spread_model import Cut, Random, TableKind, draw_cut
from tests.test_store.ranks.support.thread_job import ThreadJob, changed, find_spread_models
from tests.test_store.support.places import quick_folder

ROWS, DIM = 30_000, 16
KINDS = [
    TableKind(name, ROWS + 77 * place, DIM, torch.float32, {"momentum1": True})
    for place, name in enumerate("ABCD")
]
MOST_READ = 1.02
"""Times the bytes of the chunks that meet a rank's rows, and of their indexes."""
DOCUMENTS_BYTES = 24 << 10
"""Of the records, manifests and states of three versions, which say as much of a table of any size."""
MOST_WRITTEN = 1.5
"""Times the mean of all ranks."""
OPTIONS: dict[str, Any] = {"bits": 32, "policy": "consecutive"}


@pytest.fixture(autouse=True)
def shards_of_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spread_models(monkeypatch)
    monkeypatch.setattr(grid, "TARGET_CHUNK_BYTES", 8 << 10)
    monkeypatch.setattr(grid, "TARGET_SHARD_BYTES", 64 << 10)


@pytest.fixture
def quick() -> Iterator[str]:
    with quick_folder() as folder:
        yield folder


def draw_cuts(random: Random, world: int) -> dict[str, Cut]:
    return {kind.name: draw_cut(random, kind.rows, kind.dim, world) for kind in KINDS}


def chunks_met(backend: Backend, link: Link, first_row: int, end_row: int) -> Iterator[int]:
    """The bytes of each chunk that holds any of these rows, and of the indexes of their shards."""
    each = link.grid.chunk_rows
    for shard, part in link.parts.items():
        begin = shard * link.grid.shard_rows
        if begin >= end_row or begin + link.grid.shard_rows <= first_row:
            continue
        count = link.grid.chunks_per_shard
        nbytes = index_nbytes(count)
        index = parse_index(backend.get_suffix(link.shards.key(shard), nbytes), count, part.nbytes)
        yield nbytes
        firsts = begin + np.arange(count) * each
        meet = index.present & (firsts < end_row) & (firsts + each > first_row)
        yield int(index.lengths[meet].sum())


def least_bytes(url: str, job: ThreadJob, rank: int) -> int:
    """What a rank has to read for its rows of the newest version."""
    backend = open_backend(url)
    catalog = Catalog(backend)
    record = catalog.find()
    nbytes = 0
    for (table, slot), (_, pieces) in job.models[rank].arrays().items():
        if pieces:
            reader = ArrayReader(catalog, record, f"tables/ebc.embedding_bags.{table}/{slot or 'weight'}")
            first, rows = pieces[0].first_row, len(pieces[0].tensor)
            for link in reader.links:
                nbytes += sum(chunks_met(backend, link, first, first + rows))
    return nbytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_reads_the_chunks_that_meet_its_rows(quick: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    with ThreadJob(quick, 3, KINDS, draw_cuts(random, 3), **OPTIONS) as job:
        truth = job.new_truth(random)
        job.fill(truth)
        job.save(1)
        for step in (2, 3):
            for kind in KINDS:
                ids = np.flatnonzero(random.random(kind.rows) < 0.03)
                truth = changed(truth, kind.name, ids, random, job)
                job.change(kind.name, ids, truth, random)
            job.save(step)
    with ThreadJob(quick, 4, KINDS, draw_cuts(random, 4), **OPTIONS) as job:
        before = [checkpointer._loader.backend.bytes_read for checkpointer in job.checkpointers]
        job.load(strict="ignore")  # numbers of other column shards are left out
        for rank, checkpointer in enumerate(job.checkpointers):
            read = checkpointer._loader.backend.bytes_read - before[rank]
            assert read <= DOCUMENTS_BYTES + MOST_READ * least_bytes(quick, job, rank)


def even(kind: TableKind, world: int) -> list[Piece]:
    each = -(-kind.rows // world)
    return [
        Piece(rank * each, min(each, kind.rows - rank * each), 0, kind.dim, rank) for rank in range(world)
    ]


CUTS: dict[str, Callable[[TableKind, int], Cut]] = {
    "row-wise": lambda kind, _: Cut((0,), tuple(even(kind, 4))),
    "table-wise": lambda kind, place: Cut((0,), (Piece(0, kind.rows, 0, DIM, place),)),
    "column-wise": lambda kind, place: Cut(
        (0, 8), tuple(Piece(0, kind.rows, 8 * half, 8, (place + half) % 4) for half in range(2))
    ),
    "replicated": lambda kind, _: Cut((0,), tuple(Piece(0, kind.rows, 0, DIM, rank) for rank in range(4))),
    "grid": lambda kind, place: Cut(
        (0, 4),
        tuple(
            Piece(first, rows, column, columns, 2 * band + half)
            for band, (first, rows) in enumerate(((0, 11_111), (11_111, kind.rows - 11_111)))
            for half, (column, columns) in enumerate(((0, 4), (4, 12)))
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("share", [1.0, 0.02], ids=["all rows", "few rows"])
@pytest.mark.parametrize("name", CUTS)
def test_no_rank_writes_far_more_than_the_mean(
    quick: str, monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    random = np.random.default_rng(0)
    written: Counter[int] = Counter()

    def count(backend: Any, version: str, plan: Plan, transfer: Any, peers: Team, rows_done: Any) -> Any:
        staged = stage(backend, version, plan, transfer, peers, rows_done)
        written[peers.rank] += staged.nbytes
        return staged

    monkeypatch.setattr(writer, "stage", count)
    cuts = {kind.name: CUTS[name](kind, place) for place, kind in enumerate(KINDS)}
    with ThreadJob(quick, 4, KINDS, cuts, **OPTIONS) as job:
        truth = job.new_truth(random)
        job.fill(truth)
        job.save(1)
        if share < 1:
            written.clear()
            for kind in KINDS:
                job.change(kind.name, np.flatnonzero(random.random(kind.rows) < share), truth, random)
            job.save(2)
    assert 4 * max(written.values()) <= MOST_WRITTEN * sum(written.values())


@pytest.mark.slow
def test_rows_travel_encoded_where_ranks_share_a_chunk(quick: str) -> None:
    random = np.random.default_rng(0)
    cuts = {kind.name: CUTS["row-wise"](kind, 0) for kind in KINDS}
    with ThreadJob(quick, 4, KINDS, cuts, **{**OPTIONS, "bits": 4}) as job:
        truth = job.new_truth(random)
        job.fill(truth)
        job.save(1)
        before = [sum(group.sent_bytes) for group in job.groups]
        rows = 0
        for kind in KINDS:
            ids = np.flatnonzero(random.random(kind.rows) < 0.01)
            rows += len(ids)
            job.change(kind.name, ids, truth, random)
        job.save(2)
        sent = [
            sum(group.sent_bytes) - bytes_before
            for group, bytes_before in zip(job.groups, before, strict=True)
        ]
    raw_bytes = rows * DIM * 4
    assert 0 < sum(sent) < raw_bytes / 3
