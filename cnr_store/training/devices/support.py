"""Whether tables are on a device, and what its failures mean to a save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cnr_store.errors import SaveError


def is_elsewhere(device: torch.device) -> bool:
    """Whether tables on a device are not in host memory. Whoever takes them another way than the host's asks this."""
    return device.type != "cpu"


@contextmanager
def failing_saves(device: torch.device, what: str) -> Iterator[None]:
    """Have what a device raises, as one that is lost does, fail a save and not training."""
    try:
        yield
    except RuntimeError as error:
        if not is_elsewhere(device):
            raise
        raise SaveError(
            f"{what}: {device} failed: {error}; the rows that changed stay flagged. If the device is lost, restart "
            "training from the newest version"
        ) from error
