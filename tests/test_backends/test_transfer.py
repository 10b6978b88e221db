"""Bounds, order and failures of concurrent work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_backends import ArgumentError, BackendError, Transfer


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 30))
def test_results_come_in_order_within_the_bound(workers: int, in_flight: int, items: int) -> None:
    pulled = 0

    def source() -> Iterator[int]:
        nonlocal pulled
        for item in range(items):
            pulled += 1
            yield item

    with Transfer(workers, in_flight) as transfer:
        for count, result in enumerate(transfer.map(lambda item: item * item, source())):
            assert result == count * count
            assert pulled - count <= in_flight
    assert pulled == items


def test_calls_run_beside_each_other() -> None:
    together = threading.Barrier(3)

    def call(item: int) -> int:
        together.wait(timeout=30)
        return item

    with Transfer(3, 3) as transfer:
        assert list(transfer.map(call, range(6))) == list(range(6))


def test_items_are_pulled_by_the_consumer_as_it_takes_results() -> None:
    threads: list[threading.Thread] = []

    def source() -> Iterator[int]:
        for item in range(10):
            threads.append(threading.current_thread())
            yield item

    with Transfer(2, 3) as transfer:
        results = transfer.map(lambda item: item, source())
        assert threads == []
        assert next(results) == 0
        assert threads == [threading.current_thread()] * 3
        assert next(results) == 1
        assert len(threads) == 4


def test_the_first_failure_is_raised_and_stops_the_rest() -> None:
    began: list[int] = []
    failed, running = threading.Event(), threading.Event()

    def call(item: int) -> int:
        began.append(item)
        if item == 0:
            running.set()
            assert failed.wait(30)
            raise ValueError("later, though of an earlier item")
        assert running.wait(30)
        failed.set()
        raise KeyError("first")

    pulled: list[int] = []

    def source() -> Iterator[int]:
        for item in range(100):
            pulled.append(item)
            yield item

    with Transfer(2, 5) as transfer:
        with pytest.raises((KeyError, ValueError)) as caught:
            list(transfer.map(call, source()))
        assert sorted(began) == [0, 1]
        assert len(pulled) <= 5
        assert isinstance(caught.value, KeyError)
        assert list(transfer.map(str, [1, 2])) == ["1", "2"]


def test_running_calls_end_before_the_failure_is_raised() -> None:
    failed = threading.Event()
    ended: list[int] = []

    def call(item: int) -> None:
        if item == 1:
            failed.set()
            raise OSError("failed")
        assert failed.wait(30)
        ended.append(item)

    with Transfer(2, 2) as transfer:
        with pytest.raises(OSError, match="failed"):
            list(transfer.map(call, range(2)))
        assert ended == [0]


def test_a_failing_source_is_raised_after_running_calls() -> None:
    ended: list[int] = []
    failed = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        failed.set()
        raise RuntimeError("no more")

    def call(item: int) -> None:
        assert failed.wait(30)
        ended.append(item)

    with Transfer(1, 2) as transfer:
        with pytest.raises(RuntimeError, match="no more"):
            list(transfer.map(call, source()))
        assert ended == [0]


def test_a_consumer_may_stop_early() -> None:
    began: list[int] = []
    with Transfer(1, 3) as transfer:
        results = transfer.map(began.append, range(100))
        next(results)
        results.close()
        assert list(transfer.map(str, [1])) == ["1"]
    assert len(began) <= 3


def test_a_closed_transfer_does_not_pretend_to_work() -> None:
    with Transfer(1, 1) as transfer:
        assert list(transfer.map(str, [1])) == ["1"]
    with pytest.raises(BackendError, match="closed"):
        list(transfer.map(str, [1]))


def test_an_interrupt_leaves_no_call_that_close_does_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a thread is being started: the pool has not noted it, and it runs."""
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    calls: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("cnr-transfer"):
            assert began.wait(30)
            raise KeyboardInterrupt

    def call(item: int) -> None:
        calls.append(item)
        began.set()
        assert goes_on.wait(30)
        ended.set()

    transfer = Transfer(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(transfer.map(call, range(3)))
    closing = threading.Thread(target=transfer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    goes_on.set()
    closing.join(30)
    assert ended.is_set()
    assert calls == [0]


def test_a_call_that_an_interrupt_left_behind_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before a started thread has come to its first line of ours: it comes there when all is closed."""
    closed, calls = threading.Event(), list[int]()
    threads: list[threading.Thread] = []
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("cnr-transfer"):
            threads.append(thread)
            raise KeyboardInterrupt

    def late(pool: ThreadPoolExecutor, call: Any, /, *arguments: Any) -> Any:
        return submit(pool, lambda: closed.wait(30) and call(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", late)
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), Transfer(1, 2) as transfer:
            list(transfer.map(calls.append, range(3)))
    closed.set()
    for thread in threads:
        thread.join(30)
    assert calls == []
    assert threads


def test_results_left_untaken_do_not_block() -> None:
    with Transfer(1, 8) as transfer:
        results = transfer.map(str, range(100))
        assert next(results) == "0"
    results.close()


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20))
def test_bytes_in_flight_are_bounded(sizes: list[int], most_bytes: int) -> None:
    under_way: list[int] = []
    lock = threading.Lock()

    def call(size: int) -> int:
        with lock:
            under_way.append(size)
        return size

    with Transfer(3, 8, most_bytes) as transfer:
        taken = 0
        for size in transfer.map(call, sizes, lambda size: size):
            assert size == sizes[taken]
            with lock:
                begun = sum(under_way)
            # The one just taken was in flight until now.
            assert begun - sum(sizes[:taken]) <= max(most_bytes, max(sizes))
            taken += 1
    assert taken == len(sizes)


def test_a_failure_is_seen_before_more_is_begun() -> None:
    begun: list[int] = []

    def call(item: int) -> None:
        begun.append(item)
        raise OSError(f"failed on {item}")

    with Transfer(1, 50) as transfer:

        def source() -> Iterator[int]:
            for item in range(100):
                yield item
                # The only worker gets to this when it is done with the item.
                assert list(transfer.map(str, [item])) == [str(item)]

        pulled = source()
        with pytest.raises(OSError, match="failed on 0"):
            list(transfer.map(call, pulled))
        assert next(pulled) == 2
    assert begun == [0]


def test_linked_maps_stop_together() -> None:
    """A failure behind ends the work in front of it, too."""
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        return item

    def send(item: int) -> None:
        raise OSError("failed")

    with (
        Transfer(1, 2) as making,
        Transfer(1, 2) as sending,
        pytest.raises(OSError, match="failed"),
        closing(making.map(make, range(1000))) as items,
        closing(sending.map(send, items)) as sent,
    ):
        list(sent)
    assert len(made) <= 6


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0), (-1, 1), (1, 1, 0)])
def test_bounds_are_positive(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        Transfer(*bounds)
