"""What commands print of a version's record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.metadata import find_figures
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.record import Record

_ATTRIBUTES = {
    **{name: name for name in ("id", "step", "kind", "rows", "table_rows")},
    "bytes": "nbytes",
    **{name: name for name in ("full_bytes", "previous", "time", "metadata", "stalled_seconds")},
}
"""Attributes of a record, by the names that are printed."""


def record_names() -> dict[str, Any]:
    """The names of `record_facts`, of a record that can't be read."""
    return dict.fromkeys([*_ATTRIBUTES, "chain"])


def record_facts(record: Record) -> dict[str, Any]:
    """What a record says of its version as a whole. `chain`: versions that reading it touches, without folds."""
    facts = {name: getattr(record, attribute) for name, attribute in _ATTRIBUTES.items()}
    return facts | {"metadata": _plain(record.metadata), "chain": 1 + len(record.needs)}


def _plain(metadata: Any) -> Any:
    """A record's metadata with its figures as plain numbers, which numpy's and torch's are not in a record."""
    try:
        figures = find_figures(metadata)
    except FormatError:  # it is printed as it stands
        return metadata
    has_names = isinstance(metadata, dict) and not any(name.startswith("$") for name in metadata)
    return {name: figures.get(name, value) for name, value in metadata.items()} if has_names else metadata


def fold_bytes(catalog: Catalog, version: str) -> int | None:
    """Bytes that the fold of a version takes. None if it has none that can be read."""
    try:
        fold = catalog.find_fold(version)
    except (CorruptionError, FormatError):  # `cnr verify` says so
        return None
    return None if fold is None else fold.nbytes


def codec_text(config: Mapping[str, Any]) -> str:
    """A row codec's configuration for people: its name and its settings."""
    name = str(config.get("id", "unknown")).removeprefix("cnr_").replace("_", " ")
    return ", ".join([name, *(f"{key} {value}" for key, value in config.items() if key != "id" and value)])


def metadata_text(metadata: Any) -> str:
    """A version's metadata for people; empty if there is none."""
    if not isinstance(metadata, dict):
        return "" if metadata is None else _short(metadata)
    return ", ".join(f"{name}={_short(value)}" for name, value in metadata.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
