"""Fencing: the newest claim writes, and nobody takes the store over from a job unawares.

A writer lists the claims before it commits. If one is newer than its own, it stops with `SupersededError`. Its first
claim is fenced as well: it takes the number after the greatest that the writer has *seen*, and no other. A writer sees
when it is made, and right before each listing that chooses what it loads. `docs/design-notes/commit.md` argues why
nothing newer is lost to an older job.

A writer that has announced what it depends on, and finds a tombstone on one of those versions, must not go on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cnr_backends import Backend, BackendError, Transfer
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.claims import (
    Claim,
    create_claim,
    is_own,
    is_own_version,
    list_claims,
    list_tombstoned,
    newest_claim,
    read_claim,
    store_id,
)
from cnr_store.catalog.objects import has_object
from cnr_store.errors import BaseLostError, CheckpointError, CorruptionError, SupersededError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId, VersionId

log = logging.getLogger("cnr_store")
LIVE_SECONDS = 600
"""A writer that committed so short a time ago may still run. Only a warning goes by it."""

_WORKERS = 8
_SAME_PROTOCOLS = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}
_last_seen: dict[str, Seen] = {}


@dataclass(frozen=True)
class Seen:
    """What of a store a writer has seen, and so may continue or take over."""

    number: int = 0  # the greatest number under ``writers/`` and ``versions/``
    version: str = ""  # the greatest committed version, "" if there was none
    # The greatest version of other writers that its retention may remove: that seen at its load, "" before
    removable: str = ""
    # Which store it was (`claims.store_id`): numbers of one that was removed tell nothing of one made in its place
    store: str = ""
    claim: str = ""  # the claim that had this number; "" if that is unknown

    def including(self, version: str) -> Seen:
        """With a version that was loaded or committed: whoever claimed before its writer can't commit any more."""
        known = VersionId.parse(version)
        assert known is not None  # the id of a committed version is valid
        seen = replace(self, version=max(self.version, version))
        if known.claim.generation <= self.number:
            return seen
        return replace(seen, number=known.claim.generation, claim=str(known.claim))


def look(catalog: Catalog) -> Seen:
    """What there is to be seen. Claims come before versions: a version committed meanwhile then counts as seen."""
    store, names = store_id(catalog.backend), list_claims(catalog.backend)
    holder = None
    if names:
        with suppress(CorruptionError):
            holder = read_claim(catalog.backend, names[-1]).id
    ids = catalog.ids()
    newest = next((each for each in ids if catalog.may_be_committed(each)), "")
    number = _greatest(names, ids)
    claim = str(holder) if holder is not None and holder.generation == number else ""
    return Seen(number, newest, store=store, claim=claim)


def remember(backend: Backend, seen: Seen) -> None:
    """Remember what this process last loaded from a store, or saved there."""
    _last_seen[_place(backend)] = seen


def last_seen(backend: Backend) -> Seen | None:
    """What this process saw when it last loaded from a store or saved there; None if it did neither."""
    return _last_seen.get(_place(backend))


def unloaded(backend: Backend, seen: Seen) -> str:
    """That nothing was loaded of the versions that were seen; "" if there were none."""
    return f"{backend.url} holds version {seen.version}, and no version was loaded" if seen.version else ""


def first_claim(backend: Backend, seen: Seen, base: str | None, token: str, *, of_run: bool = True) -> Claim:
    """Claim the number after all that was seen. Nobody deletes `base`, the version that the run starts from.

    Without one a run begins anew, which is logged where others were before it. Claims of this process count as
    seen, and so does one that only ends a run that was seen.

    `token`: the same when a claim of unknown outcome is tried again: if it was made, it is this one.
    `of_run`: False for one version alone, such as an import.
    """
    tried = -1
    _refuse_another_store(backend, seen.store)
    run_before = "" if base is not None else _open_run(backend)
    while (number := _count_seen(backend, seen, token)) != tried:
        claim = ClaimId(number + 1, token)
        if create_claim(backend, claim, base):
            if of_run and base is None and number:
                log.warning(
                    "%s: this run begins anew, and its versions are the latest from now on. To go on from an earlier "
                    "version, call resume() or load() before the first save%s",
                    *(unloaded(backend, seen) or f"{backend.url} was claimed by an earlier run", run_before),
                )
            return Claim(claim)
        tried = number  # taken meanwhile, perhaps by this process
    raise _stale(backend, f"claim {layout.claim_name(number + 1)} was made")


def renewed_claim(backend: Backend, own: ClaimId, base: str | None, token: str, store: str) -> Claim:
    """Give `own` up for the next number. See `first_claim` for the other parameters.

    `store`: the store that `own` was made in (`Seen.store`).
    """
    claim = ClaimId(own.generation + 1, token)
    name = layout.claim_name(claim.generation)
    _refuse_another_store(backend, store)
    names = list_claims(backend)
    _refuse_others_alone(backend, names, own)
    _refuse_another_holder(backend, names, own)
    _refuse_newer(backend, [each for each in names if each != name], own)
    if not create_claim(backend, claim, base):
        _refuse_newer(backend, [name], own)
    return Claim(claim)


def warn_live_writer(catalog: Catalog) -> None:
    """Warn if the newest claim is another process's, was not closed, and has committed minutes ago."""
    backend = catalog.backend
    # The load has succeeded, whatever storage says now.
    with suppress(BackendError, CheckpointError):
        newest = newest_claim(backend)
        if newest is None or newest.is_over or is_own(newest.id):
            return
        own = (each for each in catalog.ids() if each.startswith(f"{newest.id}."))
        record = next(filter(None, map(catalog.find_record, own)), None)
        if record is not None and (age := time.time() - record.time) < LIVE_SECONDS:
            log.warning(
                "%s: writer %s committed version %s %d seconds ago and has not closed its Checkpointer. If that job "
                "has died, there is nothing to do. If it still runs, stop one of the two: the first save of this one "
                "takes the store over, and the other can't save any more",
                *(backend.url, newest, record.id, max(age, 0)),
            )


def _open_run(backend: Backend) -> str:
    """What a writer that begins anew is told of the run before it: nothing where that is over, or this process's."""
    with suppress(BackendError, CheckpointError):
        newest = newest_claim(backend)
        if newest is not None and not newest.is_over and not is_own(newest.id):
            return f". Writer {newest} has not closed its Checkpointer: if that job still runs, it can't save any more"
    return ""


def check_may_commit(backend: Backend, own: Claim, needs: Sequence[str]) -> None:
    """Stop a writer that is no longer the newest, or whose save depends on what was removed.

    `needs`: versions that the save can't be read without.
    """
    names = list_claims(backend)
    _refuse_newer(backend, names, own.id)
    _refuse_others_alone(backend, names, own.id)
    name = layout.claim_name(own.id.generation)
    lost = find_lost(backend, needs)
    try:
        # Where create is not atomic, another writer may have taken the number; and a store may have been made anew.
        holder = read_claim(backend, name).id
    except CorruptionError:
        lost.append(layout.writer_key(name))
    else:
        if holder != own.id:
            raise _fenced(backend, own.id, str(holder))
    if lost:
        raise BaseLostError(
            f"{backend.url}: {', '.join(lost)} was removed while training ran; the next save writes everything whole"
        )


def find_lost(backend: Backend, needs: Sequence[str]) -> list[str]:
    """Those of the versions `needs` that are gone, or about to go.

    What is there stays, if the newest claim keeps it: that claim was made before any tombstone to come.
    """
    if not needs:
        return []
    # In this order: a tombstone is removed only after its version, so one of the two shows each removal.
    # Each version is looked for by itself, because a listing grows with the store.
    tombstoned = list_tombstoned(backend)
    workers = min(_WORKERS, len(needs))
    with Transfer(workers, 2 * workers) as transfer:
        present = transfer.map(lambda need: has_object(backend, layout.record_key(need)), needs)
        return sorted(
            need for need, is_there in zip(needs, present, strict=True) if need in tombstoned or not is_there
        )


def _count_seen(backend: Backend, seen: Seen, token: str) -> int:
    """The greatest number that counts as seen. A claim with `token` is left out: it is the one that is being made."""
    catalog = Catalog(backend)
    names, ids = list_claims(backend), catalog.ids()
    _refuse_older_copy(backend, names, ids, seen)
    number = min(seen.number, _greatest(names, ids))  # what was seen may have been removed by hand
    for name in names:
        if int(name) <= number:
            continue
        try:
            claim = read_claim(backend, name)
        except CorruptionError:
            raise _stale(backend, f"claim {name} was made") from None
        if claim.id.token == token:
            continue
        if not is_own(claim.id) and (claim.ends is None or claim.ends > number):
            raise _stale(backend, f"writer {claim} claimed the store")
        number = claim.id.generation
    for newer in ids:
        if newer > seen.version and not is_own_version(newer) and catalog.may_be_committed(newer):
            raise _stale(backend, f"version {newer} was committed")
    return number


def _greatest(names: Iterable[str], ids: Iterable[str]) -> int:
    # Versions count, too: a claim may have been removed by hand, and ids must go on rising.
    versions = [version.claim.generation for version in map(VersionId.parse, ids) if version]
    return max([*map(int, names), *versions], default=0)


def _place(backend: Backend) -> str:
    """One text for all spellings of a place, as far as they can be told."""
    if backend.url.startswith("file://"):
        return os.path.realpath(backend.url.removeprefix("file://"))
    protocol, _, path = backend.url.partition("://")
    protocol = protocol.lower()
    return f"{_SAME_PROTOCOLS.get(protocol, protocol)}://{path.strip('/')}"


def _refuse_another_store(backend: Backend, seen: str) -> None:
    """Refuse a store that another process made where the one that was seen has been removed."""
    if seen and store_id(backend) not in ("", seen):
        raise _stale(backend, "the store was removed, and another one made in its place,")


def _refuse_others_alone(backend: Backend, names: Sequence[str], own: ClaimId) -> None:
    """Refuse a store that has claims, but not one's own: it was removed, and made anew by another process."""
    if names and layout.claim_name(own.generation) not in names:
        raise _stale(backend, "the store was removed, and another one made in its place,")


def _refuse_older_copy(backend: Backend, names: Sequence[str], ids: Iterable[str], seen: Seen) -> None:
    """Refuse a store that was put back from a copy, older than what was seen: its numbers are given out once more.

    The greatest claim that was seen must be there, or an attempt under it. A store without claims may be used.
    """
    known = ClaimId.parse(seen.claim)
    if not names or known is None or _refuse_another_holder(backend, names, known):
        return
    if not any(each.startswith(f"{known}.") for each in ids):
        raise _stale(backend, f"claim {known} went, as if the store was put back from a copy,")


def _refuse_another_holder(backend: Backend, names: Sequence[str], known: ClaimId) -> bool:
    """Refuse a store in which another process's claim has the number of a `known` one. Returns whether any has it."""
    name = layout.claim_name(known.generation)
    if name not in names:
        return False
    with suppress(CorruptionError):  # it may be the known one
        holder = read_claim(backend, name)
        if holder.id != known and not is_own(holder.id):
            what = f"the store was put back from a copy or made anew, and writer {holder} claimed it,"
            raise _stale(backend, what)
    return True


def _refuse_newer(backend: Backend, names: Iterable[str], own: ClaimId) -> None:
    newest = max(names, default="")
    if newest > layout.claim_name(own.generation):
        with suppress(CorruptionError):
            newest = str(read_claim(backend, newest))
        raise _fenced(backend, own, newest)


def _fenced(backend: Backend, own: ClaimId, newest: str) -> SupersededError:
    return SupersededError(
        f"{backend.url}: writer {own}, this job, was superseded by {newest}, another checkpointer, so it can't save "
        "any more; stop this job, or stop the other one, call load() here and go on from the version that it loads"
    )


def _stale(backend: Backend, what: str) -> SupersededError:
    return SupersededError(
        f"{backend.url}: {what} after this job loaded from the store or began, so this job is stale: nothing was "
        "written. Stop this job; call load() only if it is to take over, and go on from the version that it loads"
    )
