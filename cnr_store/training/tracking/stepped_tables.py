"""Which tables an optimizer steps, without looking through all its parameters at each step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.optim import Optimizer

from cnr_store.training.tracking.table_tracker import TableTracker

Stepped = list[tuple[int, TableTracker]]


class SteppedTables:
    """Finds the watched tables among the parameters of an optimizer.

    What was found is kept for as long as the groups hold the same parameters. They are told apart by id: that of a
    table's parameter is never another's, as its watch keeps it alive.
    """

    def __init__(self, watches: Iterable[TableTracker]) -> None:
        self._watches = {id(watch.table.parameter): watch for watch in watches}
        self._found: weakref.WeakKeyDictionary[Optimizer, tuple[list[list[int]], Stepped]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, optimizer: Optimizer) -> Stepped:
        """The tables of an optimizer, each with the position of its parameter group."""
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        before, found = self._found.get(optimizer, (None, []))
        if ids != before:
            found = [
                (position, self._watches[parameter])
                for position, group in enumerate(ids)
                for parameter in group
                if parameter in self._watches
            ]
            self._found[optimizer] = ids, found
        return found

    def follow(self, watch: TableTracker, parameter: object) -> None:
        """From now on, `parameter` is that of the watch's table."""
        self._watches.pop(id(watch.table.parameter), None)
        self._watches[id(parameter)] = watch
        self._found.clear()
