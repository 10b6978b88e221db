"""Whether what an optimizer keeps for the rows of a table was changed since it was last looked at."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from cnr_store.training.model.optimizer_state import follows_rows
from cnr_store.training.tracking.version_counter import VersionCounter, counter_of


class SlotCounters:
    """The version counters of what one optimizer keeps for the rows of a table: of `slots`, by key."""

    __slots__ = ("_counters",)

    def __init__(self, slots: Mapping[str, torch.Tensor]) -> None:
        self._counters = {slot: counter_of(tensor) for slot, tensor in slots.items()}

    def count_changes(self, state: Mapping[str, object], written: Collection[str] | None = None) -> float:
        """The most changes of one slot in `state`, the optimizer's for this parameter.

        Infinity for a change of a slot that is not among `written`, if these are given.
        """
        most: float = 0
        for slot, counter in self._counters.items():
            tensor = state.get(slot)
            changes = counter.count_changes(tensor) if isinstance(tensor, torch.Tensor) else math.inf
            if changes and written is not None and slot not in written:
                return math.inf
            if changes > most:  # `max` takes longer, and every step asks
                most = changes
        return most

    def catch_up(self, state: Mapping[str, object], parameter: torch.Tensor) -> bool:
        """Count from now on; False if slots were replaced, or others added."""
        if not self.knows(state, parameter):
            return False
        for slot, counter in self._counters.items():
            tensor = state.get(slot)
            if not isinstance(tensor, torch.Tensor) or not counter.catch_up(tensor):
                return False
        return True

    def knows(self, state: Mapping[str, object], parameter: torch.Tensor) -> bool:
        """Whether every slot in `state` has a counter."""
        # A slot may take the place of another entry, so their number tells nothing.
        return not any(
            key not in self._counters and follows_rows(key, value, parameter) for key, value in state.items()
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no slot to count changes of."""
        return not self._counters

    def plain(self, state: Mapping[str, object]) -> dict[str, VersionCounter] | None:
        """Each slot's counter; None if one is of no single memory, or no longer in `state`."""
        counters = {
            slot: counter
            for slot, counter in self._counters.items()
            if isinstance(counter, VersionCounter) and counter.storage is not None and slot in state
        }
        return counters if len(counters) == len(self._counters) else None
