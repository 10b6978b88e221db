"""Why tables are saved whole, for logs and commit records: of many tables, few reasons."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MAX_REASONS = 16
MAX_NAMED = 16
"""Tables named of each reason. With both limits what is stored stays small, however many tables there are."""
_FURTHER = "further reasons"
PAGE = "https://github.com/cnr-store/cnr-store/blob/main/docs/how-to/compared-tables.md"
ADVICE = (
    "A save writes the rows whose stored form changed: the whole table, if that is all of them. They are few on grids "
    "(a budget, as by default, or a relative cnr_lattice and state_bits='auto'), and fewer where SparseAdam or Adagrad "
    f"steps the tables: {PAGE}"
)


def summary(
    reasons: Mapping[str, str], sizes: Mapping[str, tuple[float, float]] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """The reasons, by table, the other way round: for each, how many tables have it, and the first of their names.

    `sizes`: by table, the bytes that it is expected to take whole, and as a delta; their sums are added.
    """
    tables: dict[str, list[str]] = {}
    for table, reason in reasons.items():
        few = reason in tables or len(tables) < MAX_REASONS
        tables.setdefault(reason if few else _FURTHER, []).append(table)
    found = {reason: {"count": len(names), "tables": names[:MAX_NAMED]} for reason, names in tables.items()}
    for reason, names in tables.items():
        sums = map(sum, zip(*(sizes[name] for name in names if name in sizes), strict=True))
        found[reason] |= zip(("bytes", "delta_bytes"), map(round, sums), strict=False)
    return found


def describe(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What `summary` returned, for people: ``'users', 'items' and 3 more: why; 'tags': why``."""
    parts = []
    for reason, tables in found.items():
        hidden = tables["count"] - len(tables["tables"])
        names = ", ".join(map(repr, tables["tables"])) + (f" and {hidden} more" if hidden else "")
        has_costs = {"bytes", "delta_bytes"} <= tables.keys()
        costs = " ({bytes:,} bytes, as a delta {delta_bytes:,})".format(**tables) if has_costs else ""
        parts.append(f"{names}: {reason}{costs}")
    return "; ".join(parts)
