"""Processes that fold a version, to be stopped or killed at any storage operation.

Run as a script, which has imported everything and has no thread, so that it can fork. Each line on standard input is a
command, answered by one line of JSON on standard output:

``{"url", "at", "signal"}``
    Fork a process that folds the store's latest version, and sends itself that signal at storage operation number `at`,
    counted from 0 (-1: never); its process id.
``{"wait": PID}``
    Wait until it ends or stops: ``folded``, ``already folded``, an error's name, or ``killed`` or ``stopped``.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import cnr_codecs.plugins.zarr  # noqa: F401 - once here, rather than by zarr in each process
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_codecs import LosslessRows, RowCodec, UniformRows, decode_into, parse
from cnr_store import compact
from tests.test_store.support.fork_server import answer, commands

OUTCOMES = [
    "folded",
    "already folded",
    "VersionNotFoundError",
    "SaveError",
    "CorruptionError",
    "another error",
]


def run(url: str, at: int, sent: int) -> str:
    def fault(operation: str, key: str, index: int) -> Fault:
        if index == at:
            os.kill(os.getpid(), sent)
            time.sleep(0)  # where a signal sent to oneself arrives at the latest
        return None

    try:
        return compact(FaultyBackend(open_backend(url), fault, reads=True)).outcome
    except Exception as error:  # noqa: BLE001 - the test asks for its name
        return type(error).__name__


def warm_up() -> None:
    """Do once for all processes what takes seconds: compiled code. No thread is started: forks stay sound."""
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    codecs: list[RowCodec] = [LosslessRows(), UniformRows(bits=4)]
    for codec in codecs:
        for offsets in (None, np.arange(4)):
            payload = parse(
                codec.encode_rows(rows, offsets, 8 if offsets is not None else 4, element="float32")
            )
            decode_into(payload, np.empty((payload.rows, 16), np.float32), np.ones(payload.rows, np.uint8))


def main() -> None:
    warm_up()
    for command in commands():
        if "wait" in command:
            _, status = os.waitpid(command["wait"], os.WUNTRACED)
            if os.WIFSTOPPED(status):
                answer("stopped")
            elif os.WIFSIGNALED(status):
                answer("killed" if os.WTERMSIG(status) == signal.SIGKILL else status)
            else:
                answer(OUTCOMES[os.WEXITSTATUS(status)])
            continue
        child = os.fork()
        if child == 0:
            outcome = run(command["url"], command["at"], command["signal"])
            os._exit(OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES) - 1)
        answer(child)


if __name__ == "__main__":
    main()
