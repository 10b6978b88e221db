"""Steps of lattices: found where a table is written whole, and kept by its deltas.

The squares of a table's values are added up by each rank for the rows that it has; of those that several have, by the
first of these. So with other ranks the sum may differ in its last bits, which a step of 8 bits nearly never shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from cnr_backends import Transfer
from cnr_codecs import CodecError, Followed, LatticeRows, RowCodec, row_codec
from cnr_codecs.lattice.steps import SUM_ROWS, Sum, add_sums, block_sums, root_mean_square
from cnr_store.errors import SaveError
from cnr_store.ranks.placement import Span
from cnr_store.writing.exchange import Peers, columns_of
from cnr_store.writing.plan import Array, RowsWrite
from cnr_store.writing.row_codes import grid_of, relative_codec


def find_steps(writes: Sequence[RowsWrite], transfer: Transfer, peers: Peers | None) -> list[RowsWrite]:
    """The same writes; those that are whole and go by the root mean square of their rows with the step of these.

    Ranks that share arrays must call it together. The first of them adds up the sums of all, in the order of ranks.

    `transfer`: its threads read the rows.
    `peers`: the ranks that share arrays; None where this process has them all.
    """
    found = {rows.path: (rows, lattice) for rows in writes if (lattice := _wants_step(rows)) is not None}
    if not found:
        return list(writes)
    rank = 0 if peers is None else peers.rank
    sums = {path: _sum(rows, rank, transfer) for path, (rows, _) in found.items()}
    if peers is not None and peers.world > 1:
        shared = sorted(path for path, (rows, _) in found.items() if rows.held is not None)
        if shared:
            sums |= _added([sums[path] for path in shared], shared, peers)
    steps = {path: lattice.step_of(root_mean_square([sums[path]])) for path, (_, lattice) in found.items()}
    return [
        replace(rows, codec=_with_step(rows.codec, steps[rows.path])) if rows.path in steps else rows
        for rows in writes
    ]


def _wants_step(rows: RowsWrite) -> LatticeRows | None:
    lattice = _lattice(rows.codec)
    is_whole = rows.base is None and rows.ids is None
    return lattice if lattice is not None and lattice.step is None and is_whole else None


_Block = tuple[int, int, tuple[Span, ...] | None]
"""Rows of those that this rank has, and the columns of them that it counts; None for all."""


def _sum(rows: RowsWrite, rank: int, transfer: Transfer) -> Sum:
    """The sum of the squares of the values that this rank counts, and how many these are."""

    def squares(block: _Block) -> list[Sum]:
        begin, end, spans = block
        values = rows.values(begin, end)
        return [each for part in _parts(rows, values, spans) for each in block_sums(part)]

    with closing(transfer.map(squares, _blocks(rows, rank))) as sums:
        return add_sums(each for block in sums for each in block)


def _blocks(rows: RowsWrite, rank: int) -> Iterator[_Block]:
    held, bands = rows.held, list[_Block]()
    if held is None:
        bands = [(0, rows.shape[0], None)]
    else:
        bands = [
            (
                max(band.first_row, held.first_row) - held.first_row,
                min(band.end_row, held.first_row + held.rows) - held.first_row,
                tuple(span for span in band.spans if span.ranks[0] == rank),
            )
            for band in held.placement.overlapping(held.first_row, held.first_row + held.rows)
        ]
    for begin, end, spans in bands:
        if spans != ():
            for first in range(begin, end, SUM_ROWS):
                yield first, min(first + SUM_ROWS, end), spans


def _parts(rows: RowsWrite, values: Array, spans: tuple[Span, ...] | None) -> list[Array]:
    if spans is None or rows.held is None:
        return [values]
    return [columns_of(rows.held, values, span.first_column, span.columns) for span in spans]


def _added(own: Sequence[Sum], paths: Sequence[str], peers: Peers) -> dict[str, Sum]:
    """The sums of all ranks, by path; `own` are this one's."""
    others = range(1, peers.world)
    if peers.rank:
        peers.exchange({0: [json.dumps(own).encode()]}, [])
        total = _sums(peers.exchange({}, [0])[0], 0, paths)
    else:
        received = peers.exchange({}, list(others))
        by_rank = [own, *(_sums(received[rank], rank, paths) for rank in others)]
        total = [add_sums(of_path) for of_path in zip(*by_rank, strict=True)]
        data = json.dumps(total).encode()
        peers.exchange({rank: [data] for rank in others}, [])
    return dict(zip(paths, total, strict=True))


def _sums(data: Any, rank: int, paths: Sequence[str]) -> list[Sum]:
    try:
        found = [(float(total), int(count)) for total, count in json.loads(bytes(data))]
    except (ValueError, TypeError) as error:
        raise SaveError(f"what rank {rank} sent is no list of sums: {error}") from error
    if len(found) != len(paths):
        raise SaveError(f"rank {rank} sent sums of {len(found)} arrays, expected those of {len(paths)}")
    return found


def keep_step(codec: RowCodec, stored: LatticeRows | None) -> RowCodec:
    """The codec of a delta, with the step of the rows that are `stored`, if theirs is the same share of a table."""
    lattice = _lattice(codec)
    if lattice is None or lattice.step is not None or stored is None or stored.step is None:
        return codec
    return _with_step(codec, stored.step) if stored.rms_step == lattice.rms_step else codec


def lattice_of(config: Mapping[str, Any] | None) -> LatticeRows | None:
    """The lattice that rows were stored on, by the codec's configuration in a record; None if it is another codec."""
    if config is None or config.get("id") != "cnr_lattice":
        return None
    try:
        return _lattice(row_codec(config))
    except CodecError:  # a newer release's
        return None


def stored_grid(config: Mapping[str, Any] | None) -> float | None:
    """The grid that relative rows were stored on, by the codec's configuration in a record; None without one of all."""
    try:
        codec = None if config is None else relative_codec(row_codec(config))
    except CodecError:  # a newer release's
        return None
    return None if codec is None else grid_of(codec)


def _lattice(codec: RowCodec) -> LatticeRows | None:
    own = codec.codec if isinstance(codec, Followed) else codec
    return own if isinstance(own, LatticeRows) else None


def _with_step(codec: RowCodec, step: float) -> RowCodec:
    if isinstance(codec, Followed):
        return Followed(_with_step(codec.codec, step), codec.then)
    assert isinstance(codec, LatticeRows)
    return codec.with_step(step)
