"""A figure beside what is aimed at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One target. `measured` is the worst figure, at `where`; `no_worse_error` None where errors don't matter.

    A target is the least that counts, or with `at_most` the most.
    """

    name: str
    wanted: float
    measured: float
    where: str
    no_worse_error: bool | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        reached = self.measured <= self.wanted if self.at_most else self.measured >= self.wanted
        return reached and self.no_worse_error is not False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        error = {None: "", True: ", error no higher", False: ", ERROR HIGHER"}[self.no_worse_error]
        verdict = "met" if self.met else "NOT MET"
        aim = f"{'at most ' * self.at_most}{self.wanted:g}"
        return f"{verdict:8} {self.name}: {self.measured:.2f} of {aim} ({self.where}{error})"
