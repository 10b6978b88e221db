"""Flags the rows that TorchRec's lookups say they looked up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from cnr_store.training.distributed.torchrec import ShardedModule
from cnr_store.training.distributed.torchrec_lookups import LookupHooks
from cnr_store.training.tracking.table_tracker import STATE_OUTSIDE, TableTracker
from cnr_store.training.tracking.version_counter import VersionCounter


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
        self._slots = {
            table.name: [piece.tensor for slot in table.slots.values() for piece in slot.pieces]
            for module in modules
            for table in module.tables
        }
        self._counters: dict[str, list[VersionCounter]] = {}
        self.acknowledge()

    def check(self) -> None:
        """Make tables whole whose lookups may not have been seen. Call it before the rows flagged are taken."""
        for hooks in self._hooks:
            reason = hooks.check()
            for table in hooks.sharded.tables if reason else ():
                self._trackers[table.name].make_whole(str(reason))

        for name, tensors in self._slots.items():
            # FBGEMM changes state without counting: what torch counts was changed by someone else.
            if any(map(VersionCounter.count_changes, self._counters[name], tensors)):
                self._trackers[name].make_whole(STATE_OUTSIDE)
                self.acknowledge(name)

    def acknowledge(self, key: str | None = None) -> None:
        """Take every change so far of what is kept for the rows of a table, or of all, as flagged."""
        for name in self._slots if key is None else self._slots.keys() & {key}:
            self._counters[name] = list(map(VersionCounter, self._slots[name]))

    def _mark(self, key: str, _first_row: int, rows: torch.Tensor) -> None:
        self._trackers[key].mark(rows)
