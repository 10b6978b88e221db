"""Which tables an optimizer steps, without a search through all its parameters at each step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.optim import Optimizer

from cnr_store.training.tracking.table_tracker import TableTracker

Stepped = list[tuple[int, TableTracker]]


class SteppedTables:
    """Finds the tracked tables among the parameters of an optimizer.

    The result is kept while the groups hold the same parameters. Parameters are compared by id: a table's tracker keeps
    its parameter alive, so no other one gets that id.
    """

    def __init__(self, trackers: Iterable[TableTracker]) -> None:
        self._trackers = {id(tracker.table.parameter): tracker for tracker in trackers}
        self._stepped: weakref.WeakKeyDictionary[Optimizer, tuple[list[list[int]], Stepped]] = (
            weakref.WeakKeyDictionary()
        )

    def by(self, optimizer: Optimizer) -> Stepped:
        """The tables that an optimizer steps, each with the position of its parameter group."""
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        ids_before, stepped = self._stepped.get(optimizer, (None, []))
        if ids != ids_before:
            stepped = [
                (position, self._trackers[parameter])
                for position, group in enumerate(ids)
                for parameter in group
                if parameter in self._trackers
            ]
            self._stepped[optimizer] = ids, stepped
        return stepped

    def replace_parameter(self, tracker: TableTracker, parameter: object) -> None:
        """Look for `parameter` instead of the one that the tracker's table had."""
        self._trackers.pop(id(tracker.table.parameter), None)
        self._trackers[id(parameter)] = tracker
        self._stepped.clear()
