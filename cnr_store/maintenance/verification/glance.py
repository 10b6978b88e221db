"""What names and records tell of versions that can't be restored, with the states that many ranks saved.

No array and no manifest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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


class Reach(NamedTuple):
    """What reading a version takes: other versions, and the bytes of all their objects that it reads."""

    versions: int  # how many versions it touches, itself included
    nbytes: int | None  # None if one that it depends on is lost
    lost: str | None  # the id of that one


def find_reaches(records: Iterable[Record], folds: Mapping[str, Record]) -> dict[str, Reach]:
    """By version, what reading it takes: nothing beneath what is folded.

    `records`: those of all committed versions, oldest first.
    `folds`: those of folds, by version.
    """
    # By version: of each array its bytes, or the base that is lost; and the versions touched.
    read, touched = dict[str, dict[str, int | str]](), dict[str, set[str]]()
    found = {}
    for record in records:
        fold, here, beneath = folds.get(record.id), dict[str, int | str](), set[str]()
        for path, entry in record.arrays.items():
            if entry.base is not None and fold is not None and path in fold.arrays:
                here[path] = fold.arrays[path].nbytes
            elif entry.base is None:
                here[path] = entry.nbytes
            else:
                older = read.get(entry.base, {}).get(path, entry.base)
                here[path] = older if isinstance(older, str) else older + entry.nbytes
                beneath |= touched.get(entry.base, {entry.base})
        read[record.id] = here
        touched[record.id] = {record.id} | beneath.intersection(record.needs)
        lost = next((base for base in here.values() if isinstance(base, str)), None)
        own = record.nbytes - sum(entry.nbytes for entry in record.arrays.values())
        nbytes = own + sum(each for each in here.values() if isinstance(each, int))
        found[record.id] = Reach(len(touched[record.id]), nbytes if lost is None else None, lost)
    return found


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
