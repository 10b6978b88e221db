"""A rank that fails, dies or hangs in any phase of a save: all ranks decide alike, in time, and nothing is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import cnr_store
from tests.test_store.ranks.support.failing_save import (
    POINT,
    Report,
    load_everything,
    save_with_trouble,
)
from tests.test_store.ranks.support.rank_processes import Outcome, run_ranks
from tests.test_store.ranks.support.shared_model import (
    SharedModel,
    Values,
    assert_equal,
    checkpointer_of,
    load_alone,
    together,
)

pytestmark = pytest.mark.slow

WORLD = 3
SECONDS = {"raise": 5, "SIGKILL": 10, "SIGSTOP": 8}
PHASES = {
    "agree": "save of step 2",
    "snapshot": "save of step 2",
    "claim": "claim|announce",
    "encode": "encode",
    "exchange": "exchange",
    "put": "put|exchange",
    "vote": "vote",
    "record": "record|outcome",
    "commit": "commit",
    "outcome": "",
}
"""What an error calls each phase."""
IN_EVERY_RUN = {
    ("agree", 1, "raise"),
    ("agree", 0, "SIGKILL"),
    ("claim", 0, "raise"),
    ("exchange", 1, "SIGKILL"),
    ("vote", 1, "raise"),
    ("commit", 0, "SIGSTOP"),
    ("outcome", 0, "SIGKILL"),
}
CELLS = [
    pytest.param(
        phase,
        victim,
        how,
        marks=[] if (phase, victim, how) in IN_EVERY_RUN else [pytest.mark.nightly],
    )
    for phase in PHASES
    for victim in range(WORLD)
    for how in SECONDS
]


def commits(phase: str, victim: int) -> bool | None:
    """Whether the version is there in the end; None where either is right."""
    if victim == 0:
        return phase == "outcome"
    # It has voted: nobody needs it any more.
    return {"record": None, "commit": True, "outcome": True}.get(phase, False)


@pytest.mark.some_by_day(2)
@pytest.mark.parametrize(("phase", "victim", "how"), CELLS)
def test_all_ranks_decide_alike(tmp_path: Path, phase: str, victim: int, how: str) -> None:
    url = str(tmp_path / "store")
    sent = {} if how == "raise" else {(victim, POINT): [(victim, signal.Signals[how])]}
    found = run_ranks(WORLD, save_with_trouble, url, phase, victim, how, signals=sent, wake=True)
    steps = [version.step for version in cnr_store.versions(url)]
    committed = 2 in steps
    if (expected := commits(phase, victim)) is not None:
        assert committed == expected
    check_reports(found, committed, phase, victim, how)
    if how == "raise":
        assert steps[-1] == 3
        assert_equal(load_alone(url), together([each.value.values[3] for each in found]))
        return
    parts = [each.value.values for each in found if each.signal == 0]
    loaded = together([each.value for each in ended(run_ranks(WORLD - 1, load_everything, url))])
    assert_equal(loaded, load_alone(url))
    whole = expected_after(2 if committed else 1)
    assert_equal(loaded, whole)
    assert_equal(
        parts[0][2 if committed else 1], {**whole, "items": parts[0][2 if committed else 1]["items"]}
    )


def check_reports(found: Sequence[Outcome], committed: bool, phase: str, victim: int, how: str) -> None:
    """Check what each rank was told of the second save, and when."""
    for rank, each in enumerate(found):
        if rank == victim and how == "SIGKILL":
            assert each.signal == signal.SIGKILL
            continue
        assert each.where == ""
        report: Report = each.value
        assert report.struck == (rank == victim)
        assert bool(report.version) == committed, f"rank {rank}: {report.error}: {report.text}"
        if rank != victim or how == "raise":
            assert report.seconds < SECONDS[how]
        if not committed:
            assert report.error in {"SaveError", "RanksError", "OSError"}
            if rank != victim:
                others = ".*" if phase in ("agree", "snapshot") else ""
                assert re.search(rf"({PHASES[phase]}): {others}\brank {victim}\b", report.text), report.text


def ended(found: Sequence[Outcome]) -> Sequence[Outcome]:
    """Ranks that must have ended well."""
    assert [each.where for each in found] == [""] * len(found)
    return found


def expected_after(step: int) -> Values:
    """What a job holds after a step."""
    model = SharedModel(0, 1)
    with checkpointer_of(model, "memory://expected") as checkpointer:
        for each in range(1, step + 1):
            model.train(each, checkpointer)
    return model.values()
