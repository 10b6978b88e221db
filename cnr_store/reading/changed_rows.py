"""Which rows of an array may differ between one version and others, and their values in that one.

The rule. A *walk* is the ids of a version, its entry's `base`, that version's `base`, and so on to a whole array. An
array at a version holds the rows that the version wrote, and all other rows as they were at its base. So two walks
that meet in a version are the same from there on. Let X be the newest version on all walks. A row that no walk's
versions before X wrote has the value it has at X in each of the versions: it is the same everywhere, bit for bit.
All other rows may differ; these are the changed rows. Where the array's floating
grids have moved from one of the versions to another, all rows changed.

This depends neither on `previous` nor on policies nor on the order in which versions were made. It holds after a
rollback, where abandoned versions lie on walks that the new version is not on. It holds for folds, since a fold holds
the rows of its version and walks go by versions alone. Walks that never meet share no whole array: all rows changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cnr_backends import Transfer
from cnr_codecs import Pending
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.allocation import Array
from cnr_store.chains.array_reader import ArrayReader, own_chain, region_rows
from cnr_store.chains.link import PENDING, Link, open_link
from cnr_store.chains.seen_codes import SeenTable
from cnr_store.format.record import Record

ChangedRows = tuple[Array, Array]
"""Row numbers, int64 (n,) ascending, and their values, (n, columns)."""

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Unshared:
    """Records of the versions that lie on the walks before all walks meet. None of them is whole."""

    own: tuple[Record, ...]  # those on the newer version's walk, newest first
    others: tuple[Record, ...]  # those on the other walks, newest first


def find_unshared(catalog: Catalog, record: Record, path: str, held: Sequence[Record]) -> Unshared | None:
    """The versions whose rows may differ between `record` and any of `held`; None if all rows may.

    Only records are read.
    """
    entry = record.arrays[path]
    for other in held:
        older = other.arrays.get(path)
        if older is None or (older.shape, older.element) != (entry.shape, entry.element):
            return None
        if older.move != entry.move:  # rows that no version wrote have other values
            return None
    walks = [[version for version, _ in own_chain(catalog, each.id, path)] for each in (record, *held)]
    own, *others = walks
    meeting = set(own).intersection(*others)
    if not meeting:
        return None
    before = [[version for version in walk if version > max(meeting)] for walk in walks]
    apart = sorted({version for walk in before[1:] for version in walk}, reverse=True)
    return Unshared(
        tuple(catalog.record(version) for version in before[0]),
        tuple(catalog.record(version) for version in apart),
    )


def changed_rows(
    catalog: Catalog,
    record: Record,
    path: str,
    unshared: Unshared,
    transfer: Transfer,
    seen: SeenTable | None = None,
) -> Iterator[ChangedRows]:
    """The changed rows with their values in `record`, in blocks of at most `BLOCK_BYTES` of values (or one row).

    Reads in proportion to the rows that the unshared versions wrote: their chunks, and those chunks of the shared
    chain that hold rows which only `others` wrote, or which rows are relative to that were not `seen`.

    `seen`: codes in the version where all walks meet.
    """
    reader = ArrayReader(catalog, record, path)
    own = [open_link(catalog, each, path).at(record.arrays[path].move) for each in unshared.own]
    others = [open_link(catalog, each, path) for each in unshared.others]

    def read(region: tuple[int, int]) -> ChangedRows:
        first_row, rows = region
        out = reader.new_rows(rows)
        relative, missing = _own_rows(own, first_row, out, seen)
        unwritten = missing.astype(np.uint8)
        for link in others:
            # Which rows it wrote: their values are overwritten below, and relative ones have none.
            link.fill(first_row, out, unwritten, Pending(*out.shape))
            unwritten[unwritten == PENDING] = 0
        elsewhere = (missing & (unwritten == 0)) | relative
        ids = np.flatnonzero(~missing | elsewhere)
        reader.read(first_row, out, elsewhere)
        return ids + first_row, out[ids]

    for ids, values in transfer.map(read, _regions(reader, [*own, *others])):
        yield from _blocks(ids, values)


def _own_rows(own: Sequence[Link], first_row: int, out: Array, seen: SeenTable | None) -> tuple[Array, Array]:
    """Decode what links have. Returns the rows, bool (n,), that they have and that must be read from the chain, since
    they are relative to what is not known or proven here; and those that they don't have.
    """
    need = np.ones(len(out), np.uint8)
    pending = Pending(*out.shape)
    for link in own:
        link.fill(first_row, out, need, pending)
    relative, missing = need == PENDING, need == 1
    if seen is not None and relative.any():
        relative = seen.compose(first_row, out, pending, relative)
    for _, rows, is_right in pending.checked(relative):
        relative[rows] |= not is_right  # the chain's reader tells what is wrong
    return relative, missing


def all_rows(catalog: Catalog, record: Record, path: str, transfer: Transfer) -> Iterator[ChangedRows]:
    """Every row of an array, in blocks as `changed_rows` yields them."""
    for first_row, values in ArrayReader(catalog, record, path).read_regions(transfer):
        yield from _blocks(np.arange(first_row, first_row + len(values)), values)


def _regions(reader: ArrayReader, links: Sequence[Link]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of those regions of the array in which one of `links` has a shard, ascending."""
    rows = reader.shape[0]
    rows_each = region_rows([*links, *reader.links], reader.columns * reader.dtype.itemsize)
    numbers: set[int] = set()
    for link in links:
        for first_row, last_row in map(link.shards.rows_of, link.parts):
            numbers.update(range(first_row // rows_each, last_row // rows_each + 1))
    for number in sorted(numbers):
        yield number * rows_each, min(rows_each, rows - number * rows_each)


def _blocks(ids: Array, values: Array) -> Iterator[ChangedRows]:
    rows_each = max(1, BLOCK_BYTES // (values.shape[1] * values.itemsize))
    for begin in range(0, len(ids), rows_each):
        yield ids[begin : begin + rows_each], values[begin : begin + rows_each]
