"""Whether kernels run on a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from cnr_store.errors import SaveError

log = logging.getLogger("cnr_store")
_INSTEAD = "torch's own operations flag rows there, and the host quantizes and decodes them"
_SWITCH = "CNR_GPU_KERNELS"


def is_elsewhere(device: torch.device) -> bool:
    """Whether tables on a device are not in host memory. Whoever takes them another way than the host's asks this."""
    return device.type != "cpu"


@contextmanager
def failing_saves(device: torch.device, what: str) -> Iterator[None]:
    """Have what a device raises, as one that is lost does, fail a save and not training.

    Raises
    ------
    SaveError
        The device could not do it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_elsewhere(device):
            raise
        raise SaveError(
            f"{what}: {device} failed: {error}; the rows that changed stay flagged. If the device is lost, restart "
            "training from the newest version"
        ) from error


@cache
def kernels_on(device: torch.device) -> Any:
    """The kernels, `devices.kernels.launches`, if they run on a device; None if not, which is logged once for a GPU.

    They do on CUDA devices where Triton is (extra ``gpu``) and works, if ``CNR_GPU_KERNELS=1`` asks for them: they have
    not run on hardware yet. On the CPU they run by Triton's interpreter, which is for tests. The first call for a
    device runs a kernel there and waits for it, so it must not be captured in a graph.
    """
    is_gpu, is_interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    if not is_gpu and not (is_interpreted and device.type == "cpu"):
        return None
    if is_gpu and os.environ.get(_SWITCH) != "1":
        log.info("%s: kernels are off (%s=1 turns them on), so %s", device, _SWITCH, _INSTEAD)
        return None
    if find_spec("triton") is None:
        if is_gpu:
            log.warning("%s: there is no Triton, so %s; install cnr-store[gpu]", device, _INSTEAD)
        return None
    from cnr_store.training.devices.kernels import launches

    try:
        words = torch.zeros(2, dtype=torch.int32, device=device)
        launches.flag(words[:1], 2, torch.ones(1, dtype=torch.int64, device=device), words[1:])
        found: object = words.tolist()
    except Exception as error:  # noqa: BLE001 - Triton raises what its compilers and drivers do
        found = f"{type(error).__name__}: {error}"
    if found == [2, 0]:
        return launches
    log.warning("%s: a trial of Triton's kernels failed (%s), so %s", device, found, _INSTEAD)
    return None
