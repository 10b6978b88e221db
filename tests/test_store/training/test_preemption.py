"""A process that is told to end saves between two steps, and handles signals as before afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

import cnr_store
from cnr_store import Checkpointer, ClosedError, OptionError
from tests.test_store.support.lasting_store import assert_newest, change, make_model


def test_a_signal_ends_the_loop_with_a_save(tmp_path: Path) -> None:
    model = make_model()
    with Checkpointer(tmp_path, model, bits=32, limits=cnr_store.Limits(overlap="skip")) as checkpointer:
        with checkpointer.preemption() as preempted:
            for step in range(1, 100):
                change(checkpointer, model, [step])
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if preempted:
                    checkpointer.save(step, overlap="wait")
                    break
    assert preempted.signal is signal.SIGTERM
    assert [info.step for info in cnr_store.versions(tmp_path)] == [3]
    assert_newest(tmp_path, model)


def test_a_signal_within_a_save_disturbs_nothing(tmp_path: Path) -> None:
    class Reader:
        def state_dict(self) -> dict[str, int]:
            signal.raise_signal(signal.SIGTERM)
            return {"batch": 4}

    model = make_model()
    with Checkpointer(tmp_path, model, bits=32) as checkpointer, checkpointer.preemption() as preempted:
        assert not preempted
        assert preempted.signal is None
        info = checkpointer.save(4, reader=Reader()).result()
        assert preempted
    assert cnr_store.versions(tmp_path) == [info]


def test_handlers_are_put_back_and_the_first_signal_is_kept(tmp_path: Path) -> None:
    came: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with Checkpointer(tmp_path, make_model()) as checkpointer:
            with (
                pytest.raises(KeyError),
                checkpointer.preemption((signal.SIGUSR1, signal.SIGUSR2)) as preempted,
            ):
                signal.raise_signal(signal.SIGUSR2)
                signal.raise_signal(signal.SIGUSR1)
                raise KeyError
        assert preempted.signal is signal.SIGUSR2
        assert not came
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("signals", [(), (signal.SIGKILL,), (signal.SIGSTOP,), "TERM", (0,), 15, None])
def test_signals_that_can_not_be_handled(tmp_path: Path, signals: Any) -> None:
    with Checkpointer(tmp_path, make_model()) as checkpointer:
        with pytest.raises(OptionError, match="give signals that can be handled, such as"):
            with checkpointer.preemption(signals):
                pass


def test_another_thread_can_not_watch(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def watch() -> None:
        try:
            with checkpointer.preemption():
                pass
        except OptionError as error:
            caught.append(error)

    with Checkpointer(tmp_path, make_model()) as checkpointer:
        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
    assert "on the main thread alone" in str(caught[0])


def test_a_closed_checkpointer_watches_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, make_model())
    checkpointer.close()
    with pytest.raises(ClosedError):
        checkpointer.preemption()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
def _begin_and_wait(begun: Event) -> None:
    begun.set()
    threading.Event().wait()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """As a pool's workers are, when the block that made them is left."""
    with Checkpointer(tmp_path, make_model()) as checkpointer, checkpointer.preemption() as preempted:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=_begin_and_wait, args=(begun,))
        child.start()
        assert begun.wait(60)  # Python drops a signal that comes while it forks
        child.terminate()
        child.join(60)
        ended = child.exitcode
        child.kill()
        assert not preempted
    assert ended == -signal.SIGTERM
