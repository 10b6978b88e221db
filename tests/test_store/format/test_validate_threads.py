"""Documents that many threads prove at once, in a process that has proven none before."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading
from cnr_store.format.record import Record
from cnr_store.format.validate import proven
from cnr_store.format.record_document import prove_policy

sys.setswitchinterval(1e-6)
barrier, found = threading.Barrier(8), []

def prove():
    barrier.wait()
    prove_policy({"seconds": {"write": 1.0}, "budget": {"percent": 0.01, "rms_step": 0.1}})
    try:
        proven({}, Record, "it")
    except ValueError as error:
        found.append(str(error))

threads = [threading.Thread(target=prove) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 8 and len(set(found)) == 1, found
"""


def test_first_proofs_in_many_threads_at_once() -> None:
    """The library that proves them crashed the interpreter, where one thread met a class that another looked at."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
