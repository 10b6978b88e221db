"""What must be true after the demo, and whether it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from cnr_store.catalog.catalog import VersionInfo
from cnr_store.demo.config import TrainConfig
from cnr_store.demo.process import RunLog
from cnr_store.demo.reader import TimeOrderedReader
from cnr_store.demo.supervise import Story


@dataclass(frozen=True)
class Check:
    """One statement, whether it holds, and the figures behind it."""

    statement: str
    holds: bool
    detail: str


def check_all(
    config: TrainConfig, story: Story, versions: Sequence[VersionInfo], undisturbed: RunLog, samples: int
) -> list[Check]:
    """All checks. `samples`: how many samples an epoch has; `versions`: what is committed in the end."""
    checks = [
        _interrupted_in_a_save(story, versions),
        _resumed_from_newest(story),
        _exactly_once(story, config, samples),
        _ends_committed(config, versions),
    ]
    if config.bits == 32:
        checks.append(_same_bits(story.logs[-1], undisturbed))
    return checks


def kept_steps(logs: Sequence[RunLog]) -> list[list[int]]:
    """Samples of each step in the final model: a run that resumes drops what came after its version."""
    steps: list[list[int]] = []
    for log in logs:
        steps = steps[: log.first_step] + log.steps
    return steps


def _interrupted_in_a_save(story: Story, versions: Sequence[VersionInfo]) -> Check:
    statement = "the run ended in the middle of a save, and that version does not exist"
    caught = story.caught
    if caught is None:
        tries = len(story.interruptions)
        return Check(statement, False, f"{tries} kills, each when its save was complete")
    listed = caught.version in {info.id for info in versions}
    left = f"{caught.objects} objects, {caught.nbytes:,} bytes"
    detail = f"{caught.version}: {left}, {'listed' if listed else 'not listed'}"
    return Check(statement, caught.objects > 0 and not listed, detail)


def _resumed_from_newest(story: Story) -> Check:
    pairs = [
        (interruption.newest, log.started.version if log.started else None)
        for interruption, log in zip(story.interruptions, story.logs[1:], strict=True)
    ]
    holds = bool(pairs) and all(newest == restored for newest, restored in pairs)
    detail = ", ".join(f"{restored} (newest: {newest})" for newest, restored in pairs) or "it never resumed"
    return Check("the resumed run started from the newest committed version", holds, detail)


def _exactly_once(story: Story, config: TrainConfig, samples: int) -> Check:
    expected = [batch.tolist() for batch in islice(TimeOrderedReader(samples, config.batch), config.steps)]
    kept = kept_steps(story.logs)
    redone = sum(len(log.steps) for log in story.logs) - len(kept)
    return Check(
        "no sample was trained twice or skipped",
        kept == expected,
        f"{sum(map(len, kept)):,} samples in {len(kept):,} steps, {sum(map(len, expected)):,} expected; "
        f"{redone:,} steps after the restored version were made again",
    )


def _ends_committed(config: TrainConfig, versions: Sequence[VersionInfo]) -> Check:
    last = versions[-1].step if versions else None
    detail = f"newest version: step {last}; {len(versions)} versions"
    return Check("the last step is in a committed version", last == config.steps, detail)


def _same_bits(resumed: RunLog, undisturbed: RunLog) -> Check:
    pairs = [(log.finished.auc, log.finished.log_loss) for log in (resumed, undisturbed) if log.finished]
    return Check(
        "lossless: resumed and uninterrupted run end with the same figures, to the last bit",
        len(pairs) == 2 and pairs[0] == pairs[1],
        " and ".join(f"{auc!r}, {loss!r}" for auc, loss in pairs),
    )
