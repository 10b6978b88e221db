"""The ranks of real torch.distributed jobs: what they send arrives, and whoever dies or hangs is named."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cnr_store import RanksError
from cnr_store.ranks.group import Document, Group, Piece
from cnr_store.ranks.protocol import SaveRound
from cnr_store.training.distributed.torch_group import TorchGroup, job_group
from tests.test_store.ranks.support.rank_processes import Outcome, reach, run_ranks
from tests.test_store.ranks.support.rank_threads import run_threads

pytestmark = pytest.mark.slow

WORLD = 3
SECONDS = 2.0


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, which must have raised nothing."""
    assert [each.where for each in outcomes] == [""] * len(outcomes)
    assert [each.signal for each in outcomes] == [0] * len(outcomes)
    return [each.value for each in outcomes]


def to_all(message: list[Piece]) -> dict[int, list[Piece]]:
    return dict.fromkeys(range(WORLD), message)


def all_verbs_of_torch() -> list[Any]:
    return all_verbs(job_group(timeout_seconds=30))


def gathered(group: Group, phase: str, said: Document) -> list[Document]:
    """What every rank says, in rank order."""
    documents: list[Document] = group.decide(phase, said, lambda found: {"all": found})["all"]
    return documents


def all_verbs(group: Group) -> list[Any]:
    rank = group.rank
    said = gathered(group, "test", {"rank": rank})
    total = group.sum(np.array([rank, 10**12]))
    none = group.sum(np.empty(0, np.int64))
    bits = group.either(np.array([1 << rank, 0], np.uint8))
    sent = [group.broadcast(data if rank == 0 else None) for data in (b"from 0", b"")]
    messages: dict[int, list[Piece]] = {
        other: [f"{rank} to {other}".encode(), np.arange(3, dtype=np.uint8)] for other in range(WORLD)
    }
    del messages[(rank + 1) % WORLD]
    messages[rank] = []
    got = group.exchange(messages, {rank, (rank + 1) % WORLD})
    group.close()
    return [
        said,
        total.tolist(),
        none.tolist(),
        bits.tolist(),
        sent,
        {other: bytes(data) for other, data in sorted(got.items())},
    ]


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_every_verb_does_what_it_says(ranks: str) -> None:
    """Of threads as well, which stand in for processes elsewhere."""
    threads = ranks == "threads"
    results = run_threads(WORLD, all_verbs) if threads else values(run_ranks(WORLD, all_verbs_of_torch))
    for rank, found in enumerate(results):
        said = [{"rank": each} for each in range(WORLD)]
        other = (rank + 1) % WORLD
        assert found == [
            said,
            [3, 3 * 10**12],
            [],
            [7, 0],
            [b"from 0", b""],
            {rank: b"", other: f"{other} to {rank}".encode() + bytes(range(3))},
        ]


def exchange_beside_training(rounds: int) -> bool:
    group = TorchGroup(timeout_seconds=30)
    rng = np.random.default_rng(group.rank)
    wrong: list[int] = []

    def exchange() -> None:
        for turn in range(rounds):
            size = int(rng.integers(0, 5000))
            body = np.full(size, group.rank + turn, np.uint8)
            got = group.exchange(to_all([body]), range(WORLD), turn // 10)
            wrong.extend(turn for other in range(WORLD) if set(got[other].tolist()) - {(other + turn) % 256})

    background = threading.Thread(target=exchange)
    background.start()
    steps = 0
    while steps < 2 * rounds:
        ones = torch.ones(100)
        dist.all_reduce(ones)
        steps += 1
        if steps % 20 == 0:
            group.decide("train", {}, lambda _: {})
            assert group.sum(np.ones(3, np.int64)).tolist() == [WORLD] * 3
        assert ones.tolist() == [WORLD] * 100
    background.join()
    group.close()
    return not wrong


def test_exchanges_run_beside_training() -> None:
    assert values(run_ranks(WORLD, exchange_beside_training, 200)) == [True] * WORLD


def timed(call: Callable[[], object]) -> tuple[str, float]:
    """The text of the `RanksError` of a call, and how long it took."""
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def fail_in(verb: str, victim: int) -> Any:
    """A verb that the victim never calls, then what becomes of the rest."""
    group = TorchGroup(timeout_seconds=SECONDS)
    calls: dict[str, Callable[[], object]] = {
        "decide": lambda: gathered(group, "save", {}),
        "sum": lambda: group.sum(np.ones(1000, np.int64)),
        "either": lambda: group.either(np.ones(1000, np.uint8)),
        "exchange": lambda: group.exchange(to_all([b"message"]), range(WORLD)),
    }
    gathered(group, "save", {})
    if group.rank == victim:
        reach("victim")
    return timed(calls[verb])


LOST = [
    ("decide", 1, signal.SIGKILL),
    ("decide", 0, signal.SIGSTOP),
    ("sum", 2, signal.SIGKILL),
    ("either", 0, signal.SIGSTOP),
    ("exchange", 1, signal.SIGKILL),
    ("exchange", 1, signal.SIGSTOP),
]


@pytest.mark.parametrize(("verb", "victim", "number"), LOST)
def test_a_lost_rank_is_named(verb: str, victim: int, number: int) -> None:
    found = run_ranks(WORLD, fail_in, verb, victim, signals={(victim, "victim"): [(victim, number)]})
    assert found.pop(victim).signal == signal.SIGKILL
    for text, seconds in values(found):
        assert verb in text or "save" in text
        assert re.search(rf"rank {victim}\b", text)
        assert seconds < 10
    if verb != "exchange":
        assert len({re.sub(r"\(.* did\)", "", each.value[0]) for each in found}) == 1


def break_and_go_on() -> Any:
    """One rank is stopped for longer than the others wait; then all go on."""
    group = TorchGroup(timeout_seconds=SECONDS)
    gathered(group, "first", {})
    if group.rank == 2:
        reach("stop")
    text, _ = timed(lambda: group.sum(np.ones(10, np.int64)))
    reach("gave up")
    broken, _ = timed(lambda: group.exchange({}, set()))
    gathered(group, "second", {})
    got = group.exchange(to_all([b"again"]), range(WORLD))
    return text, broken, group.sum(np.array([group.rank])).tolist(), [bytes(each) for each in got.values()]


def test_groups_are_made_anew() -> None:
    wake = {(0, "gave up"): [(2, signal.SIGCONT)], (2, "stop"): [(2, signal.SIGSTOP)]}
    found = values(run_ranks(WORLD, break_and_go_on, signals=wake))
    for text, broken, total, got in found:
        assert text.startswith("first: sum: the connection between the ranks broke: rank 2 did not answer")
        assert "broken until their next decision" in broken
        assert (total, got) == ([3], [b"again"] * WORLD)


def abort_an_exchange() -> Any:
    """Rank 2 fails while the others wait for its message; the next save works."""
    group = TorchGroup(timeout_seconds=20)
    save = SaveRound(group.keyvalue, group.rank, WORLD, 1, 20)
    start = time.monotonic()
    if group.rank == 2:
        save.fail("encode", "no memory")
        text, _ = timed(save.check)
    else:
        text, _ = timed(lambda: group.exchange({0: [b"x"]}, {2}, 1, lambda: save.beat("exchange")))
    seconds = time.monotonic() - start
    gathered(group, "next", {})
    got = group.exchange(to_all([b"y"]), range(WORLD), 2)
    return text, seconds, [bytes(each) for each in got.values()]


def test_a_failure_ends_an_exchange() -> None:
    for text, seconds, got in values(run_ranks(WORLD, abort_an_exchange)):
        assert text == "encode: rank 2 failed: no memory"
        assert seconds < 5
        assert got == [b"y"] * WORLD


def make_late(absent: int) -> Any:
    if dist.get_rank() == absent:
        return "", 0
    return timed(lambda: TorchGroup(timeout_seconds=SECONDS))


@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("absent", [0, 2])
def test_ranks_that_make_no_group_are_named(absent: int) -> None:
    found = values(run_ranks(WORLD, make_late, absent))
    del found[absent]
    for text, seconds in found:
        assert text.startswith(f"construct: rank {absent} did not answer within 2 s")
        assert seconds < 10


def make_often() -> Any:
    """Groups one after another over one store, some of part of the ranks."""
    pair = dist.new_group([0, 2])
    found = []
    for _ in range(3):
        group = TorchGroup(timeout_seconds=20)
        found.append(group.sum(np.array([1])).tolist())
        group.close()
    if dist.get_rank() != 1:
        small = job_group(pair, timeout_seconds=20)
        found.append(small.sum(np.array([small.rank])).tolist())
        found.append(
            [bytes(each) for each in small.exchange({1 - small.rank: [b"p"]}, {1 - small.rank}).values()]
        )
        small.close()
    return found


def test_groups_may_be_made_often() -> None:
    pair = [[3]] * 3 + [[1], [b"p"]]
    assert values(run_ranks(WORLD, make_often)) == [pair, [[3]] * 3, pair]


def break_apart(more: bool) -> Any:
    """Ranks 0 and 2, of which rank 0 may be in more groups, and of which one breaks off again and again."""
    pair = dist.new_group([0, 2])
    if more:
        dist.new_group([0])
    if dist.get_rank() == 1:
        return []
    small, found = job_group(pair, timeout_seconds=10), []
    for turn in range(4):
        if small.rank == turn % 2:
            small.break_off()
        small.decide("test", {}, lambda _: {})
        got = small.exchange({1 - small.rank: [bytes([turn])]}, {1 - small.rank}, turn)
        found.append(
            (small.sum(np.array([small.rank + turn])).tolist(), [bytes(each) for each in got.values()])
        )
    small.close()
    return found


@pytest.mark.parametrize("more", [False, True])
def test_some_ranks_are_connected_anew_each_time(more: bool) -> None:
    """torch would name their groups by how many each rank has, and give a name out again."""
    apart = [([1 + 2 * turn], [bytes([turn])]) for turn in range(4)]
    assert values(run_ranks(WORLD, break_apart, more)) == [apart, [], apart]


def outlive_training() -> Any:
    group = TorchGroup(timeout_seconds=20)
    names = len(dist.distributed_c10d._world.pg_names)
    dist.destroy_process_group()
    total = group.sum(np.array([1])).tolist()
    group.close()
    return names, total


def test_training_knows_nothing_of_its_groups() -> None:
    assert values(run_ranks(WORLD, outlive_training)) == [(1, [WORLD])] * WORLD


def test_one_process_is_alone() -> None:
    group = job_group()
    assert (group.rank, group.world) == (0, 1)
    assert not dist.is_initialized()
