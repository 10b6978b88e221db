"""Where the tests of kernels run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from cnr_store.training.devices.support import kernels_on

os.environ["CNR_GPU_KERNELS"] = "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels() -> Any:
    """The kernels; the test is skipped where they can't run."""
    pytest.importorskip("triton", reason="kernels need Triton (extra gpu)")
    found = kernels_on(DEVICE)
    assert found is not None, "Triton is there, and its kernels don't run"
    return found
