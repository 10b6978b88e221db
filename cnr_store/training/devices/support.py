"""Whether kernels run on a device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

log = logging.getLogger("cnr_store")
_INSTEAD = "torch's own operations flag rows there, and the host quantizes them"


def is_elsewhere(device: torch.device) -> bool:
    """Whether tables on a device are not in host memory. Whoever takes them another way than the host's asks this."""
    return device.type != "cpu"


@cache
def kernels_on(device: torch.device) -> Any:
    """The kernels, `devices.kernels.launches`, if they run on a device; None if not, which is logged once for a GPU.

    They do on CUDA devices where Triton is (extra ``gpu``) and works, and on the CPU by Triton's interpreter, which is
    for tests. The first call for a device runs a kernel there and waits for it, so it must not be captured in a graph.
    """
    is_gpu, is_interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    if not is_gpu and not (is_interpreted and device.type == "cpu"):
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
