"""The door to what knows TorchRec, which is imported once a program has imported TorchRec, and never for another."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def torchrec() -> Any:
    """The module that knows TorchRec; None in a program that has not imported TorchRec."""
    return import_module("cnr_store.training.distributed.torchrec") if "torchrec" in sys.modules else None
