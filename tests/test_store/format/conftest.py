"""What an untouched store reads as, and copies of it to forge."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.test_store.format.wrong_values import Forge
from tests.test_store.support.tampering import Forgery, read_all


@pytest.fixture(scope="module")
def exact(base: Path) -> dict[str, Any]:
    """What each reader returns of the store `base`."""
    found = read_all(base)
    assert not any(isinstance(value, Exception) for value in found.values())
    return found


@pytest.fixture
def forge(base: Path, tmp_path: Path) -> Forge:
    numbers = itertools.count()
    return lambda: Forgery(base, tmp_path / str(next(numbers)))
