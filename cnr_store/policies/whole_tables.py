"""Why tables are saved whole, for logs and commit records: of many tables, few reasons (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_REASONS = 16
MAX_NAMED = 16
"""Tables named of each reason. With both limits what is stored stays small, however many tables there are."""
_FURTHER = "further reasons"


def summary(reasons: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The reasons, by table, the other way round: for each, how many tables have it, and the first of their names."""
    tables: dict[str, list[str]] = {}
    for table, reason in reasons.items():
        few = reason in tables or len(tables) < MAX_REASONS
        tables.setdefault(reason if few else _FURTHER, []).append(table)
    return {reason: {"count": len(names), "tables": names[:MAX_NAMED]} for reason, names in tables.items()}


def describe(found: Mapping[str, Mapping[str, Any]]) -> str:
    """What `summary` returned, for people: ``'users', 'items' and 3 more: why; 'tags': why``."""
    parts = []
    for reason, tables in found.items():
        hidden = tables["count"] - len(tables["tables"])
        names = ", ".join(map(repr, tables["tables"])) + (f" and {hidden} more" if hidden else "")
        parts.append(f"{names}: {reason}")
    return "; ".join(parts)
