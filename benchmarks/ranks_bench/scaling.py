"""Counts of one save by many ranks, recorded in one process, and how they grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks.codec_bench.targets import Target
from benchmarks.ranks_bench.counting import CountedBackend
from benchmarks.ranks_bench.recorded import Parcel, run_ranks
from benchmarks.ranks_bench.rows import Model, NoRows, SizesBackend, TableShape
from benchmarks.ranks_bench.save import fixed_names, save
from cnr_store.format.layout import moved_nodes
from cnr_store.ranks.decisions import decode
from cnr_store.ranks.placement import Placement
from cnr_store.training.saving import tally
from cnr_store.writing import exchange, stage, writer
from cnr_store.writing.plan import Plan

T = TypeVar("T")
WORLDS = (128, 256, 512, 1024, 2048)
MAX_EXPONENT = 1.05
MAX_COMMIT_REQUESTS = 6
MAX_RECORD_BYTES = 1_000_000
_TABLES, _BY_ROWS = 1000, 26


def big_model(nbytes: float, every: int) -> Model:
    """1,000 tables of 128 columns; the 26 that are cut by rows have four fifths of the bytes."""
    row_bytes = 4 * 129
    tables = []
    for number in range(_TABLES):
        by_rows = number < _BY_ROWS
        share = 0.8 / _BY_ROWS if by_rows else 0.2 / (_TABLES - _BY_ROWS)
        tables.append(TableShape(number, round(nbytes * share / row_bytes), 128, by_rows))
    return Model(tuple(tables), every)


@contextmanager
def _computed_once() -> Iterator[None]:
    """What all ranks compute alike, from the same input, is computed by the first one that does."""
    known: dict[Any, Any] = {}
    row_by_row = exchange._encodes_row_by_row

    def once(name: str, call: Callable[..., T], key: Callable[..., Any]) -> Callable[..., T]:
        def wrapper(*arguments: Any) -> T:
            place = (name, key(*arguments))
            if place not in known:
                known[place] = call(*arguments), arguments  # kept, so that ids stay taken
            found: T = known[place][0]
            return found

        return wrapper

    with (
        patch.object(tally, "decode", once("decode", decode, lambda data: data)),
        patch.object(writer, "told_record", once("record", writer.told_record, lambda version, *_: version)),
        patch.object(Plan, "place", once("place", Plan.place, lambda plan: len(plan.rows))),
        patch.object(stage, "moved_nodes", once("moved", moved_nodes, id)),
        patch.object(Placement, "from_json", once("placement", Placement.from_json, id)),
        patch.object(
            exchange,
            "find_routes",
            once("routes", exchange.find_routes, lambda writes, world: (world, len(writes))),
        ),
        patch.object(exchange, "pack", Parcel),
        patch.object(exchange, "_encodes_row_by_row", lambda codec: row_by_row(codec.codec)),
        patch.object(exchange, "unpack", lambda parcel: parcel.fragments),
        patch.object(stage, "PUTS_IN_FLIGHT", 1),  # threads of thousands of ranks wait at once
    ):
        yield


def record(world: int, model: Model) -> list[dict[str, Any]]:
    """Save by so many ranks. What each of them did."""
    objects: dict[str, bytes | int] = {}
    rows = NoRows()
    with fixed_names(), _computed_once():
        return run_ranks(world, lambda group: save(group, CountedBackend(SizesBackend(objects)), model, rows))


def summary(world: int, model: Model, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is published of a run."""

    def total(name: str) -> int:
        return sum(rank.get(name, 0) for rank in ranks)

    first, put = ranks[0], [rank["put_bytes"] for rank in ranks]
    return {
        "ranks": world,
        "model_bytes": model.nbytes,
        "changed": 1 / model.every if model.every else 1.0,
        "requests": sum(sum(rank["requests"].values()) for rank in ranks),
        "puts": sum(rank["requests"].get("put", 0) for rank in ranks),
        "shards": total("shards"),
        "put_bytes": {"all": sum(put), "mean": sum(put) / world, "busiest": max(put)},
        "rounds": max(rank.get("rounds", 0) for rank in ranks),
        "messages": total("messages"),
        "message_bytes": total("message_bytes"),
        "round_bytes": max(rank.get("round_bytes", 0) for rank in ranks),
        "documents": total("documents_written"),
        "document_bytes": total("document_bytes"),
        "reduced_bytes": first.get("reduced_bytes", 0),
        "broadcast_bytes": first.get("broadcast_bytes", 0),
        "first_rank": {
            "requests": sum(first["requests"].values()),
            "put_bytes": first["put_bytes"],
            "message_bytes": first.get("message_bytes", 0) + first.get("received_bytes", 0),
            "document_bytes": first["document_bytes"],
            "bytes": _first_bytes(first),
            "commit_requests": len(first["commit_requests"]),
        },
        "record_bytes": first["record_bytes"],
    }


def _first_bytes(first: Mapping[str, Any]) -> int:
    """All that rank 0 stores, sends and receives."""
    names = (
        "put_bytes",
        "message_bytes",
        "received_bytes",
        "document_bytes",
        "reduced_bytes",
        "broadcast_bytes",
    )
    return sum(first.get(name, 0) for name in names)


def exponents(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The powers of the number of ranks that the counts grow by, fitted to all runs."""
    counted = {
        "requests": [run["requests"] for run in runs],
        "messages": [run["messages"] for run in runs],
        "bytes": [run["put_bytes"]["all"] + run["message_bytes"] for run in runs],
        "rank 0's bytes": [run["first_rank"]["bytes"] for run in runs],
        "rank 0's documents": [run["first_rank"]["document_bytes"] for run in runs],
    }
    worlds = np.log([run["ranks"] for run in runs])
    return {
        name: round(float(np.polyfit(worlds, np.log(values), 1)[0]), 3) for name, values in counted.items()
    }


def targets(runs: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    """What the counts may be at most."""
    where = f"{runs[0]['ranks']} to {runs[-1]['ranks']} ranks, {runs[0]['model_bytes'] / 1e12:.3g} TB"
    for name, found in exponents(runs).items():
        yield Target(f"ranks: exponent of {name}", MAX_EXPONENT, found, where, at_most=True)
    commit = max(run["first_rank"]["commit_requests"] for run in runs)
    name = "ranks: requests of rank 0 after the votes"
    yield Target(name, MAX_COMMIT_REQUESTS, commit, where, at_most=True)
    record = max(run["record_bytes"] for run in runs)
    yield Target("ranks: bytes of a record", MAX_RECORD_BYTES, record, where, at_most=True)
