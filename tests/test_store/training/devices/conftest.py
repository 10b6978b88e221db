"""Kernels run on a CUDA device where there is one, else by Triton's interpreter; without Triton their tests skip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_codecs import Scheme, Segment
from cnr_store.training.devices import decode as decoding
from cnr_store.training.devices import staging, support
from cnr_store.writing.plan import EncodedRows
from tests.test_store.training.devices.device import DEVICE, kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m gpu`` runs the tests of this folder, too, where they run on a GPU."""
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in own if DEVICE.type == "cuda" else ():
        item.add_marker("gpu")


@pytest.fixture(scope="module", autouse=True)
def _like_a_device() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of NaN and overflows; devices don't."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the arrays that were quantized on their device, in order."""
    paths: list[str] = []
    encode_staged = staging.encode_staged

    def noted(path: str, *others: Any) -> EncodedRows | None:
        found = encode_staged(path, *others)
        paths.extend([path] * (found is not None))
        return found

    monkeypatch.setattr("cnr_store.training.saving.snapshot.encode_staged", noted)
    return paths


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables on the CPU are taken for those of a device, where there is none."""
    found = kernels()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(support, "is_elsewhere", lambda device: device.type == "cpu")

        def quiet(launch: Callable[..., None], *arguments: Any) -> None:
            with np.errstate(all="ignore"):  # on the threads of a load, too
                launch(*arguments)

        for name in ("decode_uniform", "decode_integers"):
            monkeypatch.setattr(found, name, partial(quiet, getattr(found, name)))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Scheme]:
    """Schemes of the segments that were decoded on the device."""
    schemes: list[Scheme] = []
    write = decoding.DeviceRows.write

    def noted(self: Any, segments: Sequence[Segment], first_row: int) -> list[Segment]:
        left = write(self, segments, first_row)
        schemes.extend({each.scheme for each in segments} - {each.scheme for each in left})
        return left

    monkeypatch.setattr(decoding.DeviceRows, "write", noted)
    return schemes
