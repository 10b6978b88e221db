"""How coarse tables may be stored for a run's restores to cost no more than a budget.

A restore puts rounded rows into training once more. In per cent of the loss, all restores of a run cost so many
times the sum over restores of the square of the step, in units of the table's scale: at most .08 on most traces
measured, but .18 where 16 to 32 steps of Adam lie between two restores, and most values go back to where they were.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from cnr_store.policies.checks import number

DEFAULT_BUDGET = 0.01
"""Per cent of the loss: the bar of the Check-N-Run paper. ``codec="auto"`` stands for it, too."""

COST_FACTOR = 0.2
"""Per cent of the loss that a restore costs at most, over the square of its step."""

MAX_STEP, MIN_STEP = 0.2, 1e-3
"""The coarsest step of which that was measured, and the finest of a lattice: beneath it tables are lossless."""

_SHARE, _MOST_SHARE = 0.1, 0.2
STATE, MIN_STATE_BUDGET = "auto", 0.01
"""How optimizer state is stored, and the budget of which it takes a tenth: it costs up to .001 per cent in a run."""


@dataclass(frozen=True)
class Budget:
    """What restores may cost, and what they did, in per cent of the loss."""

    percent: float  # what all restores of the run together may cost
    spent: float  # what they cost up to now, at most
    rms_step: (
        float  # the step of tables in the next version, as a share of their scale; 0 where they are lossless
    )

    @classmethod
    def new(cls, percent: float) -> Self:
        """The budget of a run before its first version."""
        return cls(percent, 0.0, next_step(percent, ())[0])

    def __str__(self) -> str:
        stored = (
            f"steps of {self.rms_step:.3g} of a table's scale" if self.rms_step else "tables are lossless"
        )
        return f"{self.percent:g} % of the loss, {self.spent:.2g} % spent: {stored}"


def check_budget(budget: Any) -> float | None:
    """The option `budget`; `OptionError` if it is no share in per cent."""
    return None if budget is None else number("budget", budget, maximum=100)


def restore_cost(step: float) -> float:
    """Per cent of the loss that a restore of tables on that step costs at most."""
    return COST_FACTOR * step**2


def next_step(left: float, stored: Collection[float | None]) -> tuple[float, str]:
    """The step of the next version, and why that one must be whole; "" if it need not.

    `left`: of the budget, in per cent.
    `stored`: the steps of the tables beneath a delta; None for those that are on none. Empty if there are none.
    """
    step, *others = {*stored} or {None}
    if step is not None and not others and restore_cost(step) <= _MOST_SHARE * left:
        return step, ""
    fresh = min(math.sqrt(max(left, 0.0) * _SHARE / COST_FACTOR), MAX_STEP)
    fresh = fresh if fresh >= MIN_STEP else 0.0
    if not stored or (fresh, step, *others) == (0.0, None):
        return fresh, ""
    if others or step is None:
        return fresh, "tables are stored by another rule than the budget's"
    spends = f"a restore would spend {restore_cost(step):.2g} %"
    return fresh, f"of the budget {max(left, 0.0):.2g} % is left, and {spends}"
