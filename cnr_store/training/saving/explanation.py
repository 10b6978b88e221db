"""What saves do with each table, and why; what a save wrote, and how long that took: for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from cnr_store.errors import listed
from cnr_store.format.record import Record
from cnr_store.policies.budget import Budget
from cnr_store.policies.whole_tables import ADVICE, PAGE, describe
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import array_dtype

_MOST_RAW = 0.01
"""Of the rows written of an array on a grid, the share that may be stored as they are without a word."""
_COLUMNS = ("table", "", "bits", "rows", "changed", "a save now", "whole", "why")


@dataclass(frozen=True)
class ExplainedTable:
    """What a delta now would hold of a table, and why.

    Attributes
    ----------
    name, rows
        The table, and its rows.
    whole
        Whether all rows are saved, because neither hooks nor what is known of the rows stored tell which changed.
    why
        Why the table is compared or whole, or how its rows are tracked.
    bits
        Width of its quantized rows; 32 is lossless. None where a codec of another kind has no width.
    changed
        Rows that a delta now would hold. Of many ranks, those that this one has, and of a compared table those that it
        writes.
    compared
        Whether saves compare all rows with what is stored, because hooks can't tell which of them changed.
    bytes, whole_bytes
        Bytes that these rows, and all rows, are expected to take, with the optimizer state beside them.
    """

    name: str
    rows: int
    whole: bool
    why: str
    bits: int | None
    changed: int
    bytes: int
    whole_bytes: int
    compared: bool = False


class Explanation(tuple[ExplainedTable, ...]):
    """An `ExplainedTable` for each table. Prints as a table."""

    snapshot_bytes: int  # the checkpointer's
    # live_bytes, whole_live_bytes: bytes in memory of the rows of a delta now, and of all rows, that don't fit into
    # `snapshot_bytes`: `save` would encode them before it returns. Of many ranks, on this one.
    live_bytes: int
    whole_live_bytes: int
    live_pace: float | None = None  # bytes a second of such rows in the last save that had some; None before
    budget: Budget | None = None  # the checkpointer's, as its restores have left it
    # Bytes of memory that hold what is stored of rows: as codes, and as digests where there was no room for codes.
    code_bytes: int = 0
    digest_bytes: int = 0
    exact_bytes: int = 0  # of the codes, those of lossless rows: see `Limits.exact_parents`
    absolute: Mapping[str, str] = MappingProxyType({})  # by path, why that does nothing for arrays

    @classmethod
    def of(
        cls,
        tables: Iterable[ExplainedTable],
        arrays: Sequence[RowArray],
        snapshot_bytes: int,
        budget: Budget | None,
        known_bytes: tuple[int, int, int],
        absolute: Mapping[str, str],
    ) -> Self:
        """Explain saves of tables, whose rows are in `arrays`, in the order in which saves copy them."""
        found = cls(tables)
        changed = {table.name: table.changed for table in found}
        found.snapshot_bytes, found.budget = snapshot_bytes, budget
        found.code_bytes, found.exact_bytes, found.digest_bytes = known_bytes
        found.absolute = absolute
        found.live_bytes = _without_room(
            [changed[each.table.name] * _local_row_bytes(each) for each in arrays], snapshot_bytes
        )
        found.whole_live_bytes = _without_room(
            [each.table.local_rows * _local_row_bytes(each) for each in arrays], snapshot_bytes
        )
        return found

    def __repr__(self) -> str:
        lines = [_COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        for kind, nbytes in (("delta now", self.live_bytes), ("whole version", self.whole_live_bytes)):
            if nbytes:
                text.append(self._stall(kind, nbytes))
        text += [f"Budget: {self.budget}."] if self.budget else []
        if self.code_bytes or self.digest_bytes:
            exact = f", {bytes_text(self.exact_bytes)} of them exact" if self.exact_bytes else ""
            kept = (
                f"{bytes_text(self.code_bytes)} of codes{exact}, {bytes_text(self.digest_bytes)} of digests"
            )
            text.append(f"In memory of what is stored: {kept}.")
        if self.absolute:
            arrays = (f"{path.removeprefix('tables/')} ({why})" for path, why in self.absolute.items())
            text.append(f"exact_parents does nothing for {listed(arrays, 3)}.")
        text += [ADVICE] if any(table.whole or table.compared for table in self) else []
        return "\n".join(text)

    def _stall(self, kind: str, nbytes: int) -> str:
        seconds = f": {nbytes / self.live_pace:.2g} s at the pace of the last one" if self.live_pace else ""
        return (
            f"A {kind} holds training until {bytes_text(nbytes)} of rows are encoded that don't fit into "
            f"snapshot_bytes, {bytes_text(self.snapshot_bytes)}{seconds}."
        )


def _local_row_bytes(array: RowArray) -> int:
    return array.local_columns * array_dtype(array.dtype).itemsize


def _without_room(sizes: Iterable[int], limit: int) -> int:
    """The bytes of the arrays that a snapshot leaves in the model; see `Staging.stage`."""
    used = left = 0
    for nbytes in sizes:
        if used + nbytes > limit:
            left += nbytes
        else:
            used += nbytes
    return left


def _cells(table: ExplainedTable) -> tuple[str, ...]:
    return (
        table.name,
        "whole" if table.whole else "compared" if table.compared else "tracked",
        "-" if table.bits is None else str(table.bits),
        f"{table.rows:,}",
        f"{table.changed:,}",
        bytes_text(table.bytes),
        bytes_text(table.whole_bytes),
        table.why,
    )


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


def save_line(stats: SaveStats, record: Record) -> str:
    """The line that the log has of a save."""
    step, kind = record.step, record.kind
    live = f" ({bytes_text(stats.live_bytes)} beyond snapshot_bytes were encoded)" if stats.live_bytes else ""
    reasons = f"; whole are {describe(whole)}; see {PAGE}" if (whole := record.policy.get("whole")) else ""
    folded = f"; {bytes_text(stats.fold_bytes)} of folds were written before" if stats.fold_bytes else ""
    return (
        f"step {step}: {kind}, {stats.rows:,} of {stats.table_rows:,} rows, {bytes_text(stats.bytes)} "
        f"({100 * stats.ratio:.1f} % of full), stalled {1000 * stats.seconds_stalled:.0f} ms{live}, "
        f"written in {stats.seconds_writing:.1f} s{folded}{_raw_text(record)}{reasons}"
    )


def _raw_text(record: Record) -> str:
    """Which arrays on grids have many rows that are stored as they are, which takes more bytes than it might."""
    shares = {path: entry.raw / entry.rows for path, entry in record.arrays.items() if entry.raw}
    most = sorted(
        (-share, path.removeprefix("tables/")) for path, share in shares.items() if share > _MOST_RAW
    )
    shown = listed((f"{-100 * share:.1f} % of {path}" for share, path in most), 3)
    return f"; rows that their grid can't hold were stored as they are: {shown}" if most else ""


def bytes_text(nbytes: float) -> str:
    """Bytes for people, in powers of a thousand: 12.9 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
