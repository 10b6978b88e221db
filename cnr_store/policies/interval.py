"""How often to save, so that the least of a run's time is lost to saves and failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cnr_store.errors import OptionError
from cnr_store.policies.checks import number


@dataclass(frozen=True)
class Interval:
    """A time between two saves, and what it costs.

    Attributes
    ----------
    seconds
        From the beginning of one save to that of the next.
    lost
        The share of a run's time that saves, steps made again and restores take, expected.
    """

    seconds: float
    lost: float


def best_interval(
    failure_seconds: float, stall_seconds: float, restore_seconds: float = 0.0, write_seconds: float = 0.0
) -> Interval:
    """The time between saves at which the least is lost, by Daly's estimate of higher order.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), equation 37; its first term is Young's.

    Parameters
    ----------
    failure_seconds
        Mean time between two failures.
    stall_seconds
        How long a save holds training.
    restore_seconds
        From a failure to the first new step.
    write_seconds
        How long a save is written in the background. No save begins earlier than the one before it is committed, and
        a failure meanwhile costs the steps since that one, too.

    Raises
    ------
    OptionError
        A number is negative or not finite, or the first one is 0.
    """
    failure = number("failure_seconds", failure_seconds)
    stall = number("stall_seconds", stall_seconds)
    restore, write = number("restore_seconds", restore_seconds), number("write_seconds", write_seconds)
    if not failure:
        raise OptionError("failure_seconds=0: a run that fails all the time makes no step")
    share = stall / (2 * failure)
    best = (
        math.sqrt(2 * stall * failure) * (1 + math.sqrt(share) / 3 + share / 9)
        if share < 1
        else failure + stall
    )
    seconds = max(best, write)
    lost = (stall / seconds if seconds else 0.0) + (seconds / 2 + write + restore) / failure
    return Interval(seconds, min(1.0, lost))
