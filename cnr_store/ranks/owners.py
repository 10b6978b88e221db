"""Which rank writes which object. All ranks compute the same from the same placements, so nobody tells it.

Sums of floats are made one number after the other, because numpy adds whole arrays in an order that depends on the
processor.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cnr_store.ranks.placement import Band, Placement

SLACK = 1.1
"""How far above the least load an owner may get that has more of a shard's rows than others."""
LIMIT = 1.5
"""How many times the mean of all ranks an owner may write, where other ranks can."""
FEW_OWNERS = 8
OWNER_BYTES = 16 << 20
_ROUNDS = 8
"""Of passing shards on. Most often the first one finds nothing to move."""


@dataclass(frozen=True, eq=False)
class Share:
    """The shards of one array that a version holds."""

    placement: Placement  # of the array
    shard_rows: int  # rows of a shard; the last one may have fewer
    # float64 (shards,): the encoded bytes expected of each shard; 0 where nothing is written
    shard_bytes: npt.NDArray[np.float64]


class _Holders(NamedTuple):
    """Who holds rows of a shard."""

    ranks: npt.NDArray[np.int64]  # int64 (n,) ascending
    # int64 (n,): how many of the shard's values each of them holds; None if all hold as many
    cells: npt.NDArray[np.int64] | None


class _Shard(NamedTuple):
    """A shard that is written: its array, its number there, and the bytes expected of it."""

    array: int
    number: int
    nbytes: float
    holders: _Holders


def assign(shares: Sequence[Share], world: int) -> list[npt.NDArray[np.int32]]:
    """Give each shard that is written an owner among the ranks that hold rows of it, so that bytes spread evenly.

    Shards that fewer ranks hold come first, because they have the least choice; among as many holders, larger shards
    come first. The holder with the least bytes so far gets the shard, or one with more of its rows whose bytes stay
    within `SLACK` of that. At last, ranks with more than `LIMIT` times the mean pass on what others can take.

    `shares`: the same on all ranks, in the same order.
    `world`: the number of ranks.

    Returns: int32 (shards,) for each share: the owners; -1 where nothing is written.
    """
    written = [shard for array, share in enumerate(shares) for shard in _written(array, share)]
    written.sort(key=lambda shard: (len(shard.holders.ranks), -shard.nbytes, shard.array, shard.number))
    owners = [np.full(len(share.shard_bytes), -1, np.int32) for share in shares]
    loads = np.zeros(world)
    for shard in written:
        owner = _choose(shard.holders, loads, shard.nbytes)
        loads[owner] += shard.nbytes
        owners[shard.array][shard.number] = owner
    _relieve(written, owners, loads)
    return owners


def _written(array: int, share: Share) -> Iterator[_Shard]:
    """The shards of an array that are written."""
    bands = share.placement.bands
    shards = np.flatnonzero(share.shard_bytes)
    first_rows = np.array([band.first_row for band in bands], np.int64)
    begins = np.searchsorted(first_rows, shards * share.shard_rows, side="right") - 1
    ends = np.searchsorted(first_rows, (shards + 1) * share.shard_rows, side="left")
    columns = (each.tolist() for each in (shards, share.shard_bytes[shards], begins, ends))
    of_band: dict[int, _Holders] = {}  # of the shards inside one band
    for number, nbytes, begin, end in zip(*columns, strict=True):
        if end - begin > 1:
            holders = _holders(bands[begin:end], number * share.shard_rows, (number + 1) * share.shard_rows)
        elif begin in of_band:
            holders = of_band[begin]
        else:
            holders = of_band[begin] = _holders(bands[begin:end], 0, share.placement.shape[0])
        yield _Shard(array, number, nbytes, holders)


def _holders(bands: Sequence[Band], first_row: int, end_row: int) -> _Holders:
    """Who holds how much of the rows `first_row` ... `end_row` - 1 of some bands."""
    cells: dict[int, int] = {}
    for band in bands:
        rows = min(band.end_row, end_row) - max(band.first_row, first_row)
        for span in band.spans:
            for rank in span.ranks:
                cells[rank] = cells.get(rank, 0) + rows * span.columns
    ranks = sorted(cells)
    counts = None if len(set(cells.values())) == 1 else np.array([cells[rank] for rank in ranks], np.int64)
    return _Holders(np.array(ranks, np.int64), counts)


def _choose(holders: _Holders, loads: npt.NDArray[np.float64], nbytes: float) -> int:
    """The holder that gets a shard. Among equals the one with the least load, then the lowest rank."""
    ranks, cells = holders
    if len(ranks) == 1:
        return int(ranks[0])
    after: npt.NDArray[np.float64] = loads[ranks] + nbytes
    if cells is None:
        return int(ranks[after.argmin()])
    near = np.flatnonzero(after <= SLACK * after.min())
    return int(ranks[near[np.lexsort((after[near], -cells[near]))[0]]])


def _relieve(
    written: Sequence[_Shard], owners: Sequence[npt.NDArray[np.int32]], loads: npt.NDArray[np.float64]
) -> None:
    """Move shards from ranks above the limit to holders that then have less than those had."""
    limit = LIMIT * math.fsum(loads) / len(loads)
    for _ in range(_ROUNDS):
        moves = 0
        for shard in written:
            owner = owners[shard.array][shard.number]
            if loads[owner] <= limit:
                continue
            ranks = shard.holders.ranks
            other = ranks[loads[ranks].argmin()]
            if loads[other] + shard.nbytes < loads[owner]:
                loads[owner] -= shard.nbytes
                loads[other] += shard.nbytes
                owners[shard.array][shard.number] = other
                moves += 1
        if not moves:
            return


def supplier(ranks: Sequence[int], owner: int, shard: int) -> int:
    """Who gives a span's rows of a shard to the shard's owner: the owner itself, or one of the replicas.

    `ranks`: of the span, ascending.
    `owner`, `shard`: the shard and who writes it. Neighbouring shards and owners are spread over the replicas.
    """
    at = bisect_left(ranks, owner)
    if at < len(ranks) and ranks[at] == owner:
        return owner
    # Multiples of these two fractions of 2**32 (Roberts' R2 sequence) lie evenly, by shard, by owner and by both.
    mixed = (shard * 0xC13FA9A9 + owner * 0x91E10DA5) % 2**32
    return ranks[mixed * len(ranks) >> 32]


def few_owners(nbytes: int, world: int) -> range:
    """Ranks for arrays that come together from pieces of all ranks.

    Each of them gets a message of every rank. So there are as many as the bytes need, and not more with more ranks.

    `nbytes`: of the arrays.
    `world`: how many ranks there are.
    """
    count = min(world, max(FEW_OWNERS, -(-nbytes // OWNER_BYTES)))
    return range(0, world, world // count)[:count]


def split_by_size(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Give each object an owner, so that bytes spread evenly: the largest first, to who has the least so far.

    `sizes`: in bytes. Empty objects are spread, too.
    `ranks`: who may own objects.
    """
    owners = [-1] * len(sizes)
    heap = [(0, 0, rank) for rank in sorted(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        nbytes, objects, owner = heap[0]
        heapq.heapreplace(heap, (nbytes + sizes[number], objects + 1, owner))
        owners[number] = owner
    return owners
