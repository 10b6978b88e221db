"""What saves do with each table, and why, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    __slots__ = ()

    def __repr__(self) -> str:
        lines = [_COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


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
