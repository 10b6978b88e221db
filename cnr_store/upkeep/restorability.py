"""Which versions can be restored, given what is sound of each version and fold."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from cnr_store.catalog import Catalog
from cnr_store.chain import chain
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.upkeep.findings import Finding
from cnr_store.upkeep.inspection import Soundness

Home = tuple[str, str]
"""Room and id of a version or a fold."""

_TOLD = ""


class Restorability:
    """Follows every array's chain as readers do: newest first, up to a whole link or a fold.

    Parameters
    ----------
    sound
        What was found of every home that the chains lead to.
    known
        Messages of what was found so far, which are not given again.
    """

    def __init__(self, catalog: Catalog, sound: Mapping[Home, Soundness], known: Container[str]) -> None:
        self._catalog = catalog
        self._sound = sound
        self._known = known

    def judge(self, record: Record) -> tuple[bool, Finding | None]:
        """Whether a version can be restored whole, and what its chains lack that no object's finding says."""
        own = self._sound[record.room, record.id]
        reasons = {
            path: reason for path in record.arrays if (reason := self._broken(record, path, own)) is not None
        }
        told = [(path, reason) for path, reason in reasons.items() if reason != _TOLD]
        finding = None
        if told:
            more = f" (and {len(told) - 1} more of its arrays)" if len(told) > 1 else ""
            finding = Finding(told[0][1] + more, record.id, path=told[0][0])
        elif reasons and self._only_fold_is_damaged(record):
            key = layout.record_key(record.id, layout.FOLDS)
            what = (
                f"version {record.id}: only its fold is damaged, the versions that it was made of are sound: with no "
                f"job's retention running, remove {key}, and the version can be restored"
            )
            finding = Finding(what, record.id, key)
        return own.manifest and own.state and not reasons, finding

    def _broken(self, record: Record, path: str, own: Soundness) -> str | None:
        """Why an array can't be read: a message, `_TOLD` if an object's finding says it, None if it can."""
        entry = record.arrays[path]
        if entry.kind == "dense":
            return _TOLD if path in own.spoiled else None
        try:
            links = list(chain(self._catalog, record, path))
        except (CorruptionError, FormatError) as error:
            return _TOLD if str(error) in self._known else str(error)
        where = f"version {record.id}, {path}"
        sound = [self._sound[link.room, link.id] for link in links if (link.room, link.id) in self._sound]
        if len(sound) < len(links):
            return f"{where}: versions were removed or folded while it was checked; check it again"
        if any(not each.manifest or path in each.spoiled for each in sound):
            return _TOLD
        for link in links:
            other = link.arrays[path]
            if (other.shape[1:], other.element) != (entry.shape[1:], entry.element):
                return (
                    f"{where}: {entry.shape} {entry.element} leans on {link.home}, which has {other.shape} "
                    f"{other.element}"
                )
        if sum(each.most_rows[path] for each in sound) < entry.shape[0]:
            return f"{where}: {entry.shape[0]} rows are recorded, more than the objects of its chain have room for"
        return None

    def _only_fold_is_damaged(self, record: Record) -> bool:
        """Whether everything is sound along the chains that the fold stands for."""
        own = self._sound[record.room, record.id]
        if not (own.manifest and own.state and not own.spoiled):
            return False
        for path in record.arrays:
            for home in _versions(self._catalog, record, path):
                sound = self._sound.get((layout.VERSIONS, home)) if home is not None else None
                if sound is None or not sound.manifest or path in sound.spoiled:
                    return False
        return True


def _versions(catalog: Catalog, record: Record, path: str) -> Iterator[str | None]:
    """Ids along an array's chain as if nothing were folded; None where it breaks."""
    found: Record | None = record
    while found is not None and path in found.arrays:
        yield found.id
        base = found.arrays[path].base
        if base is None:
            return
        try:
            found = catalog.find_record(base) if base < found.id else None
        except (CorruptionError, FormatError):
            found = None
    yield None
