"""What commands print of records: of one version, and of all in a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.claims import list_tombstoned
from cnr_store.catalog.objects import list_marked, read_tags
from cnr_store.catalog.version_info import find_figures
from cnr_store.cli.output import plain
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.pins import read_reasons
from cnr_store.maintenance.verification.glance import Reach, find_reaches, read_folds, read_records

Facts = Mapping[str, Any]
"""What is known of a version, by name; each name is there, None where nothing is known."""

_ATTRIBUTES = {
    **{name: name for name in ("id", "step", "kind", "rows", "table_rows")},
    "bytes": "nbytes",
    **{name: name for name in ("full_bytes", "previous", "time", "metadata", "stalled_seconds")},
}
"""Attributes of a record, by the names that are printed."""


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
    shown = _without_order(metadata)
    has_names = isinstance(shown, dict) and not any(name.startswith("$") for name in shown)
    return {name: figures.get(name, value) for name, value in shown.items()} if has_names else shown


def _without_order(doc: Any) -> Any:
    """Metadata, with ordered dictionaries and counters of names as plain ones, which JSON keeps in order."""
    if isinstance(doc, list):
        return [_without_order(item) for item in doc]
    if not isinstance(doc, dict):
        return doc
    pairs = doc.get("$ordered", doc.get("$counter"))
    if pairs is not None and all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        doc = dict(pairs)
    return {name: _without_order(value) for name, value in doc.items()}


def fold_bytes(catalog: Catalog, version: str) -> int | None:
    """Bytes that the fold of a version takes. None if it has none that can be read."""
    try:
        fold = catalog.find_fold(version)
    except (CorruptionError, FormatError):  # `cnr verify` says so
        return None
    return None if fold is None else fold.nbytes


UNREAD = "not verified"
"""The health of a version that nothing seems wrong with: its bytes were not read."""


def health(facts: Facts) -> str:
    """What names and records tell of whether a version can be restored; `UNREAD` where they tell nothing bad."""
    marks = {"damaged": "damaged", "removed": "being removed", "lost_base": "can't be restored"}
    return ", ".join(text for name, text in marks.items() if facts[name]) or UNREAD


def open_store(url: str, options: Mapping[str, Any]) -> Catalog:
    """The catalog of a store that is there. `EmptyStoreError` if there is no store."""
    catalog = Catalog(open_backend(url, **options))
    if not catalog.check_format():
        raise EmptyStoreError(f"{catalog.backend.url} holds no store: check the URL")
    return catalog


@dataclass(frozen=True)
class StoreFacts:
    """What names and records tell of a store."""

    versions: list[Facts]  # of each version, oldest first, also of those whose records can't be read
    records: list[Record]  # those that can be read, oldest first
    reaches: Mapping[str, Reach]  # what reading these takes
    errors: list[Exception]  # what is wrong with the others, and with tags


def read_store(catalog: Catalog) -> StoreFacts:
    """What names and records tell of a store now. `EmptyStoreError` if there is no store."""
    backend = catalog.backend
    records, damaged = read_records(catalog)
    if not (records or damaged or catalog.check_format()):
        raise EmptyStoreError(f"{backend.url} holds no store: check the URL")
    pinned, tombstoned = list_marked(backend, layout.PINS), list_tombstoned(backend)
    folds, damaged_folds = read_folds(catalog, records)
    errors: list[Exception] = [*damaged.values(), *damaged_folds.values()]
    reaches = find_reaches(records, folds)
    tags: dict[str, list[str]] = {}
    try:
        for name, version in read_tags(backend).items():
            tags.setdefault(version, []).append(name)
    except CorruptionError as error:
        errors.append(error)
    unknown = dict.fromkeys([*_ATTRIBUTES, "chain", "lost_base"])
    facts: dict[str, dict[str, Any]] = {version: unknown | {"id": version} for version in damaged}
    for record in records:
        reach = reaches[record.id]
        facts[record.id] = record_facts(record) | {"chain": reach.versions, "lost_base": reach.lost}
    versions: list[Facts] = [
        facts[version]
        | {
            "tags": tags.get(version, []),
            "pinned": version in pinned,
            "pin_reasons": read_reasons(backend, version) if version in pinned else [],
            "folded": version in folds,
            "fold_bytes": folds[version].nbytes if version in folds else None,
            "removed": version in tombstoned,
            "damaged": None if version not in damaged else str(damaged[version]),
        }
        for version in sorted(facts)
    ]
    return StoreFacts(versions, records, reaches, errors)


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
