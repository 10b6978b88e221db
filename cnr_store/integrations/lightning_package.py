"""The names of Lightning, from whichever of its two packages the program uses."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.plugins import CheckpointIO
    from lightning.pytorch.utilities.exceptions import SIGTERMException
else:
    try:
        if find_spec("lightning") is None or (
            "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        ):
            from pytorch_lightning import Callback, LightningModule, Trainer, callbacks
            from pytorch_lightning.plugins import CheckpointIO
            from pytorch_lightning.utilities.exceptions import SIGTERMException
        else:
            from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
            from lightning.pytorch.plugins import CheckpointIO
            from lightning.pytorch.utilities.exceptions import SIGTERMException
    except ModuleNotFoundError as error:
        raise ImportError(
            "this needs Lightning: pip install 'cnr-store[lightning]'", name=error.name
        ) from error

__all__ = ["Callback", "CheckpointIO", "LightningModule", "SIGTERMException", "Trainer", "callbacks"]
