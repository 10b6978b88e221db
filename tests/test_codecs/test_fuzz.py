"""A process of its own decodes 5,000 spoiled payloads, at night over a million, and survives with little memory."""

import json
import secrets
import subprocess
import sys

import pytest

from cnr_codecs import Scheme
from tests.nightly import NIGHT
from tests.paths import ROOT

PAYLOADS = 100_000
PROGRAM = "tests.test_codecs.fuzz_payloads"


@pytest.mark.slow
def test_spoiled_payloads_decode_or_are_refused() -> None:
    check_spoiled(PAYLOADS if NIGHT else PAYLOADS // 20, 20261121)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_million_spoiled_payloads_of_a_new_seed_decode_or_are_refused() -> None:
    check_spoiled(10 * PAYLOADS, secrets.randbits(32))


def check_spoiled(payloads: int, seed: int) -> None:
    command = [sys.executable, "-m", PROGRAM, str(payloads), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"seed {seed} ended by {done.returncode}:\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    reached = found["reached"]
    assert sum(reached.values()) >= payloads
    assert reached["segments"] + reached["decoded"] + reached["decoded at once"] >= 0.3 * payloads
    assert reached["decoded"] >= 0.1 * payloads
    assert reached["decoded at once"] >= 0.01 * payloads
    # Each scheme was decoded from payloads that were spoiled.
    assert all(found["schemes"].get(str(int(scheme)), 0) > payloads / 100 for scheme in Scheme)
    # And so were relative rows, on all kinds of grids.
    kinds = "steps", "floating grids", "exact"
    assert all(found["composed"].get(kind, 0) > payloads / 1000 for kind in kinds)
    assert found["grown_bytes"] < 128 << 20
