"""Flags the rows that TorchRec's lookups say they looked up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from cnr_store.training.distributed.torchrec import ShardedModule
from cnr_store.training.distributed.torchrec_lookups import LookupHooks
from cnr_store.training.tracking.table_tracker import TableTracker


class ShardedLookups:
    """The hooks on TorchRec's modules. They keep no `Tracker` alive.

    Parameters
    ----------
    modules
        TorchRec's.
    trackers
        Of their tables, among others.
    hooks
        Removes the hooks when it is closed.
    """

    def __init__(
        self, modules: Sequence[ShardedModule], trackers: Sequence[TableTracker], hooks: ExitStack
    ) -> None:
        self._trackers = {tracker.table.key: tracker for tracker in trackers} if modules else {}
        self._hooks = [LookupHooks(module, self._mark) for module in modules]
        for each in self._hooks:
            hooks.callback(each.remove)

    def check(self) -> None:
        """Make tables whole whose lookups may not have been seen. Call it before the rows flagged are taken."""
        for hooks in self._hooks:
            reason = hooks.check()
            for table in hooks.sharded.tables if reason else ():
                self._trackers[table.name].make_whole(str(reason))

    def _mark(self, key: str, _first_row: int, rows: torch.Tensor) -> None:
        self._trackers[key].mark(rows)
