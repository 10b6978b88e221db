"""The figures of a store that its reports show, from records and names alone: no payload is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import UNREAD, Facts, StoreFacts, codec_text, health, read_store
from cnr_store.errors import EmptyStoreError
from cnr_store.format.layout import decode_name
from cnr_store.format.record import Record
from cnr_store.policies.budget import Budget
from cnr_store.policies.whole_tables import describe

MAX_TABLES = 100
"""Tables with figures of their own, those that take the most bytes."""
_LONGEST = 300
"""Characters of a reason."""


@dataclass(frozen=True)
class TableFigures:
    """What saves did with a table."""

    name: str  # name, rows, dim, codec: as they are in the newest version that has it
    rows: int
    dim: int
    codec: str
    bytes: int  # of its rows and of the optimizer state beside them, over all versions
    shares: list[float | None]  # by version, the share of its rows that this holds; None without such a table


@dataclass(frozen=True)
class Decisions:
    """Versions after one another of which the same was decided, for the same reason."""

    first_step: int
    last_step: int
    versions: int
    kind: str  # kind, policy, reason: what they are, and why; of the newest one, if reasons differ in a number alone
    policy: str
    reason: str
    width: str  # the budget, or the bits of tables that no option names, and why; empty if all are named
    whole: str  # which tables were whole because what changed of them was unknown, and why; empty if none was


@dataclass(frozen=True)
class Figures:
    """The figures of a store."""

    url: str
    versions: list[Facts]  # oldest first; beside what `cnr ls` shows, ``saved_seconds`` and ``restore_bytes``
    tables: list[TableFigures]  # at most `MAX_TABLES`, those that take the most bytes first
    table_count: int  # how many there are
    decisions: list[Decisions]  # oldest first
    errors: list[str]  # what is damaged

    @property
    def known(self) -> list[Facts]:
        """The versions whose records can be read."""
        return [facts for facts in self.versions if facts["damaged"] is None]

    @property
    def written_bytes(self) -> int:
        """Bytes of all versions and their folds."""
        return sum(facts["bytes"] + (facts["fold_bytes"] or 0) for facts in self.known)

    @property
    def full_bytes(self) -> int:
        """Bytes of as many full copies of the model."""
        return sum(facts["full_bytes"] for facts in self.known)

    @property
    def restorable(self) -> int:
        """How many versions can be restored, as far as names and records tell."""
        return sum(health(facts) == UNREAD for facts in self.versions)

    def typical(self, name: str) -> float | None:
        """The middle one of a figure of all versions."""
        values = [facts[name] for facts in self.known if facts[name] is not None]
        return median(values) if values else None


def read_figures(catalog: Catalog) -> Figures:
    """The figures of a store now. `EmptyStoreError` if there is no store, or no version in it."""
    found = read_store(catalog)
    if not found.versions:
        raise EmptyStoreError(
            f"{catalog.backend.url} holds no committed version: check the URL, or save one first"
        )
    tables, table_count = _tables(found.records)
    return Figures(
        catalog.backend.url,
        list(_versions(found)),
        tables,
        table_count,
        _decisions(found.records),
        [str(error) for error in found.errors],
    )


def _versions(found: StoreFacts) -> Iterator[Facts]:
    saved = {record.id: record.policy.get("seconds", {}).get("saved") for record in found.records}
    for facts in found.versions:
        version, reach = facts["id"], found.reaches.get(facts["id"])
        nbytes = None if reach is None else reach.nbytes
        yield {**facts, "saved_seconds": saved.get(version), "restore_bytes": nbytes}


def _tables(records: Sequence[Record]) -> tuple[list[TableFigures], int]:
    """The tables that take the most bytes, and how many tables there are."""
    nbytes: dict[str, int] = {}
    newest: dict[str, tuple[Record, str]] = {}
    for record in records:
        for path, entry in record.arrays.items():
            folder, _, name = path.rpartition("/")
            if entry.kind != "dense":
                nbytes[folder] = nbytes.get(folder, 0) + entry.nbytes
                if name == "weight":
                    newest[folder] = record, path
    largest = sorted(newest, key=lambda folder: -nbytes[folder])
    shown = [_table(*newest[folder], nbytes[folder], records) for folder in largest[:MAX_TABLES]]
    return shown, len(largest)


def _table(newest: Record, path: str, nbytes: int, records: Sequence[Record]) -> TableFigures:
    entry = newest.arrays[path]
    held = (record.arrays.get(path) for record in records)
    shares = [None if each is None else each.rows / each.shape[0] if each.shape[0] else 0.0 for each in held]
    name = decode_name(path.split("/")[-2])
    rows, dim = (*entry.shape, 1)[:2]
    return TableFigures(name, rows, dim, codec_text(entry.codec or {}), nbytes, shares)


def _decisions(records: Iterable[Record]) -> list[Decisions]:
    runs: list[tuple[tuple[str, ...], Decisions]] = []
    for record in records:
        policy = record.policy
        told = (
            record.kind,
            _text(policy.get("policy")),
            _text(policy.get("reason")),
            _width(record),
            _text(describe(policy["whole"])) if policy.get("whole") else "",
        )
        alike = tuple(re.sub(r"\d+", "0", text) for text in told)
        first, versions = record.step, 1
        if runs and runs[-1][0] == alike:
            before = runs.pop()[1]
            first, versions = before.first_step, before.versions + 1
        runs.append((alike, Decisions(first, record.step, versions, *told)))
    return [run for _, run in runs]


def _width(record: Record) -> str:
    """How tables that no option names are rounded: by a budget, or by bits and why so many."""
    budget, bits = record.policy.get("budget"), record.policy.get("bits")
    if budget:
        return _text(Budget(**budget, spent=record.spent))
    return f"{_text(bits[0])} bits: {_text(bits[1])}" if isinstance(bits, list) and len(bits) == 2 else ""


def _text(value: Any) -> str:
    """A word of a record that nothing proves, bounded."""
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def spans(count: int, most: int) -> Iterator[range]:
    """At most so many ranges of versions after one another, which hold all of them."""
    columns = min(count, most)
    for at in range(columns):
        yield range(at * count // columns, (at + 1) * count // columns)


def highest(values: Sequence[float | None], span: Iterable[int]) -> float | None:
    """The highest value that is known in a part."""
    return max((value for at in span if (value := values[at]) is not None), default=None)
