"""What ``codec="auto"`` stands for: by restores, by the sizes of tables, and by the deltas written."""

from __future__ import annotations

import pytest

from cnr_store import ExpectedRestores, OptionError
from cnr_store.policies.lattices import (
    FINEST_STEP,
    LATTICE_SHARE,
    TRIAL_DELTAS,
    TRIAL_ROWS,
    AutoLattice,
    Trial,
    auto_fineness,
)


@pytest.mark.parametrize(
    ("restores", "step", "bits", "state"),
    [
        (0, 0.35, 4, "m3"),
        (1, 0.35, 4, "m3"),
        (1.5, 0.18, 8, "m3"),
        (5, 0.18, 8, "m3"),
        (11, 0.1, 8, "m3"),
        (12, 0.05, 8, "m7"),
    ],
)
def test_the_measured_rule(restores: float, step: float, bits: int, state: str) -> None:
    found = auto_fineness(ExpectedRestores(restores, 1, 1), 0)
    assert (found.rms_step, found.bits, found.state_bits) == (step, bits, state)
    assert f"{restores:.3g} restores are expected" in found.reason


def test_finest_without_expectation_and_beyond_it() -> None:
    assert auto_fineness(None, 0).rms_step == FINEST_STEP
    expected = ExpectedRestores(1, 1, 1)
    assert auto_fineness(expected, 1).rms_step == 0.35
    assert auto_fineness(expected, 2).rms_step == FINEST_STEP
    assert "more than the 1 expected" in auto_fineness(expected, 2).reason


def test_restores_stay_fast_unless_asked() -> None:
    tables = {"large": 1_000_000, "small": 20_000, "medium": 40_000, "other": 20_000}
    fast = AutoLattice().may_take(tables)
    assert fast == {"small", "other"}
    assert sum(tables[name] for name in fast) <= LATTICE_SHARE * sum(tables.values())
    assert AutoLattice(fast_restore=False).may_take(tables) == set(tables)
    assert AutoLattice().may_take({"only": 1 << 30}) == set()


def test_first_large_deltas_decide() -> None:
    trial = Trial()
    trial.note("few rows", TRIAL_ROWS - 1, 10**9, 1)
    for version in range(TRIAL_DELTAS):
        assert not trial.lost
        trial.note(str(version), TRIAL_ROWS, 101, 100)
        trial.note(str(version), TRIAL_ROWS, 101, 100)  # as after an interrupt
    assert trial.lost
    trial.note("later", TRIAL_ROWS, 1, 10**9)
    assert trial.lost


def test_smaller_deltas_keep_the_lattice() -> None:
    trial = Trial()
    for version, nbytes in enumerate((150, 60, 60, 10**9)):
        trial.note(str(version), TRIAL_ROWS, nbytes, 100)
    assert not trial.lost


def test_options() -> None:
    assert AutoLattice.of("auto") == AutoLattice()
    assert AutoLattice.of({"id": "auto", "state": True}) == AutoLattice(state=True)
    assert AutoLattice.of({"id": "cnr_uniform"}) is None
    assert AutoLattice.of(None) is None
    assert AutoLattice.of({"users": "cnr_rows"}) is None
    with pytest.raises(OptionError, match="fast_restore must be true or false, got 1"):
        AutoLattice.of({"id": "auto", "fast_restore": 1})
    with pytest.raises(OptionError, match="'auto' takes fast_restore and state, not"):
        AutoLattice.of({"id": "auto", "rms_step": 0.1})
