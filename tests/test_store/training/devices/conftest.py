"""Tests run on a CUDA device where there is one. Else tables on the CPU are taken for those of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cnr_codecs import Scheme, Segment
from cnr_store.training.devices import staging, support
from cnr_store.training.devices.encode import RowsFromDevice
from cnr_store.training.devices.staging import DeviceRows
from tests.test_store.training.devices.device import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m gpu`` runs the tests of this folder, too, where they run on a GPU."""
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in own if DEVICE.type == "cuda" else ():
        item.add_marker("gpu")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables on the CPU are taken for those of a device, where there is none."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(support, "is_elsewhere", lambda device: True)


@pytest.fixture
def unproven() -> Iterator[None]:
    """No codec is proven yet, nor afterwards."""
    staging._is_proven.cache_clear()
    yield
    staging._is_proven.cache_clear()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the arrays that were quantized on their device, in order."""
    paths: list[str] = []
    encode_staged = staging.encode_staged

    def noted(path: str, *others: Any) -> RowsFromDevice | None:
        found = encode_staged(path, *others)
        paths.extend([path] * (found is not None))
        return found

    monkeypatch.setattr("cnr_store.training.saving.snapshot.encode_staged", noted)
    return paths


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Scheme]:
    """Schemes of the segments that loads decoded on the device."""
    schemes: list[Scheme] = []

    class Noted(DeviceRows):
        def write(self, segments: Sequence[Segment], first_row: int) -> bool:
            is_written = super().write(segments, first_row)
            schemes.extend({each.scheme for each in segments} if is_written else ())
            return is_written

    monkeypatch.setattr("cnr_store.training.loading.restore.DeviceRows", Noted)
    return schemes


def stays_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host quantize from now on."""
    monkeypatch.setattr(staging, "can_encode", lambda *_: False)
