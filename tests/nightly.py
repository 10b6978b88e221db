"""How much more is tried at night."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("CNR_NIGHTLY_FACTOR", "1"))
"""``make nightly`` sets it: so many times the histories that ``make test`` draws."""


def histories(usual: int) -> int:
    """How many histories a stateful test draws."""
    return usual * FACTOR
