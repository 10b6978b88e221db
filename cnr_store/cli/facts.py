"""What commands print of records: of one version, and of all in a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.claims import list_tombstoned
from cnr_store.catalog.metadata import find_figures
from cnr_store.catalog.objects import list_ids
from cnr_store.catalog.tags import read_tags
from cnr_store.cli.output import plain
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.pins import read_reasons
from cnr_store.maintenance.verification.glance import find_lost_bases, read_records

Facts = Mapping[str, Any]
"""What is known of a version, by name; each name is there, None where nothing is known."""

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


def fold_of(catalog: Catalog, version: str) -> Record | None:
    """The record of a version's fold. None if it has none that can be read."""
    try:
        return catalog.find_fold(version)
    except (CorruptionError, FormatError):  # `cnr verify` says so
        return None


def fold_bytes(catalog: Catalog, version: str) -> int | None:
    """Bytes that the fold of a version takes. None if it has none that can be read."""
    fold = fold_of(catalog, version)
    return None if fold is None else fold.nbytes


def health(facts: Facts) -> str:
    """Whether a version can be restored, as far as names and records tell."""
    marks = {"damaged": "damaged", "removed": "being removed", "lost_base": "can't be restored"}
    return ", ".join(text for name, text in marks.items() if facts[name]) or "ok"


def open_store(url: str, options: Mapping[str, Any]) -> Catalog:
    """The catalog of a store that is there.

    Raises
    ------
    EmptyStoreError
        There is no store.
    """
    catalog = Catalog(open_backend(url, **options))
    if not catalog.check_format():
        raise EmptyStoreError(f"{catalog.backend.url} holds no store: check the URL")
    return catalog


@dataclass(frozen=True)
class StoreFacts:
    """What names and records tell of a store.

    Attributes
    ----------
    versions
        The facts of each version, oldest first, also of those whose records can't be read.
    records, folds
        The records that can be read, oldest first; those of folds by version.
    errors
        What is wrong with the others, and with tags.
    """

    versions: list[Facts]
    records: list[Record]
    folds: Mapping[str, Record]
    errors: list[Exception]


def read_store(catalog: Catalog) -> StoreFacts:
    """What names and records tell of a store now.

    Raises
    ------
    EmptyStoreError
        There is no store.
    """
    backend = catalog.backend
    records, damaged = read_records(catalog)
    if not (records or damaged or catalog.check_format()):
        raise EmptyStoreError(f"{backend.url} holds no store: check the URL")
    catalog.look_for_folds()
    pinned, folded = list_ids(backend, layout.PINS), list_ids(backend, layout.FOLDS)
    tombstoned, lost = list_tombstoned(backend), find_lost_bases(records, folded)
    errors: list[Exception] = [*damaged.values()]
    tags: dict[str, list[str]] = {}
    try:
        for name, version in read_tags(backend).items():
            tags.setdefault(version, []).append(name)
    except CorruptionError as error:
        errors.append(error)
    facts = {version: record_names() | {"id": version} for version in damaged}
    facts |= {record.id: record_facts(record) for record in records}
    found = {version: fold_of(catalog, version) for version in sorted(folded.intersection(facts))}
    folds = {version: fold for version, fold in found.items() if fold is not None}
    versions: list[Facts] = [
        facts[version]
        | {
            "tags": tags.get(version, []),
            "pinned": version in pinned,
            "pin_reasons": read_reasons(backend, version) if version in pinned else [],
            "folded": version in folded,
            "chain": 1 if version in folded else facts[version]["chain"],
            "fold_bytes": folds[version].nbytes if version in folds else None,
            "removed": version in tombstoned,
            "lost_base": lost.get(version),
            "damaged": None if version not in damaged else str(damaged[version]),
        }
        for version in sorted(facts)
    ]
    return StoreFacts(versions, records, folds, errors)


def codec_text(config: Mapping[str, Any]) -> str:
    """A row codec's configuration for people: its name and its settings."""
    name = str(config.get("id", "unknown")).removeprefix("cnr_").replace("_", " ")
    return ", ".join([name, *(f"{key} {value}" for key, value in config.items() if key != "id" and value)])


def names_text(facts: Facts) -> str:
    """A version's tags, and whether and why it is pinned, for people."""
    reasons = "; ".join(plain(reason) for reason in facts["pin_reasons"])
    pinned = [f"pinned: {reasons}" if reasons else "pinned"] if facts["pinned"] else []
    return ", ".join([*facts["tags"], *pinned])


def metadata_text(metadata: Any) -> str:
    """A version's metadata for people; empty if there is none."""
    if not isinstance(metadata, dict):
        return "" if metadata is None else _short(metadata)
    return ", ".join(f"{plain(name)}={_short(value)}" for name, value in metadata.items())


def _short(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"$float"}:  # NaN and infinities, as records have them
        return plain(str(value["$float"]))
    if isinstance(value, float):
        return f"{value:.6g}"
    return plain(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
