"""A committed version, and a list of them, as users see them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from cnr_store.catalog.metadata import decode_metadata
from cnr_store.format.record import Record


@dataclass(frozen=True)
class VersionInfo:
    """A committed version, as users see it.

    Attributes
    ----------
    id, step, kind
        Its id; the caller's step; ``baseline`` or ``delta``.
    previous
        Id of the version training continued from, or None.
    time, datetime
        Seconds since 1970, and the same as a `datetime.datetime` in UTC.
    bytes
        Bytes written for it, every object counted.
    rows
        Table rows written for it.
    metadata
        What the caller gave to `save`.
    """

    id: str
    step: int
    kind: str
    previous: str | None
    time: float
    bytes: int
    rows: int
    metadata: Any = None

    @classmethod
    def from_record(cls, record: Record) -> VersionInfo:
        """What a commit `record` says of its version.

        Raises
        ------
        FormatError
            Its metadata can't be decoded.
        """
        return cls(
            id=record.id,
            step=record.step,
            kind=record.kind,
            previous=record.previous,
            time=record.time,
            bytes=record.nbytes,
            rows=record.rows,
            metadata=decode_metadata(record.metadata),
        )

    @property
    def datetime(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.time, dt.UTC)

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        return html_table(_COLUMNS, [_cells(self)])


_COLUMNS = ("id", "step", "kind", "rows", "bytes", "time", "metadata")


def _cells(info: VersionInfo) -> list[str]:
    metadata = "" if info.metadata is None else str(info.metadata)
    time = f"{info.datetime:%Y-%m-%d %H:%M:%S} UTC"
    return [info.id, f"{info.step}", info.kind, f"{info.rows:,}", f"{info.bytes:,}", time, metadata]


class VersionList(list[VersionInfo]):
    """Committed versions, oldest first. Notebooks show them as a table."""

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, map(_cells, self)) if self else "no committed version"


def html_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as notebooks show it."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(facts: Mapping[str, Any]) -> str:
    """Names and values as notebooks show them; what is empty is left out."""
    shown = ((name, str(value)) for name, value in facts.items() if value not in (None, "", (), {}))
    return html_table(("", ""), shown)
