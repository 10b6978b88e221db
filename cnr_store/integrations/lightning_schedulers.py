"""The state of the learning-rate schedulers that a trainer has at each save: programs may replace them in a fit."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim.swa_utils import SWALR

log = logging.getLogger("cnr_store")


class SchedulerState:
    """The state of one of a trainer's schedulers: of that which is there, or of the first if that is of another class.

    A program that resumes makes the first one again, which takes no other class's state. `StochasticWeightAveraging`
    puts its own in the place of another, and puts it there again.

    Parameters
    ----------
    trainer
        Has the scheduler.
    position
        Its place among ``trainer.lr_scheduler_configs``.
    """

    def __init__(self, trainer: Any, position: int) -> None:
        self._trainer, self._position = trainer, position
        self._first = trainer.lr_scheduler_configs[position].scheduler
        self._told = False

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = self._scheduler().state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the scheduler its state."""
        self._scheduler().load_state_dict(state)

    def _scheduler(self) -> Any:
        configs = self._trainer.lr_scheduler_configs
        now = configs[self._position].scheduler if self._position < len(configs) else None
        if type(now) is type(self._first):
            return now
        if not isinstance(now, SWALR) and not self._told:
            self._told = True
            log.warning(
                "in the place of the scheduler %s is %s: versions hold the state of the former, with which a resumed "
                "fit continues",
                type(self._first).__name__,
                "none" if now is None else type(now).__name__,
            )
        return self._first


def scheduler_states(trainer: Any) -> dict[str, SchedulerState]:
    """The states of all schedulers that a trainer has now, by the names under which versions hold them."""
    places = range(len(trainer.lr_scheduler_configs))
    return {f"lightning.scheduler.{place}": SchedulerState(trainer, place) for place in places}
