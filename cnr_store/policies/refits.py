"""When an array on a lattice becomes whole, and so gets a new step: its own no longer fits (standard library only).

The step of a lattice is a share of its base, 1.4826 times the median of the magnitudes other than 0. Each version tells
the shares of what fits it badly. Only what has grown since the whole version counts: rows that no step can take, such
as of NaN, make no version whole again and again.
"""

from __future__ import annotations

from typing import NamedTuple, Self

_RAW, _MORE_RAW = 0.01, 2
"""Of all rows, those that no code of the lattice can take; and how many times those of the whole version."""
_MOST, _MORE = 0.5, 0.1
"""Of the values, those on one side of the base: with more than half of them, so is the median. And more than at the
whole version by how much: its own sample may be off."""
_SEEN = 0.01
"""Of the sampled values, those that are not 0, for their median to say something."""


class Sampled(NamedTuple):
    """Of the values of sampled rows: how many there are, are not 0, are beyond twice the base, and below half of it."""

    values: int = 0
    nonzero: int = 0
    large: int = 0
    small: int = 0


class Shares(NamedTuple):
    """Of an array's rows, those that are raw; of its values, those that are large and small."""

    raw: float = 0.0
    large: float = 0.0
    small: float = 0.0


class Fit(NamedTuple):
    """How an array fits its step in one version."""

    at_whole: Shares = Shares()  # in its whole version
    is_raw: bool = False  # whether it has too many raw rows
    why_whole: str = ""  # why the next version is to hold all of the array; "" if it need not

    @classmethod
    def of(cls, rows: int, raw: int, sampled: Sampled, before: Fit | None) -> Self:
        """The fit of an array of so many rows.

        `raw`: rows that the version holds as they are.
        `before`: the fit in the version before; None where the array is whole.
        """
        seen = sampled.nonzero if sampled.nonzero > _SEEN * sampled.values else 0
        sides = (sampled.large / seen, sampled.small / seen) if seen else (0.0, 0.0)
        now = Shares(raw / max(1, rows), *sides)
        if before is None:
            return cls(now)
        whole, why = before.at_whole, ""
        is_raw = now.raw >= max(_RAW, _MORE_RAW * whole.raw)
        if is_raw and before.is_raw:
            why = "rows are beyond its step, and were stored as they are"
        elif now.large > max(_MOST, whole.large + _MORE):
            why = "its values have doubled since it got its step"
        elif now.small > max(_MOST, whole.small + _MORE):
            why = "its values have halved since it got its step"
        return cls(whole, is_raw, why)
