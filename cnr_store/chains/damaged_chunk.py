"""Tells which rows a damaged chunk may hold."""

from __future__ import annotations

import numpy as np

from cnr_codecs import CodecError, Unpacker, most_packed_bytes, rows_written
from cnr_store.chains.allocation import Array
from cnr_store.chains.shard_reader import Chunk, ShardReader


def rows_at_most(
    shards: ShardReader,
    shard: int,
    chunk: Chunk,
    rows: range,
    unpacker: Unpacker,
    element: str,
    seal: int,
) -> Array:
    """(len(rows),) bool: which of these rows a damaged chunk may hold.

    Just those that were written, where its payload still proves which these are; else all of the chunk.

    Parameters
    ----------
    shards, shard, chunk
        Where it lies.
    unpacker, element, seal
        What undoes the codecs that follow the row codec; the element type, and the seal that its payload must bear.
    """
    offsets = _proven_offsets(shards, shard, chunk, unpacker, element, seal)
    held = np.full(shards.grid.chunk_rows, offsets is None)
    if offsets is not None:
        held[offsets] = True
    may_hold = np.zeros(len(rows), bool)
    begin, end = max(chunk.row, rows.start), min(chunk.row + len(held), rows.stop)
    may_hold[begin - rows.start : end - rows.start] = held[begin - chunk.row : end - chunk.row]
    return may_hold


def _proven_offsets(
    shards: ShardReader, shard: int, chunk: Chunk, unpacker: Unpacker, element: str, seal: int
) -> Array | None:
    grid, data = shards.grid, shards.read_damaged(shard, chunk)
    if data is None:
        return None
    try:
        payload = unpacker.unpack(data, most_packed_bytes(grid.chunk_rows, grid.chunk_columns, element))
        offsets = rows_written(payload, seal=seal)
    except CodecError:
        return None
    return offsets if len(offsets) and offsets[-1] < grid.chunk_rows else None
