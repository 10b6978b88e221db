"""What an untouched store reads as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_store.support.tampering import read_all


@pytest.fixture(scope="module")
def exact(base: Path) -> dict[str, Any]:
    """What each reader returns of the store `base`."""
    found = read_all(base)
    assert not any(isinstance(value, Exception) for value in found.values())
    return found
