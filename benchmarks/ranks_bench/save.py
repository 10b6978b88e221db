"""One save of a model by all ranks: the steps of `Coordinator`, `Planner` and `Writer`, on tables without a model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from mmap import mmap
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.ranks_bench.counting import CountedBackend, CountedGroup, of_rank
from benchmarks.ranks_bench.rows import Model, RowsMaker, TableShape
from cnr_store.format.grid import Counts, block_count, count_blocks
from cnr_store.ranks.group import Group
from cnr_store.ranks.placement import Placement
from cnr_store.ranks.protocol import Team
from cnr_store.training.distributed.pieces import LocalPiece
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.saving.agreement import together
from cnr_store.training.saving.coordinator import merge_said
from cnr_store.training.saving.tally import Tally
from cnr_store.writing.plan import Held, Plan, RowsWrite
from cnr_store.writing.writer import Writer


@contextmanager
def fixed_names() -> Iterator[None]:
    """Ids and times that take the same bytes in each run."""
    random = secrets.token_hex
    with (
        # But names of temporary files, which have 8 bytes: parallel puts must not share one.
        patch.object(
            secrets, "token_hex", lambda nbytes=16: random(nbytes) if nbytes == 8 else "a" * (2 * nbytes)
        ),
        patch.object(time, "time", lambda: 1.75e9),
        patch.object(time, "perf_counter", lambda: 0.0),
    ):
        yield


@dataclass(frozen=True)
class _Box:
    """What `Tally` asks of a table."""

    first_row: int
    local_rows: int


def begin(backend: CountedBackend) -> tuple[Writer, str]:
    """A store with a version, and its writer."""
    writer = Writer(backend, 1)
    plan = Plan(step=0, previous=None, rows=[], dense=[], state={}, policy={})
    return writer, writer.write(plan).id


def save(group: Group, backend: CountedBackend, model: Model, rows: RowsMaker) -> dict[str, Any]:
    """Save on one rank. What was counted."""
    writer, previous = begin(backend) if group.rank == 0 else (None, None)
    previous = group.decide("begin", {"previous": previous}, lambda said: said[0])["previous"]
    writer = writer or Writer(backend, 1)
    backend.begin()
    counted = CountedGroup(group)
    layout = Tally(counted, ())
    pieces = [table.piece(group.rank, group.world) for table in model.tables]

    def say(_: bool) -> dict[str, Any]:
        return {
            "step": 1,
            "overlap": "wait",
            "skips": None,
            "dense": {},
            "state": ["0" * 64],
            "number": 0,
            "folded": None,
            "moved": layout.say(_arrays(model, group)),
            "unsafe": {},
            "dense_bytes": 0,
            "settings": {},
            "previous": previous,
            "lineage": "",
            "replicas": None,
            "restores": 0,
            "spent": 0.0,
            "moments": {},
            "refits": {},
            "off_grid": {},
            "decays": {},
        }

    _, agreed = together(counted, "save of step 1", lambda: True, say, lambda: 0, partial(merge_said, "save"))
    if agreed["moved"]:
        layout.settle()
    ids = [
        _changed(model, table, first, count)
        for table, (first, count, *_) in zip(model.tables, pieces, strict=True)
    ]
    counts = _counted(model, counted, ids)
    writes = [
        write
        for number, table in enumerate(model.tables)
        for write in _writes(model, table, group, ids[number], counts[number], layout, rows, previous)
    ]
    plan = Plan(
        step=1,
        previous=previous,
        rows=writes,
        dense=[],
        state={},
        policy={},
        needs=(previous,) if model.every else (),
    )
    record = writer.write(plan, team=Team(counted, 1))
    found = of_rank(counted, backend)
    if group.rank == 0:
        found["record_bytes"] = record.record_bytes
        voted = next(at for at, (_, key) in enumerate(backend.log) if key.endswith("/manifest"))
        found["commit_requests"] = [list(each) for each in backend.log[voted:]]
    return found


def _arrays(model: Model, group: Group) -> list[RowArray]:
    found = []
    for table in model.tables:
        first, count, *_ = table.piece(group.rank, group.world)
        for path, columns in table.paths() if count else ():
            shape = (table.rows, columns) if columns > 1 else (table.rows,)
            part = LocalPiece(0, 0, torch.empty(shape, device="meta"))
            box = cast(Table, _Box(first, count))
            found.append(RowArray(box, path, shape, "float32", (part,)))
    return found


@cache
def _every(rows: int, every: int) -> Any:
    """The rows written of a table: thousands of ranks in one process look at the same memory."""
    return np.arange(0, rows, every)


def _changed(model: Model, table: TableShape, first: int, count: int) -> Any:
    """The rows written of those that a rank has."""
    if not model.every:
        return None
    begin, end = (-(-edge // model.every) for edge in (first, first + count))
    return _every(table.rows, model.every)[begin:end]


def _counted(model: Model, group: Group, ids: list[Any]) -> list[Counts | None]:
    """By table, the rows written of each block, on all ranks."""
    if not model.every:
        return [None] * len(ids)
    edges = np.cumsum([0, *(block_count(table.rows) for table in model.tables)])
    # Of memory that is taken where it is written to: thousands of ranks have one each.
    own = np.frombuffer(mmap(-1, max(8, 8 * int(edges[-1]))), np.int64)[: edges[-1]]
    for number, table in enumerate(model.tables):
        if len(ids[number]):
            own[edges[number] : edges[number + 1]] = count_blocks(ids[number], table.rows)
    total = group.sum(own)
    return [total[edges[number] : edges[number + 1]] for number in range(len(model.tables))]


def _writes(
    model: Model,
    table: TableShape,
    group: Group,
    ids: Any,
    counts: Counts | None,
    layout: Tally,
    rows: RowsMaker,
    previous: str,
) -> Iterator[RowsWrite]:
    first, count, *_ = table.piece(group.rank, group.world)
    for path, columns in table.paths():
        placement = layout.placements.get(path)
        shared = None if count else rows.elsewhere.get(path)
        if shared is not None:
            yield shared
            continue
        where = slice(first, first + count) if ids is None else ids
        write = RowsWrite(
            path=path,
            shape=(table.rows, columns) if columns > 1 else (table.rows,),
            element="float32",
            base=previous if model.every else None,
            ids=ids,
            source=rows.source(table, columns, where),
            codec=rows.codec(columns, model.bits),
            held=None if placement is None else _held(placement, first, count, columns, counts),
        )
        if not count:
            rows.elsewhere[path] = write
        yield write


def _held(placement: Placement, first: int, count: int, columns: int, counts: Counts | None) -> Held:
    return Held(first, count, ((0, columns),) if count else (), placement, counts)
