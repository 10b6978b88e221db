"""A checkpoint store for recommendation models: changed rows only, quantized, as Zarr v3 on any fsspec backend.

`Checkpointer`, `save` and `load` need torch; everything else reads a store without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cnr_store.bits import ExpectedRestores
from cnr_store.catalog import VersionInfo
from cnr_store.errors import (
    BaseLostError,
    BusyError,
    CheckpointError,
    ClosedError,
    CorruptionError,
    EmptyStoreError,
    FormatError,
    ModelMismatchError,
    OptionError,
    ReadOnlyError,
    SaveError,
    SkippedError,
    StateError,
    SupersededError,
    TrackingError,
    UnsupportedModelError,
    VersionNotFoundError,
)
from cnr_store.reading.access import open_version as open  # noqa: A004 - `cnr_store.open` is the public name
from cnr_store.reading.access import state_dict, versions, view
from cnr_store.reading.diff import ArrayDiff, diff
from cnr_store.reading.export import export
from cnr_store.reading.follow import ArrayInfo, Block, Update, follow
from cnr_store.simulation import SimulatedSave, Trace, simulate
from cnr_store.upkeep.compact import CompactReport, compact
from cnr_store.upkeep.findings import Finding, Leftovers, VerifyReport
from cnr_store.upkeep.pins import pin, pins, unpin
from cnr_store.upkeep.retention import GcReport, gc
from cnr_store.upkeep.verify import verify

if TYPE_CHECKING:
    from cnr_store.training.checkpointer import Checkpointer, load, save
    from cnr_store.training.importing import import_file
    from cnr_store.training.pending import PendingSave
    from cnr_store.training.preemption import Preemption
    from cnr_store.training.reader import TrackedReader
    from cnr_store.training.restore import Restored

__version__ = "0.1.0"
_TRAINING = {
    "Checkpointer": "checkpointer",
    "PendingSave": "pending",
    "Preemption": "preemption",
    "save": "checkpointer",
    "load": "checkpointer",
    "Restored": "restore",
    "TrackedReader": "reader",
    "import_file": "importing",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.training.{_TRAINING[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"cnr_store.{name} needs torch: pip install 'cnr-store[torch]'", name="torch"
        ) from error


__all__ = [
    "Checkpointer",
    "save",
    "load",
    "Restored",
    "PendingSave",
    "Preemption",
    "TrackedReader",
    "versions",
    "open",
    "view",
    "state_dict",
    "diff",
    "ArrayDiff",
    "follow",
    "Update",
    "Block",
    "ArrayInfo",
    "export",
    "import_file",
    "VersionInfo",
    "compact",
    "CompactReport",
    "gc",
    "GcReport",
    "pin",
    "unpin",
    "pins",
    "simulate",
    "SimulatedSave",
    "Trace",
    "ExpectedRestores",
    "verify",
    "VerifyReport",
    "Finding",
    "Leftovers",
    "CheckpointError",
    "EmptyStoreError",
    "VersionNotFoundError",
    "FormatError",
    "CorruptionError",
    "SaveError",
    "BaseLostError",
    "SkippedError",
    "TrackingError",
    "BusyError",
    "SupersededError",
    "ClosedError",
    "OptionError",
    "ReadOnlyError",
    "ModelMismatchError",
    "UnsupportedModelError",
    "StateError",
]
