"""What folds that did not end have left of versions that stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.record_document import decode_record

REASON = (
    "a fold of this version has not ended: it is under way, was stopped and may go on, or was killed, and nothing "
    "tells which; what it left goes once the version is folded (`cnr compact`) or removed"
)


@dataclass(frozen=True)
class FoldLeftovers:
    """Objects of attempts at folds, other than the folds that exist.

    Attributes
    ----------
    removable
        By version that has a fold, the sizes of the objects of other attempts, by key. None of these can succeed.
    left
        By version that has no fold, the bytes of all attempts. One that was stopped may still create the record.
    """

    removable: Mapping[str, Mapping[str, int]]
    left: Mapping[str, int]


def find_fold_leftovers(backend: Backend, versions: Collection[str]) -> FoldLeftovers:
    """What attempts at folds of these versions left."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for key, nbytes in backend.list_keys(layout.FOLDS):
        version = key.split("/")[1]
        if version in versions:
            found[version][key] = nbytes
    removable, left = {}, {}
    for version, sizes in found.items():
        if layout.record_key(version, layout.FOLDS) not in sizes:
            left[version] = sum(sizes.values())
        # Where a create is not atomic, another attempt may still replace the record.
        elif backend.atomic_create and (nonce := _nonce(backend, version)) is not None:
            others = {
                key: nbytes for key, nbytes in sizes.items() if key.split("/")[2] not in (nonce, layout.NODE)
            }
            if others:
                removable[version] = others
    return FoldLeftovers(removable, left)


def _nonce(backend: Backend, version: str) -> str | None:
    """What names the folder of a version's fold; None if its record is damaged, or went meanwhile."""
    with suppress(ObjectNotFoundError, CorruptionError, FormatError):
        record = decode_record(backend.get(layout.record_key(version, layout.FOLDS)), version, layout.FOLDS)
        return None if record is None else record.nonce
    return None
