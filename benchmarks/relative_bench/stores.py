"""Trainings saved by several settings at once, and the rows that each save has to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

import cnr_store
from benchmarks.relative_bench.trace import RowWiseAdagrad
from benchmarks.volumes_bench.ledger import Ledger, Part
from cnr_codecs import LatticeRows, RowCodec, UniformRows, decode_into, lattice_step, parse
from cnr_codecs.lattice.steps import median_scale, scale_counts
from cnr_store.catalog.catalog import Catalog
from cnr_store.policies.widths import LOSSLESS, LOSSLESS_BELOW_BYTES
from cnr_store.training.model.tables import find_tables

Rows = NDArray[np.float32]
Config = Mapping[str, Any]
_JUDGED_ROWS = 100_000


class Workload(Protocol):
    """A model in training. `advance` trains it for one interval."""

    model: nn.Module
    optimizer: Optimizer
    intervals: int

    def advance(self) -> None: ...


def lattice(share: float) -> Config:
    """Relative rows with steps of that share."""
    return LatticeRows(share, relative=True).get_config()


def adaptive(bits: int) -> Config:
    """Adaptive codes."""
    return UniformRows("adaptive", bits).get_config()


@dataclass(frozen=True)
class Setting:
    """How a run saves; `name` in the results. Without a codec, rows and state are stored by the defaults."""

    name: str
    codec: Config | None = None
    policy: str = "consecutive"
    state_bits: int | str = LOSSLESS
    budget: float | None = None  # in place of both
    exact_parents: bool = False


def new_checkpointer(
    ledger: Ledger, workload: Workload, setting: Setting, audit: bool = True
) -> cnr_store.Checkpointer:
    chosen: dict[str, Any] = {}
    if setting.codec is not None:
        chosen = {"codec": setting.codec, "state_bits": setting.state_bits}
    elif setting.budget is not None:
        chosen = {"budget": setting.budget}
    return cnr_store.Checkpointer(
        ledger,
        workload.model,
        workload.optimizer,
        policy=setting.policy,
        retention=cnr_store.Retention(max_chain=None),
        limits=cnr_store.Limits(exact_parents=setting.exact_parents),
        tracking=cnr_store.Tracking(audit=audit, trusted_optimizers=[RowWiseAdagrad]),
        **chosen,
    )


@dataclass(frozen=True)
class Volumes:
    """What one setting wrote: bytes by save, by what they are; bytes kept for the last version, the most; and rows.

    `bits`: by path of an array of rows, the bits that each delta took, over the values of the whole array.
    """

    setting: str
    written: list[dict[Part, int]]
    most_kept_bytes: int
    rows: list[int]
    bits: dict[str, list[float]] = field(default_factory=dict)

    def delta_bytes(self, part: Part) -> int:
        """Of all saves after the first."""
        return sum(each[part] for each in self.written[1:])

    @property
    def total_bytes(self) -> int:
        return sum(sum(each.values()) for each in self.written)


def volumes(workload: Workload, settings: Sequence[Setting], *, first: bool = True) -> list[Volumes]:
    """Save at once, and after each interval, by every setting. With `first` False there is no save before the first."""
    ledgers = [Ledger(setting.name, whole=True) for setting in settings]
    runs = [
        new_checkpointer(ledger, workload, setting) for ledger, setting in zip(ledgers, settings, strict=True)
    ]
    found = [Volumes(setting.name, [], 0, []) for setting in settings]
    kept = [0] * len(runs)
    for interval in range(0 if first else 1, workload.intervals + 1):
        if interval:
            workload.advance()
        for number, (ledger, run) in enumerate(zip(ledgers, runs, strict=True)):
            before = dict(ledger.written)
            info = run.save(interval).result()
            found[number].written.append({part: ledger.written[part] - before[part] for part in before})
            found[number].rows.append(info.rows)
            for path, entry in Catalog(ledger).record(info.id).arrays.items():
                if entry.kind == "delta":
                    bits = entry.nbytes * 8 / math.prod(entry.shape)
                    found[number].bits.setdefault(path, []).append(bits)
            if settings[number].policy != "consecutive":  # which needs all versions
                cnr_store.gc(ledger, keep_last=1)
            kept[number] = max(kept[number], ledger.present_bytes)
    for run in runs:
        run.close()
    return [
        Volumes(each.setting, each.written, most, each.rows, each.bits)
        for each, most in zip(found, kept, strict=True)
    ]


@dataclass
class Moves:
    """The rows of quantized tables that changed, by table and interval, and the steps of share 1 of the tables."""

    rms: dict[str, float]
    bases: dict[str, Rows]
    changed: list[dict[str, tuple[NDArray[np.int64], Rows]]] = field(default_factory=list)

    @classmethod
    def of(cls, workload: Workload, *, first: bool = True) -> Moves:
        """Train all intervals."""
        if not first:
            workload.advance()
        now = weights(workload)
        moves = cls(
            {name: median_scale(scale_counts(rows)) for name, rows in now.items()},
            {name: rows.copy() for name, rows in now.items()},
        )
        before = {name: rows.copy() for name, rows in now.items()}
        for _ in range(workload.intervals - (not first)):
            workload.advance()
            changed = {}
            for name, rows in weights(workload).items():
                ids = np.flatnonzero((rows != before[name]).any(axis=1))
                before[name][ids] = rows[ids]
                changed[name] = ids, rows[ids]
            moves.changed.append(changed)
        return moves

    def error(self, code: Callable[[str, Rows], Rows]) -> float:
        """The mean of ||x - x'|| of the rows, or of some of many, where `code` gives x' of rows of a table."""
        total, count = 0.0, 0
        apart = 1 + sum(len(rows) for changed in self.changed for _, rows in changed.values()) // _JUDGED_ROWS
        for changed in self.changed:
            for name, (_, every) in changed.items():
                rows = every[::apart]
                if len(rows):
                    total += float(np.linalg.norm(code(name, rows).astype(np.float64) - rows, axis=1).sum())
                    count += len(rows)
        return total / count

    def adaptive_error(self, bits: int) -> float:
        """The mean error of adaptive codes."""
        return self.error(lambda _, rows: decoded(UniformRows("adaptive", bits), rows))

    def lattice_error(self, share: float) -> float:
        """The mean error of the lattice."""

        def code(name: str, rows: Rows) -> Rows:
            step = np.float32(lattice_step(share * self.rms[name]))
            coded: Rows = np.rint(rows / step) * step
            return coded

        return self.error(code)

    def share_with_error(self, error: float) -> float:
        """The greatest share whose mean error is no larger, to 8 bits."""
        low, high = 1e-3, 8.0
        for _ in range(13):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.lattice_error(middle) <= error else (low, middle)
        return low


def weights(workload: Workload) -> dict[str, Rows]:
    """The tables that codecs apply to, by name, where they lie."""
    return {
        table.name: table.parameter.detach().numpy()
        for table in find_tables(workload.model)
        if table.nbytes >= LOSSLESS_BELOW_BYTES
    }


def decoded(codec: RowCodec, rows: Rows) -> Rows:
    """The rows as they are read."""
    rows = np.ascontiguousarray(rows)
    data, out = codec.encode_rows(rows, None, len(rows), element="float32"), np.empty_like(rows)
    decode_into(parse(data, max_decoded_bytes=rows.nbytes), out, np.ones(len(rows), np.uint8))
    return out
