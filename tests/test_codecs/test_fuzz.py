"""A process of its own decodes a hundred thousand spoiled payloads, and survives with little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cnr_codecs import Scheme

PAYLOADS = 100_000
PROGRAM = Path(__file__).with_name("fuzz_payloads.py")


@pytest.mark.slow
def test_spoiled_payloads_decode_or_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(PAYLOADS), "20261121"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ended by {done.returncode}:\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    reached = found["reached"]
    assert sum(reached.values()) >= PAYLOADS
    assert reached["segments"] + reached["decoded"] + reached["decoded at once"] >= 0.3 * PAYLOADS
    assert reached["decoded"] >= 0.1 * PAYLOADS
    assert reached["decoded at once"] >= 0.01 * PAYLOADS
    # Each scheme was decoded from payloads that were spoiled.
    assert all(found["schemes"].get(str(int(scheme)), 0) > PAYLOADS / 100 for scheme in Scheme)
    assert found["grown_bytes"] < 128 << 20
