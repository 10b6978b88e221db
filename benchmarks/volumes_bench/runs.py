"""Saves of one training under several settings at once, and what lies in each store after each of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import cnr_store
from benchmarks.volumes_bench.ledger import PARTS, Ledger, Part
from benchmarks.volumes_bench.workloads import Workload
from cnr_store.policies.policy import MAX_CHAIN
from cnr_store.policies.widths import LOSSLESS
from cnr_store.training.model.tables import find_tables

Bits = int | str


@dataclass(frozen=True)
class Setting:
    """How a run saves. `keep_last` 1: ``auto`` weighs bytes for a store that keeps one version.

    `max_chain` as for `Checkpointer`; 64 folds nothing in as few saves as there are.
    """

    policy: str
    bits: Bits
    keep_last: int | None = None
    state_bits: int = LOSSLESS
    max_chain: int = MAX_CHAIN

    @property
    def collects(self) -> bool:
        """Whether the last version alone is kept after each save. Only ``auto`` decides otherwise if it is."""
        return self.policy != "auto" or self.keep_last is not None

    @property
    def name(self) -> str:
        beside = f", state_bits={self.state_bits}" if self.state_bits != LOSSLESS else ""
        if self.max_chain != MAX_CHAIN:
            beside += f", max_chain={self.max_chain}"
        return self.policy + (f", keep_last={self.keep_last}" if self.keep_last else "") + beside


@dataclass(frozen=True)
class Full:
    """What full checkpoints take: the rows alone, and `torch.save` of model and optimizer."""

    weights_bytes: int
    torch_save_bytes: int


@dataclass(frozen=True)
class Line:
    """One run.

    Attributes
    ----------
    written_bytes, rows
        By each save, and by the fold behind it.
    rows
        Written by each save.
    baselines
        The saves that were whole.
    parts_bytes
        Sums of `written_bytes` by what the objects are.
    all_kept_bytes
        In the end, if every version is kept; None where ``auto`` decided for fewer.
    kept_bytes, peak_bytes
        With the last version kept and what it leans on: after each save and retention; the most before retention.
    """

    policy: str
    bits: Bits
    written_bytes: list[int]
    rows: list[int]
    baselines: list[int]
    parts_bytes: dict[Part, int]
    all_kept_bytes: int | None
    kept_bytes: list[int] | None
    peak_bytes: int | None

    @property
    def mean_written_bytes(self) -> float:
        return sum(self.written_bytes) / len(self.written_bytes)

    @property
    def mean_kept_bytes(self) -> float | None:
        return sum(self.kept_bytes) / len(self.kept_bytes) if self.kept_bytes else None

    def to_json(self) -> dict[str, Any]:
        means = {
            "mean_written_bytes": self.mean_written_bytes,
            "mean_kept_bytes": self.mean_kept_bytes,
        }
        return {**asdict(self), **means}


class Run:
    """One checkpointer of a training that others watch, too."""

    def __init__(self, setting: Setting, workload: Workload) -> None:
        self.setting = setting
        self.ledger = Ledger(f"{setting.name}-{setting.bits}", whole=setting.max_chain != MAX_CHAIN)
        self.checkpointer = cnr_store.Checkpointer(
            self.ledger,
            workload.model,
            workload.optimizer,
            policy=setting.policy,
            bits=setting.bits,
            state_bits=setting.state_bits,
            keep_last=setting.keep_last,
            # Every version is asked for, so that nothing goes behind the back of this count; `gc` is called below.
            retention=cnr_store.Retention(keep_every=setting.keep_last and 1, max_chain=setting.max_chain),
        )
        self._infos: list[cnr_store.VersionInfo] = []
        self._written: list[int] = []
        self._parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self._grown = 0
        self._before: list[int] = []
        self._after: list[int] = []

    def save(self, step: int) -> None:
        present, parts = self.ledger.present_bytes, dict(self.ledger.written)
        self._infos.append(self.checkpointer.save(step).result())
        self.checkpointer._upkeep.wait()  # nothing public tells of folds behind a save
        for part in PARTS:
            self._parts[part] += self.ledger.written[part] - parts[part]
        self._written.append(self.ledger.written_bytes - sum(parts.values()))
        self._before.append(self.ledger.present_bytes)
        self._grown += self._before[-1] - present
        if self.setting.collects:
            cnr_store.gc(self.ledger, keep_last=1)
            self._after.append(self.ledger.present_bytes)

    def close(self) -> Line:
        self.checkpointer.close()
        collects = self.setting.collects
        return Line(
            policy=self.setting.name,
            bits=self.setting.bits,
            written_bytes=self._written,
            rows=[info.rows for info in self._infos],
            baselines=[save for save, info in enumerate(self._infos) if info.kind == "baseline"],
            parts_bytes=self._parts,
            all_kept_bytes=self._grown if self.setting.keep_last is None else None,
            kept_bytes=self._after if collects else None,
            peak_bytes=max(self._before) if collects else None,
        )


def measure(workload: Workload, settings: Sequence[Setting]) -> list[Line]:
    """Train once; save after each interval by every setting."""
    runs = [Run(setting, workload) for setting in settings]
    for interval in range(workload.intervals):
        workload.advance()
        for run in runs:
            run.save(interval)
    return [run.close() for run in runs]


def full_sizes(workload: Workload) -> Full:
    """Of one full checkpoint after an interval."""
    workload.advance()
    sink = _Counter()
    state = {"model": workload.model.state_dict(), "optimizer": workload.optimizer.state_dict()}
    torch.save(state, sink)
    return Full(sum(table.parameter.nbytes for table in find_tables(workload.model)), sink.nbytes)


class _Counter(io.BytesIO):
    """A file that counts what is written into it."""

    nbytes = 0

    def write(self, data: Any, /) -> int:
        self.nbytes += len(data)
        return len(data)
