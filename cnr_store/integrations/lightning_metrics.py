"""Of which step each metric is that a LightningModule logs, and validations that are cut off."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from cnr_store.errors import UnsupportedModelError
from cnr_store.integrations.lightning_hooks import HookBehind
from cnr_store.training.model.rng_state import rng_state, set_rng_state

log = logging.getLogger("cnr_store")


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
        self._logged: dict[str, tuple[Tensor, int | None]] = {}
        self._is_told = False
        self._before_validation: dict[str, Any] | None = None  # the random numbers

    def note(self, is_of_now: bool = True) -> set[str]:
        """Note those that were logged since the last call, and return their names.

        They are of the trainer's step, or of no known one.
        """
        step, new = self._trainer.global_step if is_of_now else None, set()
        for name, value in self._trainer.callback_metrics.items():
            known = self._logged.get(name)
            # Each read makes another tensor over the same memory, and what is held is not used for a new value.
            if known is None or known[0].data_ptr() != value.data_ptr():
                self._logged[name] = value, step
                new.add(name)
        return new

    def note_batch(self) -> None:
        """The same at the end of a batch. If a validation follows, note the random numbers, of which it may draw."""
        self.note()
        loop = self._trainer.fit_loop
        follows = goes_by_clock(self._trainer) or loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        self._before_validation = _random_numbers() if follows else None

    def is_cut_off(self) -> bool:
        """Whether a SIGTERM has come before the validation behind this step had ended.

        Then log it, and set the random numbers to those before the validation: a resumed fit runs all of it.
        """
        if not self._trainer.validating:  # Lightning ends a fit in its first batch
            return False
        log.warning(
            "a SIGTERM came before the validation behind step %d had ended: the version of this step has no metric "
            "of it. A resumed fit that trains on runs this validation first. What callbacks and buffers of the module "
            "have gathered of it is in the version, and is gathered again",
            self._trainer.global_step,
        )
        if self._before_validation is not None:
            set_rng_state(self._before_validation)
        return True

    def validation_first(self, state: Any) -> HookBehind:
        """Let a fit that resumes where a validation was cut off run it, whole. Lightning would leave it out.

        In the middle of an epoch, `state`, a `TrainerState`, holds the loops for the save behind it.
        """
        loop = self._trainer.fit_loop.epoch_loop

        def validate() -> None:
            if loop._skip_next_val:
                loop._skip_next_val = loop.val_loop.restarting = False
                self._before_validation = _random_numbers()
                if not self._trainer.is_last_batch:
                    state.hold_loops()

        return HookBehind(loop, "advance", validate)

    def of_this_step(self) -> dict[str, float]:
        """Those that were logged at the trainer's step."""
        self.note()
        step = self._trainer.global_step
        return {
            name: float(value)
            for name, (value, logged) in self._logged.items()
            if logged == step and value.numel() == 1
        }

    def warn_without(self, name: str) -> None:
        """Warn once if the metric that tells the best has not been logged yet."""
        if name not in self._trainer.callback_metrics and not self._is_told:
            self._is_told = True
            log.warning(
                "step %d is saved without the metric %r, so it can't be one of the best, nor can those before the "
                "first validation that logs it: the module has logged %s",
                *(self._trainer.global_step, name, ", ".join(self.of_this_step()) or "nothing"),
            )


def _random_numbers() -> dict[str, Any] | None:
    try:
        return rng_state()
    except UnsupportedModelError:  # a generator of numpy's that is of another class
        return None


def will_validate(trainer: Any) -> bool:
    """Whether Lightning validates behind the batch that ends now, and then goes on with the epoch."""
    loop = trainer.fit_loop.epoch_loop
    return (
        not trainer.is_last_batch
        and not loop._skip_next_val
        and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    )


def goes_by_clock(trainer: Any) -> bool:
    """Whether validations come by time. Then one may come that `will_validate` did not foresee a moment before."""
    return getattr(trainer, "_val_check_time_interval", None) is not None
