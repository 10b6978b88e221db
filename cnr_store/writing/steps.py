"""Steps of lattices: found where a table is written whole, and kept by its deltas."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from cnr_backends import Transfer
from cnr_codecs import CodecError, Followed, LatticeRows, RowCodec, row_codec
from cnr_codecs.lattice.steps import SUM_ROWS, block_sums, root_mean_square
from cnr_store.writing.plan import RowsWrite


def find_step(rows: RowsWrite, transfer: Transfer) -> RowsWrite:
    """The same write, with the step of all its rows if it is whole and its codec goes by their root mean square.

    Rows of an array that several ranks share keep a step for each chunk.
    """
    lattice = _lattice(rows.codec)
    if lattice is None or lattice.step is not None or rows.base is not None or rows.held is not None:
        return rows
    count, source = rows.shape[0], rows.source
    blocks = ((first, min(first + SUM_ROWS, count)) for first in range(0, count, SUM_ROWS))
    with closing(transfer.map(lambda block: block_sums(source.values(*block)), blocks)) as sums:
        rms = root_mean_square(each for block in sums for each in block)
    return replace(rows, codec=_with_step(rows.codec, lattice.step_of(rms)))


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


def _lattice(codec: RowCodec) -> LatticeRows | None:
    own = codec.codec if isinstance(codec, Followed) else codec
    return own if isinstance(own, LatticeRows) else None


def _with_step(codec: RowCodec, step: float) -> RowCodec:
    if isinstance(codec, Followed):
        return Followed(_with_step(codec.codec, step), codec.then)
    assert isinstance(codec, LatticeRows)
    return codec.with_step(step)
