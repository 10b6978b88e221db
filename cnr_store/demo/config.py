"""What a training process is told, and what it tells: plain data, one JSON line each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from cnr_store.demo.errors import DemoError

BATCH = 32
SEED = 20_220_404


@dataclass(frozen=True)
class TrainConfig:
    """One training run. A run that is resumed gets the very same one.

    `url` None trains without checkpoints. `every`: steps between two saves; the last step is saved too.
    """

    data: str
    steps: int
    every: int
    url: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    policy: str = "intermittent"
    bits: int | str = "auto"
    batch: int = BATCH
    seed: int = SEED

    def saved_step(self, step: int) -> int:
        """The step of the newest save that was begun when `step` was made."""
        return step if step == self.steps else step - step % self.every

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> TrainConfig:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Started:
    """The state is in place. `step` 0 and no `version`: from the beginning."""

    step: int
    version: str | None
    restore_seconds: float


@dataclass(frozen=True)
class Step:
    """The optimizer made step number `step` (from 1) on these samples."""

    step: int
    samples: list[int]


@dataclass(frozen=True)
class Saved:
    """`save` returned at `step`. `stall_seconds`: how long training stood still for it, waiting for the save
    before it included."""

    step: int
    stall_seconds: float


@dataclass(frozen=True)
class Finished:
    """All steps are made and saved. `full_bytes`: what `torch.save` of model and optimizer takes."""

    auc: float
    log_loss: float
    full_bytes: int
    table_rows: int
    train_seconds: float


@dataclass(frozen=True)
class Failed:
    """An error of ours ended the run."""

    message: str


Event = Started | Step | Saved | Finished | Failed
_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Started, Step, Saved, Finished, Failed)}


def event_line(event: Event) -> str:
    return json.dumps([type(event).__name__, asdict(event)])


def parse_event(line: str) -> Event:
    """Inverse of `event_line`.

    Raises: DemoError if the line is something else, as the last line of a killed process may be.
    """
    try:
        name, fields = json.loads(line)
        return _EVENTS[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise DemoError(f"not an event of a training process: {line[:200]!r}") from error
