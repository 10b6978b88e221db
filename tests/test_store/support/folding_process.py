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

from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
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


def main() -> None:
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
