"""Programs that end as the interpreter ends them: one process that has imported everything, and forks one for each.

Run as a script. Each line on standard input is a command, answered by one line of JSON on standard output:

``{"program", "arguments", "side"}``
    Run a program as ``python -c`` does, and wait for its end: its exit status, or its signal's number below 0. What it
    writes is in the files ``stdout`` and ``stderr`` of the folder ``side``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.test_store.support import killed_trainer
from tests.test_store.support.fork_server import answer, commands


def serve() -> Any:
    """Answer commands. Returns in each fork, with its command, and in the first process at the end, with None."""
    for command in commands():
        child = os.fork()
        if child == 0:
            return command
        answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return None


def redirect(side: Path) -> None:
    """Read nothing, and write to files."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(side / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    killed_trainer.warm_up()
    if job := serve():
        redirect(Path(job["side"]))
        sys.argv[1:] = job["arguments"]
        exec(job["program"], {"__name__": "__main__"})
