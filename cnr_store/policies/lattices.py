"""What ``codec="auto"`` stands for: the lattice or uniform codes, and how fine (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cnr_store.errors import OptionError
from cnr_store.policies.widths import ExpectedRestores

MAX_RESTORES_BY_STEP = ((0.35, 1), (0.18, 5), (0.1, 11))
"""As measured: (share of a table's root mean square, restores that such steps are good for)."""

FINEST_STEP = 0.05
LATTICE_SHARE = 0.05
"""Of all tables' bytes: so much may take the time that the lattice takes, for a restore to stay fast."""

TRIAL_DELTAS, TRIAL_ROWS = 3, 1000
_COARSE_BITS, _FINE_BITS = 4, 8
_STATE, _FINE_STATE = "m3", "m7"


@dataclass(frozen=True)
class AutoLattice:
    """The options of ``codec="auto"``."""

    # Whether only the smallest tables, of `LATTICE_SHARE` of all bytes, may be on the lattice. Else all may.
    fast_restore: bool = True
    state: bool = False  # whether optimizer state that `state_bits` leaves lossless goes to a floating grid

    def __post_init__(self) -> None:
        for name in ("fast_restore", "state"):
            if type(getattr(self, name)) is not bool:
                raise OptionError(f"codec 'auto': {name} must be true or false, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, codec: Any) -> Self | None:
        """The options, if a codec's name or configuration is ``"auto"``."""
        config = {"id": codec} if isinstance(codec, str) else codec
        if not isinstance(config, Mapping) or config.get("id") != "auto":
            return None
        options: dict[str, Any] = {str(name): value for name, value in config.items() if name != "id"}
        if unknown := set(options) - {"fast_restore", "state"}:
            raise OptionError(
                f"codec {codec!r}: 'auto' takes fast_restore and state, not {sorted(map(repr, unknown))}"
            )
        return cls(**options)

    def may_take(self, tables: Mapping[str, int]) -> set[str]:
        """The tables that may be on the lattice, of those with these names and bytes."""
        left = LATTICE_SHARE * sum(tables.values()) if self.fast_restore else sum(tables.values())
        found = set()
        for name, nbytes in sorted(tables.items(), key=lambda table: (table[1], table[0])):
            left -= nbytes
            if left < 0:
                break
            found.add(name)
        return found


@dataclass(frozen=True)
class Fineness:
    """How fine rows are stored: the lattice's step, the uniform codes and the state of like accuracy; and why."""

    rms_step: float
    bits: int
    state_bits: str
    reason: str


def auto_fineness(expected: ExpectedRestores | None, restores_so_far: int) -> Fineness:
    """How fine ``codec="auto"`` stores rows. Each restore puts stored values into training once more.

    `expected`: None stands for any number of restores.
    `restores_so_far`: loads of the run up to now. More than expected, rounded up, give the finest step.
    """
    if expected is None:
        return _fineness(FINEST_STEP, "no number of restores is expected")
    if restores_so_far - 1 >= expected.restores:
        return _fineness(
            FINEST_STEP, f"{restores_so_far} restores are more than the {expected.restores:.3g} expected"
        )
    for step, most in MAX_RESTORES_BY_STEP:
        if expected.restores <= most:
            return _fineness(step, f"{expected.restores:.3g} restores are expected: at most {most}")
    return _fineness(
        FINEST_STEP,
        f"{expected.restores:.3g} restores are expected: more than {MAX_RESTORES_BY_STEP[-1][1]}",
    )


def _fineness(step: float, reason: str) -> Fineness:
    bits = _COARSE_BITS if step == MAX_RESTORES_BY_STEP[0][0] else _FINE_BITS
    return Fineness(step, bits, _FINE_STATE if step == FINEST_STEP else _STATE, reason)


@dataclass
class Trial:
    """Whether the deltas of a table are smaller on the lattice than uniform codes would be.

    The first `TRIAL_DELTAS` deltas of at least `TRIAL_ROWS` rows decide, for as long as the process goes on: their
    bytes beside those of as many rows of uniform codes.
    """

    # By version: the bytes it took, and those that uniform codes would have
    deltas: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, version: str, rows: int, nbytes: int, uniform_bytes: float) -> None:
        """Count a delta that was written on the lattice. A second call changes nothing."""
        if rows >= TRIAL_ROWS and len(self.deltas) < TRIAL_DELTAS:
            self.deltas[version] = nbytes, uniform_bytes

    @property
    def lost(self) -> bool:
        """Whether the lattice took more bytes."""
        found = self.deltas.values()
        return len(found) == TRIAL_DELTAS and sum(own for own, _ in found) > sum(other for _, other in found)
