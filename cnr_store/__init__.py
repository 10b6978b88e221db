"""A checkpoint store for recommendation models: changed rows only, quantized, as Zarr v3 on any fsspec backend.

`Checkpointer`, `save` and `load` need torch; everything else reads a store without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.salvage import SalvagedRows
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
    OutageError,
    RanksError,
    ReadOnlyError,
    SaveError,
    SkippedError,
    StateError,
    SupersededError,
    TrackingError,
    UnsupportedModelError,
    VersionNotFoundError,
)
from cnr_store.following.follow import Update, follow
from cnr_store.maintenance.collection.pins import pin, pin_reasons, pins, tag, tags, unpin, untag
from cnr_store.maintenance.collection.retention import GcReport, gc
from cnr_store.maintenance.folding.compact import CompactReport, compact
from cnr_store.maintenance.repairing.repair import RepairReport, repair
from cnr_store.maintenance.verification.report import Finding, Leftovers, VerifyReport
from cnr_store.maintenance.verification.verify import verify
from cnr_store.options import Failures, Job, Limits, Retention, Tracking
from cnr_store.policies.simulation import SimulatedSave, Trace, simulate
from cnr_store.policies.widths import ExpectedRestores
from cnr_store.reading.blocks import ArrayInfo, Block
from cnr_store.reading.diff import ArrayDiff, diff
from cnr_store.reading.export import export
from cnr_store.reading.opening import open_version as open  # noqa: A004 - `cnr_store.open` is the public name
from cnr_store.reading.opening import rows, state_dict, state_of, versions, view

if TYPE_CHECKING:
    from cnr_store.training.checkpointer import Checkpointer
    from cnr_store.training.data.tracked_reader import TrackedReader
    from cnr_store.training.importing.import_file import import_file
    from cnr_store.training.loading.load_result import Restored
    from cnr_store.training.once import load, save
    from cnr_store.training.process.preemption import Preemption
    from cnr_store.training.saving.explanation import ExplainedTable, SaveStats
    from cnr_store.training.saving.pending_save import PendingSave

__version__ = "0.1.0"
_TRAINING = {
    "Checkpointer": "checkpointer",
    "PendingSave": "saving.pending_save",
    "SaveStats": "saving.explanation",
    "ExplainedTable": "saving.explanation",
    "Preemption": "process.preemption",
    "save": "once",
    "load": "once",
    "Restored": "loading.load_result",
    "TrackedReader": "data.tracked_reader",
    "import_file": "importing.import_file",
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
    "Retention",
    "Failures",
    "Limits",
    "Tracking",
    "Job",
    "save",
    "load",
    "Restored",
    "SalvagedRows",
    "PendingSave",
    "SaveStats",
    "ExplainedTable",
    "Preemption",
    "TrackedReader",
    "versions",
    "open",
    "view",
    "state_dict",
    "state_of",
    "rows",
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
    "pin_reasons",
    "tag",
    "untag",
    "tags",
    "simulate",
    "SimulatedSave",
    "Trace",
    "ExpectedRestores",
    "verify",
    "VerifyReport",
    "Finding",
    "Leftovers",
    "repair",
    "RepairReport",
    "CheckpointError",
    "EmptyStoreError",
    "VersionNotFoundError",
    "FormatError",
    "CorruptionError",
    "RanksError",
    "SaveError",
    "BaseLostError",
    "SkippedError",
    "OutageError",
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
