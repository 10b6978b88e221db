"""Which versions can be restored, given what is sound of each version and fold."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import chain
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.maintenance.verification.inspect_version import Soundness
from cnr_store.maintenance.verification.report import Finding

Home = tuple[str, str]
"""Room and id of a version or a fold."""

_TOLD = ""


@dataclass(frozen=True)
class _Chain:
    """What an array's chain is from one link on.

    Attributes
    ----------
    reason
        Why it can't be read: a message, `_TOLD` if an object's finding says it, None if it can.
    most_rows
        How many rows its objects have room for.
    top
        Its first link; None where that is not known.
    """

    reason: str | None
    most_rows: int
    top: Record | None


class Restorability:
    """Follows every array's chain as readers do: newest first, up to a whole link or a fold.

    What is known of a base is not asked again for each version above it, or time would grow with the square of the
    versions.

    Parameters
    ----------
    sound
        What was found of every home that the chains lead to.
    known
        Messages of what was found so far, which are not given again.

    Attributes
    ----------
    overtaken
        Whether a chain led to what was not there, or not so, when it was looked at.
    """

    def __init__(self, catalog: Catalog, sound: Mapping[Home, Soundness], known: Container[str]) -> None:
        self._catalog = catalog
        self._sound = sound
        self._known = known
        self._chains: dict[tuple[Home, str], _Chain] = {}
        self.overtaken = False

    def judge(self, record: Record) -> tuple[bool, Finding | None]:
        """Whether a version can be restored whole, and what its chains lack that no object's finding says."""
        own = self._sound[record.prefix, record.id]
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
        found = self._chain(record, path)
        if found.reason is None and found.most_rows < entry.shape[0]:
            return (
                f"version {record.id}, {path}: {entry.shape[0]} rows are recorded, more than the objects of its chain "
                "have room for"
            )
        return found.reason

    def _chain(self, record: Record, path: str) -> _Chain:
        """A version's chain, followed only as far as it is not known yet."""
        links, found = [], _Chain(None, 0, None)
        try:
            for link in chain(self._catalog, record, path):
                known = self._chains.get(((link.prefix, link.id), path))
                if known is not None:
                    found = known
                    break
                links.append(link)
        except (CorruptionError, FormatError) as error:
            found = _Chain(_TOLD if str(error) in self._known else str(error), 0, None)
        for link in reversed(links):
            found = self._chains[(link.prefix, link.id), path] = self._over(link, path, found)
        return found

    def _over(self, link: Record, path: str, beneath: _Chain) -> _Chain:
        sound = self._sound.get((link.prefix, link.id))
        rows = 0 if sound is None else sound.most_rows.get(path, 0) + beneath.most_rows
        return _Chain(self._reason(link, path, sound, beneath), rows, link)

    def _reason(self, link: Record, path: str, sound: Soundness | None, beneath: _Chain) -> str | None:
        if sound is None:
            self.overtaken = True
            return (
                f"{link.home}, {path}: versions were removed or folded while it was checked; check it again"
            )
        if beneath.reason is not None:
            return beneath.reason
        if not sound.manifest or path in sound.spoiled:
            return _TOLD
        if beneath.top is not None:
            entry, other = link.arrays[path], beneath.top.arrays[path]
            if (other.shape[1:], other.element) != (entry.shape[1:], entry.element):
                return (
                    f"{link.home}, {path}: {entry.shape} {entry.element} leans on {beneath.top.home}, which has "
                    f"{other.shape} {other.element}"
                )
        return None

    def _only_fold_is_damaged(self, record: Record) -> bool:
        """Whether everything is sound along the chains that the fold stands for."""
        own = self._sound[record.prefix, record.id]
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
