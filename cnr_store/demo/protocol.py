"""What a training run is told and what it reports: plain data, one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cnr_store.errors import CheckpointError
from cnr_store.policies.policy import PolicyName

OnStep = Callable[[int], object]


class DemoError(CheckpointError, RuntimeError):
    """A training run of the demo failed, or the demo's options do not fit together."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. A resumed run gets the same one."""

    data: str  # folder with the three files of `data.find_data`
    steps: int  # steps, every: training steps, and steps between two saves; the last step is saved too
    every: int
    url: str | None = None  # url, storage_options: where checkpoints go; with None, the run saves none
    storage_options: dict[str, Any] = field(default_factory=dict)
    policy: PolicyName = "intermittent"  # policy, bits, codec, state_bits: those of `cnr_store.Checkpointer`
    bits: int | str = "auto"
    codec: dict[str, Any] | None = None
    state_bits: int | str = 32
    batch: int = 32  # batch, seed: samples a step, and the seed of the model's first values
    seed: int = 20_220_404

    def save_step(self, first_step: int, number: int) -> int:
        """The step of save number `number`, from 1, of a run that started after `first_step`."""
        return min((first_step // self.every + number) * self.every, self.steps)

    def to_json(self) -> str:
        """One line for a training process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> TrainConfig:
        """Inverse of `to_json`."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Started:
    """The run starts after `step`, restored from `version`; from the beginning with 0 and None."""

    step: int
    version: str | None
    restore_seconds: float


@dataclass(frozen=True)
class Step:
    """The optimizer made step number `step`, from 1, on these samples."""

    step: int
    samples: list[int]


@dataclass(frozen=True)
class Saved:
    """`save` returned at `step`, after stalling training for `stall_seconds`."""

    step: int
    stall_seconds: float


@dataclass(frozen=True)
class Finished:
    """All steps are made and saved. `full_bytes` is what `torch.save` writes of model and optimizer."""

    auc: float
    log_loss: float
    full_bytes: int
    table_rows: int


@dataclass(frozen=True)
class Failed:
    """One of this project's errors ended the run."""

    message: str


Event = Started | Step | Saved | Finished | Failed
_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Started, Step, Saved, Finished, Failed)}


def event_line(event: Event) -> str:
    """An event as one line of JSON."""
    return json.dumps([type(event).__name__, asdict(event)])


def parse_event(line: str) -> Event:
    """Inverse of `event_line`. `DemoError` if the line is not an event."""
    try:
        name, fields = json.loads(line)
        return _EVENTS[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise DemoError(f"not an event of a training process: {line[:200]!r}") from error


@dataclass
class RunLog:
    """What one training run reported."""

    on_step: OnStep = lambda _: None  # called with the newest step after each event
    started: Started | None = None
    # ``steps[k]`` holds the samples of step ``first_step + 1 + k``
    steps: list[list[int]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def first_step(self) -> int:
        """The step the run started after."""
        return self.started.step if self.started else 0

    @property
    def last_step(self) -> int:
        """The newest step the run made."""
        return self.first_step + len(self.steps)

    @property
    def result(self) -> Finished:
        """How the run ended. `DemoError` if it did not finish."""
        if self.finished is None:
            raise DemoError(f"a training run stopped at step {self.last_step}, before its end")
        return self.finished

    def add(self, event: Event) -> None:
        """Record the next event. `DemoError` if a step is missing, or the run failed."""
        match event:
            case Started():
                self.started = event
            case Step():
                if event.step != self.last_step + 1:
                    raise DemoError(f"a training run reported step {event.step} after step {self.last_step}")
                self.steps.append(event.samples)
            case Saved():
                self.saved.append(event)
            case Finished():
                self.finished = event
            case Failed():
                raise DemoError(f"the training process failed: {event.message}")
        self.on_step(self.last_step)
