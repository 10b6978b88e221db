"""What names and records tell of versions that can't be restored, with the states that many ranks saved.

No array and no manifest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from cnr_backends import ObjectNotFoundError, Transfer
from cnr_store.catalog.catalog import READ_WORKERS, Catalog, count_parts
from cnr_store.catalog.objects import list_ids
from cnr_store.chains.array_reader import chain
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record


def read_records(catalog: Catalog) -> tuple[list[Record], dict[str, CorruptionError | FormatError]]:
    """Records of the committed versions, oldest first; and by version, what is wrong with those that can't be read."""
    catalog.check_format()
    with Transfer(READ_WORKERS, 4 * READ_WORKERS) as transfer:
        records, damaged = read_each(transfer, catalog.find_record, catalog.ids_from_newest()[::-1])
    return list(records.values()), damaged


def read_folds(
    catalog: Catalog, records: Iterable[Record]
) -> tuple[dict[str, Record], dict[str, CorruptionError | FormatError]]:
    """Records of the folds that there are now of these versions; and what is wrong with those that can't be read."""
    catalog.look_for_folds()
    folded = list_ids(catalog.backend, layout.FOLDS).intersection(record.id for record in records)
    with Transfer(READ_WORKERS, 4 * READ_WORKERS) as transfer:
        return read_each(transfer, catalog.find_fold, sorted(folded))


def read_each(
    transfer: Transfer, find: Callable[[str], Record | None], versions: Sequence[str]
) -> tuple[dict[str, Record], dict[str, CorruptionError | FormatError]]:
    """The records that are there, several read at once; and what is wrong with those that can't be read."""
    records, damaged = dict[str, Record](), dict[str, CorruptionError | FormatError]()

    def read(version: str) -> Record | CorruptionError | FormatError | None:
        try:
            return find(version)
        except (CorruptionError, FormatError) as error:
            return error

    for version, found in zip(versions, transfer.map(read, versions), strict=True):
        if isinstance(found, Record):
            records[version] = found
        elif found is not None:
            damaged[version] = found
    return records, damaged


def find_lost_bases(records: Iterable[Record], folded: Collection[str]) -> dict[str, str]:
    """By id of a version that depends on one that is lost, the id of that one.

    `records`: those of all committed versions, oldest first.
    `folded`: ids of the versions that have folds, which depend on no other.
    """
    lost: dict[str, dict[str, str]] = {}  # by version and array; versions without a loss have no entry
    paths: dict[str, Collection[str]] = {}
    for record in records:
        paths[record.id] = record.arrays.keys()
        if record.id in folded:
            continue
        for path, entry in record.arrays.items():
            base = entry.base
            if base is None:
                continue
            is_there = path in paths.get(base, ())
            missing = lost.get(base, {}).get(path) if is_there else base
            if missing is not None:
                lost.setdefault(record.id, {})[path] = missing
    return {version: next(iter(by_path.values())) for version, by_path in lost.items()}


def find_lost(catalog: Catalog, record: Record) -> str | None:
    """What is missing of a version and of those that it depends on: a message, or None."""
    parts: set[str] = set()
    try:
        if layout.STATE_PARTS in record.requires:
            ranks = range(count_parts(catalog.state(record)))
            parts = {record.key(layout.state_part(rank)) for rank in ranks}
        links = {
            link.key("manifest")
            for path, entry in record.arrays.items()
            if entry.kind != "dense"
            for link in chain(catalog, record, path)
        }
    except (CorruptionError, FormatError) as error:
        return str(error)
    for key in sorted({record.key("manifest"), record.key("state/main.json"), *links}):
        try:
            catalog.backend.size(key)
        except ObjectNotFoundError:
            return f"{key} is lost"
    lost = parts.difference(key for key, _ in catalog.backend.list_keys(record.key("state"))) if parts else ()
    return f"{min(lost)} is lost" if lost else None
