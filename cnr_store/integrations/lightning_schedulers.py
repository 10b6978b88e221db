"""The state of the learning-rate schedulers that a trainer has at each save: programs may replace them in a fit."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("cnr_store")


class SchedulerState:
    """The state of one of a trainer's schedulers.

    Parameters
    ----------
    trainer
        Has the scheduler.
    position
        Its place among ``trainer.lr_scheduler_configs``.
    """

    def __init__(self, trainer: Any, position: int) -> None:
        self._trainer, self._position = trainer, position

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler that is there now. Empty if there are fewer than there were."""
        scheduler = self._scheduler()
        state: dict[str, Any] = {} if scheduler is None else scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give it to the scheduler that is there now."""
        scheduler = self._scheduler()
        if scheduler is not None and state:
            scheduler.load_state_dict(state)
        else:
            log.warning("the version holds no state of the scheduler %d, which begins anew", self._position)

    def _scheduler(self) -> Any:
        configs = self._trainer.lr_scheduler_configs
        return configs[self._position].scheduler if self._position < len(configs) else None


def scheduler_states(trainer: Any) -> dict[str, SchedulerState]:
    """The states of all schedulers that a trainer has now, by the names under which versions hold them."""
    places = range(len(trainer.lr_scheduler_configs))
    return {f"lightning.scheduler.{place}": SchedulerState(trainer, place) for place in places}
