"""Removes what retention has doomed, so that a crash at any point leaves every visible version whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from cnr_backends import Backend, Transfer
from cnr_store.format import layout
from cnr_store.format.layout import VersionId
from cnr_store.format.record_document import encode_void
from cnr_store.format.state import dumps
from cnr_store.maintenance.collection.survey import Look, ids, objects, remove


class Deletion:
    """One run of retention. Its tombstones are its own, so that it alone may take them back.

    Call `doom`, look again, `spare` what is needed after all, then `bury` the rest, `empty` and `tidy`.
    """

    def __init__(self, backend: Backend, transfer: Transfer, by: str) -> None:
        self._backend = backend
        self._transfer = transfer
        self._by = by
        self._run = secrets.token_hex(8)
        self.freed_bytes = 0

    def doom(self, versions: Iterable[str]) -> None:
        """Put a tombstone on each: from here on nobody begins to lean on them."""
        data = dumps({"by": self._by, "time": time.time()})
        for _ in self._transfer.map(
            lambda version: self._backend.put(self._tombstone(version), data), versions
        ):
            pass

    def spare(self, versions: Iterable[str]) -> None:
        """Take this run's tombstones back: somebody leant on these before they were doomed."""
        remove(self._backend, self._transfer, map(self._tombstone, versions))

    def bury(self, versions: Iterable[str], look: Look) -> dict[str, float]:
        """Make versions invisible, newest first, so that what leans on another goes before it.

        A record is replaced rather than removed: its key stays taken, and the create of a commit that is still
        under way somewhere loses.

        Returns
        -------
        When each was burnt.
        """
        burnt = {}
        for version in sorted(versions, reverse=True):
            burnt[version] = time.time()
            void = encode_void(self._by, secrets.token_hex(16), burnt[version])
            self._backend.put(layout.record_key(version), void)
            self.freed_bytes += look.versions[version].record_bytes - len(void)
        return burnt

    def empty(self, version: str) -> bool:
        """Remove all objects of a burnt id, and its fold, but the void record; whether there were any."""
        record, fold = layout.record_key(version), layout.record_key(version, layout.FOLDS)
        found = objects(self._backend, layout.version_key(version, prefix=layout.FOLDS))
        found += [item for item in objects(self._backend, layout.version_key(version)) if item[0] != record]
        if any(key == fold for key, _ in found):
            self._backend.delete(fold)
        remove(self._backend, self._transfer, (key for key, _ in found if key != fold))
        self.freed_bytes += sum(nbytes for _, nbytes in found)
        return bool(found)

    def free(self, versions: Iterable[str]) -> None:
        """Remove the void records of ids under which nothing can be committed any more."""
        remove(self._backend, self._transfer, map(layout.record_key, versions))

    def tidy(self, look: Look) -> None:
        """Remove tombstones and pins of ids of which nothing is left."""
        marked = look.doomed | look.pinned
        if not marked:
            return
        left = ids(self._backend, layout.VERSIONS) | ids(self._backend, layout.FOLDS)
        for version in sorted(marked - left):
            for prefix in (layout.TOMBSTONES, layout.PINS):
                marks = objects(self._backend, layout.version_key(version, prefix=prefix))
                remove(self._backend, self._transfer, (key for key, _ in marks))

    def _tombstone(self, version: str) -> str:
        return layout.version_key(version, self._run, prefix=layout.TOMBSTONES)


def collectable(look: Look, now: float, grace_seconds: float) -> list[str]:
    """Burnt ids whose objects may go: those of removed versions at once, others after the grace time.

    So may folds of versions of which nothing is listed.
    """
    burnt = [
        version
        for version, when in look.voided.items()
        if version in look.doomed or when + grace_seconds <= now
    ]
    return sorted({*burnt, *(look.folds.keys() - look.names)})


def freeable(look: Look, emptied: Iterable[str], now: float, grace_seconds: float) -> list[str]:
    """Those of the emptied ids whose void record may go, so that they are as if they had never been.

    A writer commits one attempt after the other. So once a later attempt of its claim is listed, no create of an
    earlier one can follow, except one that the network still carries: the grace time is for that. The last attempt
    of each claim stays burnt for ever, since its writer may be stopped right before its commit.
    """
    last: dict[object, str] = {}
    for name in look.names:
        attempt = VersionId.parse(name)
        if attempt is not None:
            last[attempt.claim] = max(name, last.get(attempt.claim, ""))
    kept = set(last.values())
    return [
        version
        for version in emptied
        if version not in kept and version in look.voided and look.voided[version] + grace_seconds <= now
    ]
