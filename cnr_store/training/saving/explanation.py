"""What saves do with each table, and why, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import array_dtype
from cnr_store.training.saving.stats import bytes_text

_COLUMNS = ("table", "", "bits", "rows", "changed", "a save now", "whole", "why")


@dataclass(frozen=True)
class ExplainedTable:
    """What a delta now would hold of a table, and why.

    Attributes
    ----------
    name, rows
        The table, and its rows.
    whole
        Whether all rows are saved, because those that changed are not known.
    why
        Why the table is whole, or how its rows are tracked.
    bits
        Width of its quantized rows; 32 is lossless. None where a codec of another kind has no width.
    changed
        Rows that a delta now would hold.
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


class Explanation(tuple[ExplainedTable, ...]):
    """An `ExplainedTable` for each table. Prints as a table."""

    snapshot_bytes: int  # the checkpointer's
    # live_bytes, whole_live_bytes: bytes in memory of the rows of a delta now, and of all rows, that don't fit into
    # `snapshot_bytes`: `save` would encode them before it returns. Of many ranks, on this one.
    live_bytes: int
    whole_live_bytes: int
    live_pace: float | None = None  # bytes a second of such rows in the last save that had some; None before

    @classmethod
    def of(cls, tables: Iterable[ExplainedTable], arrays: Sequence[RowArray], snapshot_bytes: int) -> Self:
        """Explain saves of tables, whose rows are in `arrays`, in the order in which saves copy them."""
        found = cls(tables)
        changed = {table.name: table.changed for table in found}
        found.snapshot_bytes = snapshot_bytes
        # Some rows of tables are copied before all rows of others.
        delta = sorted(arrays, key=lambda each: changed[each.table.name] >= each.table.local_rows)
        found.live_bytes = _without_room(
            [changed[each.table.name] * _local_row_bytes(each) for each in delta], snapshot_bytes
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


def explained(
    name: str, rows: int, whole: bool, why: str, config: Mapping[str, Any], changed: int, row_bytes: float
) -> ExplainedTable:
    """What a delta would hold of a table, whose codec has this configuration."""
    return ExplainedTable(
        name=name,
        rows=rows,
        whole=whole,
        why=why,
        bits=32 if config["id"] == "cnr_rows" else config.get("bits"),
        changed=changed,
        bytes=round(changed * row_bytes),
        whole_bytes=round(rows * row_bytes),
    )


def _cells(table: ExplainedTable) -> tuple[str, ...]:
    return (
        table.name,
        "whole" if table.whole else "tracked",
        "-" if table.bits is None else str(table.bits),
        f"{table.rows:,}",
        f"{table.changed:,}",
        bytes_text(table.bytes),
        bytes_text(table.whole_bytes),
        table.why,
    )
