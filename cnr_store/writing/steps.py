"""Steps of lattices: found where a table is written whole, and kept by its deltas.

Each rank counts the values that it has by their magnitude; those that several have, the first of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from cnr_backends import Transfer
from cnr_codecs import CodecError, FloatingRows, Followed, LatticeRows, RowCodec, row_codec
from cnr_codecs.lattice.steps import COUNTED_ROWS, Counts, median_scale, no_counts, scale_counts
from cnr_codecs.payload.coded import Grid
from cnr_store.format.record import Move
from cnr_store.ranks.placement import Span
from cnr_store.ranks.protocol import Team
from cnr_store.writing.exchange import columns_of
from cnr_store.writing.plan import RowsWrite
from cnr_store.writing.row_codes import grid_of, gridded_codec


def find_steps(writes: Sequence[RowsWrite], transfer: Transfer, team: Team) -> list[RowsWrite]:
    """The same writes; those that are whole and go by the scale of their rows with the step of these.

    Ranks that share arrays must call it together. The first of them adds up the counts of all.

    `transfer`: its threads read the rows.
    `team`: the ranks that share arrays.
    """
    found = {rows.path: (rows, lattice) for rows in writes if (lattice := _wants_step(rows)) is not None}
    if not found:
        return list(writes)
    counts = {path: _counts(rows, team.rank, transfer) for path, (rows, _) in found.items()}
    shared = sorted(path for path, (rows, _) in found.items() if rows.held is not None)
    if team.world > 1 and shared:
        counts |= _added(np.stack([counts[path] for path in shared]), shared, team)
    steps = {path: lattice.step_of(median_scale(counts[path])) for path, (_, lattice) in found.items()}
    return [
        replace(rows, codec=_with_step(rows.codec, steps[rows.path])) if rows.path in steps else rows
        for rows in writes
    ]


def _wants_step(rows: RowsWrite) -> LatticeRows | None:
    is_whole = rows.base is None and rows.ids is None
    return _lattice(rows.codec) if is_whole and finds_step(rows.codec) else None


_Block = tuple[int, int, tuple[Span, ...] | None]
"""Rows of those that this rank has, and the columns of them that it counts; None for all."""


def _counts(rows: RowsWrite, rank: int, transfer: Transfer) -> Counts:
    """The counts of the values that this rank counts."""

    def count(block: _Block) -> Counts:
        begin, end, spans = block
        values, held = rows.values(begin, end), rows.held
        if spans is None or held is None:
            return scale_counts(values)
        parts = (columns_of(held, values, span.first_column, span.columns) for span in spans)
        return sum(map(scale_counts, parts), no_counts())

    with closing(transfer.map(count, _blocks(rows, rank))) as counts:
        return sum(counts, no_counts())


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
            for first in range(begin, end, COUNTED_ROWS):
                yield first, min(first + COUNTED_ROWS, end), spans


def _added(own: Counts, paths: Sequence[str], team: Team) -> dict[str, Counts]:
    """The counts of all ranks, by path; `own`, (paths, bins), are this one's. The first rank adds them up."""
    others = range(1, team.world)
    if team.rank:
        team.exchange({0: [own.astype("<i8").tobytes()]}, [])
        total = np.frombuffer(team.exchange({}, [0])[0], "<i8").reshape(own.shape)
    else:
        received = team.exchange({}, others).values()
        total = sum((np.frombuffer(data, "<i8").reshape(own.shape) for data in received), own)
        team.exchange({rank: [total.astype("<i8").tobytes()] for rank in others}, [])
    return dict(zip(paths, total, strict=True))


def finds_step(codec: RowCodec) -> bool:
    """Whether a codec finds the step of a lattice by the rows of each whole version."""
    lattice = _lattice(codec)
    return lattice is not None and lattice.step is None


def keep_grid(codec: RowCodec, stored: LatticeRows | None, move: Move) -> RowCodec:
    """The codec of a delta: with the step of the rows that are `stored`, if theirs is the same share of a table.

    `move`: where floating grids have moved to.
    """
    if isinstance(codec, Followed):
        return Followed(keep_grid(codec.codec, stored, move), codec.then)
    if isinstance(codec, FloatingRows) and codec.grid.is_centered:
        return replace(codec, scale=move[0], shift=move[1])
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


def stored_grid(config: Mapping[str, Any] | None) -> Grid | None:
    """The grid that rows were stored on, by the codec's configuration in a record; None without one of all."""
    try:
        codec = None if config is None else gridded_codec(row_codec(config))
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
