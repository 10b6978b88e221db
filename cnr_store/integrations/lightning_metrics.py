"""Of which step each metric is that a LightningModule logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class LoggedMetrics:
    """The metrics of one number that a trainer holds, and the step at which each was logged.

    A trainer keeps a metric until it is logged anew, also while the weights change.

    Parameters
    ----------
    trainer
        Whose metrics they are.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged: dict[str, tuple[torch.Tensor, int]] = {}

    def restore(self, metrics: Mapping[str, float]) -> None:
        """Give the trainer those of a version, of which a scheduler may ask before new ones come."""
        self._trainer.callback_metrics.update({name: torch.tensor(one) for name, one in metrics.items()})
        self.note()
        self._logged = {name: (value, -1) for name, (value, _) in self._logged.items()}

    def note(self) -> set[str]:
        """Note those that were logged since the last call, as of the trainer's step, and return their names."""
        new = set()
        for name, value in self._trainer.callback_metrics.items():
            known = self._logged.get(name)
            # Each read makes another tensor over the same memory, and what is held is not used for a new value.
            if known is None or known[0].data_ptr() != value.data_ptr():
                self._logged[name] = value, self._trainer.global_step
                new.add(name)
        return new

    def all(self) -> dict[str, float]:
        """Those that the trainer holds."""
        return {name: float(one) for name, one in self._trainer.callback_metrics.items() if one.numel() == 1}

    def of_this_step(self) -> dict[str, float]:
        """Those that were logged at the trainer's step."""
        self.note()
        step = self._trainer.global_step
        return {name: value for name, value in self.all().items() if self._logged[name][1] == step}
