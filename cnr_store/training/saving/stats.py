"""What a save wrote, and how long that took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SaveStats:
    """What a committed save wrote, and how long that took.

    Attributes
    ----------
    rows, table_rows
        Rows written, and rows of all tables.
    bytes
        Bytes of all objects of the version.
    fold_bytes
        Bytes of the folds that were made in the background since the version before this one was committed. They are
        stored beside the versions.
    ratio
        `bytes` as a share of what a full copy takes: every table, its optimizer state, and all dense tensors, as
        `torch.save` writes them.
    seconds_stalled
        How long `save` held the training thread.
    live_bytes
        Bytes in memory of the rows that did not fit into `snapshot_bytes`: `save` encoded them before it returned. Of
        many ranks, on this one.
    seconds_writing
        From the beginning of the write in the background to the commit.
    seconds_encoding, seconds_putting, seconds_waiting
        Of these, the seconds spent on encoding rows, on writing objects, and in pauses: before retries, and for
        `max_write_bytes_per_second`. Threads work beside each other, and their seconds add up.
    ranks
        None if one process saved. Of many ranks, the same on all: `world`, their number; by rank, the `bytes` that each
        wrote, and the `seconds` that it took for them; the fastest waits for the slowest. Of more than 64 ranks, each
        of these is the `min`, `mean` and `max`.
    """

    rows: int
    table_rows: int
    bytes: int
    ratio: float
    seconds_stalled: float
    seconds_writing: float
    seconds_encoding: float
    seconds_putting: float
    seconds_waiting: float
    ranks: Mapping[str, Any] | None = None
    fold_bytes: int = 0
    live_bytes: int = 0


def save_line(stats: SaveStats, step: int, kind: str) -> str:
    """The line that the log has of a save."""
    live = f" ({bytes_text(stats.live_bytes)} beyond snapshot_bytes were encoded)" if stats.live_bytes else ""
    folded = f"; {bytes_text(stats.fold_bytes)} of folds were written before" if stats.fold_bytes else ""
    return (
        f"step {step}: {kind}, {stats.rows:,} of {stats.table_rows:,} rows, {bytes_text(stats.bytes)} "
        f"({100 * stats.ratio:.1f} % of full), stalled {1000 * stats.seconds_stalled:.0f} ms{live}, "
        f"written in {stats.seconds_writing:.1f} s{folded}"
    )


def bytes_text(nbytes: float) -> str:
    """Bytes for people, in powers of a thousand: 12.9 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
