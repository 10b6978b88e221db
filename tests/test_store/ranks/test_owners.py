"""Who writes what: a holder of it, evenly, and the same whoever computes it."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.ranks.owners import (
    FEW_OWNERS,
    LIMIT,
    OWNER_BYTES,
    SLACK,
    Share,
    assign,
    few_owners,
    split_by_size,
    supplier,
)
from cnr_store.ranks.placement import Piece, Placement
from tests.test_store.ranks.support.placements import RANKS, cells, placed, replicated

Pieces = list[tuple[tuple[int, int], list[Piece]]]
nbytes = st.one_of(st.just(0.0), st.floats(0.5, 100.0), st.sampled_from([1.0, 2.0, 64.0]))
WORLD = 10  # more than hold rows, as where a rank has no shard


@st.composite
def shared(draw: st.DrawFn) -> tuple[list[Share], list[list[Piece]]]:
    """Arrays cut anyhow, with the pieces that their placements are of."""
    shares, by_share = [], []
    for shape, pieces in draw(st.lists(placed(8, 3), min_size=1, max_size=3)):
        shard_rows = draw(st.sampled_from([1, 2, 4, 16]))
        shards = -(-shape[0] // shard_rows)
        sizes = draw(st.lists(nbytes, min_size=shards, max_size=shards))
        shares.append(Share(Placement.of("t", shape, pieces), shard_rows, np.array(sizes)))
        by_share.append(pieces)
    return shares, by_share


def holders(pieces: list[Piece], shard_rows: int) -> defaultdict[int, set[int]]:
    """The ranks that hold anything of each shard."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for (row, _), ranks in cells(pieces).items():
        found[row // shard_rows] |= ranks
    return found


def loads(shares: list[Share], owners: list[np.ndarray], world: int) -> list[float]:
    found = [0.0] * world
    for share, of_shards in zip(shares, owners, strict=True):
        for owner, size in zip(of_shards.tolist(), share.shard_bytes.tolist(), strict=True):
            found[owner] += size  # to the last rank where nothing is written, which adds 0
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(shared())
def test_owners_hold_rows_of_what_is_written(given_shares: tuple[list[Share], list[list[Piece]]]) -> None:
    shares, by_share = given_shares
    for share, pieces, owners in zip(shares, by_share, assign(shares, WORLD), strict=True):
        assert (owners.dtype, owners.shape) == (np.dtype(np.int32), share.shard_bytes.shape)
        by_shard = holders(pieces, share.shard_rows)
        for shard, owner in enumerate(owners.tolist()):
            if share.shard_bytes[shard]:
                assert owner in by_shard[shard]
            else:
                assert owner == -1


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(shared(), st.randoms())
def test_the_order_of_pieces_does_not_matter(
    given_shares: tuple[list[Share], list[list[Piece]]], rnd: np.random.Generator
) -> None:
    shares, by_share = given_shares
    again = []
    for share, pieces in zip(shares, by_share, strict=True):
        rnd.shuffle(pieces)
        placement = Placement.of("u", share.placement.shape, pieces)
        again.append(Share(placement, share.shard_rows, share.shard_bytes.copy()))
    for one, other in zip(assign(shares, WORLD), assign(again, WORLD), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(shared())
def test_who_writes_too_much_holds_nothing_that_another_could_take(
    given_shares: tuple[list[Share], list[list[Piece]]],
) -> None:
    shares, by_share = given_shares
    owners = assign(shares, WORLD)
    by_rank = loads(shares, owners, WORLD)
    limit = LIMIT * sum(by_rank) / WORLD
    for share, pieces, of_shards in zip(shares, by_share, owners, strict=True):
        by_shard = holders(pieces, share.shard_rows)
        for shard, owner in enumerate(of_shards.tolist()):
            if owner >= 0 and by_rank[owner] > limit * 1.000001:
                least = min(by_rank[rank] for rank in by_shard[shard])
                assert least + share.shard_bytes[shard] >= by_rank[owner] * 0.999999


@settings(deadline=None)
@given(
    st.lists(st.floats(0.5, 100.0), max_size=60),
    st.lists(st.floats(0.5, 100.0), max_size=RANKS),
)
def test_what_all_hold_fills_up_what_one_rank_must_write(free: list[float], forced: list[float]) -> None:
    shares = [Share(replicated("all", (60, 4), range(RANKS)), 1, np.array([*free, *[0] * 60][:60]))]
    for rank, size in enumerate(forced):
        shares.append(Share(replicated("one", (8, 4), [rank]), 8, np.array([size])))
    by_rank = loads(shares, assign(shares, RANKS), RANKS)
    mean = sum(by_rank) / RANKS
    for load, must in zip(by_rank, [*forced, *[0.0] * RANKS], strict=False):
        assert load <= max(LIMIT * mean, must, max(free, default=0) + mean) * 1.000001


def row_wise(world: int, rows: int, columns: int = 8) -> Placement:
    edges = [rows * rank // world for rank in range(world + 1)]
    pieces = [
        Piece(first, end - first, 0, columns, rank) for rank, (first, end) in enumerate(pairwise(edges))
    ]
    return Placement.of("t", (rows, columns), pieces)


@pytest.mark.slow
def test_straddled_shards_spread_over_their_holders() -> None:
    """By the holder of the first row, rank 0 would write every table that has one shard."""
    world = 64
    shares = [Share(row_wise(world, 6400), 8192, np.array([float(size)])) for size in range(1, 641)]
    shares += [Share(row_wise(world, 100_000), 4096, np.full(25, 30.0)) for _ in range(20)]
    by_rank = loads(shares, assign(shares, world), world)
    assert max(by_rank) <= 1.2 * sum(by_rank) / world


def test_a_holder_of_more_rows_is_preferred_within_the_slack() -> None:
    mostly_second = Placement.of("t", (10, 4), [Piece(0, 2, 0, 4, 0), Piece(2, 8, 0, 4, 1)])
    share = Share(mostly_second, 16, np.array([10.0]))

    def owner_where_the_second_has(nbytes: float) -> int:
        others = [
            Share(replicated("u", (1, 1), [rank]), 1, np.array([size]))
            for rank, size in enumerate((100.0, nbytes))
        ]
        return int(assign([share, *others], 2)[0][0])

    assert owner_where_the_second_has(SLACK * 110.0 - 11.0) == 1
    assert owner_where_the_second_has(SLACK * 110.0 - 9.0) == 0
    assert assign([share], 2)[0].tolist() == [1]


def test_what_the_slack_gave_is_taken_back_above_the_limit() -> None:
    mostly_second = Placement.of("t", (10, 4), [Piece(0, 2, 0, 4, 0), Piece(2, 8, 0, 4, 1)])
    share = Share(mostly_second, 16, np.array([10.0]))
    small = Share(replicated("u", (1, 1), [1]), 1, np.array([0.5]))
    assert assign([share, small], 2)[0].tolist() == [0]


def test_no_shares_and_tables_without_rows() -> None:
    assert assign([], 4) == []
    empty = Share(replicated("t", (0, 4), range(4)), 8, np.zeros(0))
    assert [each.tolist() for each in assign([empty], 4)] == [[]]


ranks = st.sets(st.integers(0, 200), min_size=1, max_size=20).map(lambda chosen: tuple(sorted(chosen)))


@given(ranks, st.integers(0, 2000), st.integers(0, 100_000))
def test_the_owner_supplies_itself(of_span: tuple[int, ...], owner: int, shard: int) -> None:
    found = supplier(of_span, owner, shard)
    assert found == owner if owner in of_span else found in of_span


@pytest.mark.slow
@given(ranks, st.integers(201, 2000), st.integers(0, 100_000), st.integers(0, 7))
def test_suppliers_are_spread(of_span: tuple[int, ...], owner: int, shard: int, stride: int) -> None:
    """Over shards, whether one rank owns them or each another."""
    count = 20 * len(of_span)
    given_rows = Counter(supplier(of_span, owner + stride * at, shard + at) for at in range(count))
    assert max(given_rows.values()) <= 2 * 20


@given(st.lists(st.integers(0, 1000), max_size=50), st.sets(st.integers(0, 99), min_size=1, max_size=8))
def test_dense_objects_are_split_by_size(sizes: list[int], among: set[int]) -> None:
    owners = split_by_size(sizes, sorted(among))
    assert owners == split_by_size(sizes, sorted(among, reverse=True))
    assert len(owners) == len(sizes)
    assert set(owners) <= among
    by_rank: Counter[int] = Counter()
    for size, owner in zip(sizes, owners, strict=True):
        by_rank[owner] += size
    assert max(by_rank.values(), default=0) <= sum(sizes) / len(among) + max(sizes, default=0)


def test_empty_objects_are_spread() -> None:
    assert Counter(split_by_size([0] * 12, range(4))) == dict.fromkeys(range(4), 3)


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_arrays_in_pieces_have_no_more_owners_than_their_bytes_need(nbytes: int, world: int) -> None:
    owners = few_owners(nbytes, world)
    assert len(owners) == min(world, max(FEW_OWNERS, -(-nbytes // OWNER_BYTES)))
    assert set(owners) <= set(range(world))
