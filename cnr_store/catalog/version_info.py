"""A committed version, and a list of them, as users see them; its metadata, without torch, and the figures in it."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from cnr_store.errors import FormatError
from cnr_store.format.record import Record
from cnr_store.format.state import Json, decode_state


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


def decode_metadata(doc: Json) -> Any:
    """The metadata that stands in a record. Tensors become numpy arrays. `FormatError` if it can't be decoded."""
    return decode_state(doc, read=_no_array)


def find_figures(doc: Json) -> dict[str, float]:
    """The finite numbers of the metadata that stands in a record, by name.

    A number is one of Python or of numpy, or an array or a tensor that holds just one.
    """
    metadata = decode_metadata(doc)
    if not isinstance(metadata, dict):
        return {}
    figures = {name: as_figure(value) for name, value in metadata.items() if isinstance(name, str)}
    return {name: figure for name, figure in figures.items() if figure is not None}


def as_figure(value: object) -> float | None:
    """The finite number that a value of the metadata is, None for all else."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the largest float, which has its place in no order of floats
        return None


def _no_array(path: str) -> np.ndarray[Any, Any]:
    raise FormatError(f"metadata refers to an array ({path}); only small values may stand there")
