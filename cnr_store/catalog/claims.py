"""Who may write: every run claims a generation at its first save, and the newest claim fences off the older ones.

A claim is the object ``writers/GENERATION-TOKEN``. The token is random, so two runs that claim the same
generation at the same moment have different keys and ids; the greater id is the newer. A writer lists the
claims before it commits: if one is newer than its own, it stops with `SupersededError`. A commit that slips
through between that listing and a newer claim is a complete version of the older run: nothing is lost or torn.

A claim also announces what its writer depends on: the version named as its base until its first commit, then its
newest version and what that one needs. Retention keeps those. A writer that has announced itself and finds a
tombstone on one of them must not go on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cnr_backends import Backend, ObjectExistsError
from cnr_store.catalog.catalog import list_ids, read_object
from cnr_store.errors import BaseLostError, CorruptionError, FormatError, SaveError, SupersededError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import document_bytes, group_document
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.state import dumps, loads


@dataclass
class Claim:
    """One run's right to write. It gives out attempt numbers, each once."""

    id: ClaimId
    _next: int = field(default=1, repr=False)

    def next_version(self) -> str:
        """The id for one attempt at a version. No id is given twice, whatever becomes of the attempt."""
        version = VersionId(self.id, self._next)
        self._next += 1
        return str(version)


def next_claim_id(backend: Backend, after: ClaimId | None = None, tried: Collection[ClaimId] = ()) -> ClaimId:
    """The id of a claim on the next generation of a store, for `create_claim`. Makes the store if there is none.

    Parameters
    ----------
    after
        The claim that the writer gives up for this one; None if it takes the store over from another writer.
    tried
        Claims that the writer tried to create before. They may still land, so the new id is newer than each.

    Raises
    ------
    SupersededError
        Another writer has claimed the store since `after`.
    SaveError
        No generation is left.
    """
    root = group_document({"cnr": {"format": layout.FORMAT}})
    for key, node in ((layout.ROOT_KEY, root), (f"{layout.VERSIONS}/{layout.NODE}", group_document())):
        with suppress(ObjectExistsError):
            backend.create(key, document_bytes(node))
    # A claim of this writer's own that landed unnoticed is no other writer's.
    if after is not None:
        _refuse_newer(backend, [claim for claim in list_claims(backend) if claim not in tried], after)
    # Versions count, too: a claim may have been removed by hand, and ids must go on rising.
    written = [
        version.claim for version in map(VersionId.parse, list_ids(backend, layout.VERSIONS)) if version
    ]
    newest = max([*list_claims(backend), *written, *tried], default=ClaimId(0, ""))
    generation = newest.generation + 1
    if generation > layout.MAX_GENERATION:
        raise SaveError(
            f"{backend.url}: {newest} uses the last generation number; if no writer of this store made it, remove "
            f"{layout.writer_key(newest)}"
        )
    return ClaimId(generation, secrets.token_hex(4))


def create_claim(backend: Backend, claim: ClaimId, base: str | None) -> Claim:
    """Create a claim of an id from `next_claim_id`. Nobody deletes `base`, the version that the run starts from."""
    doc = {"generation": claim.generation, "token": claim.token, "base": base, "time": time.time()}
    backend.create(layout.writer_key(claim), dumps(doc))
    return Claim(claim)


def check_may_commit(backend: Backend, own: Claim, needs: Sequence[str]) -> None:
    """Stop a writer that is no longer the newest, or whose save depends on what was removed.

    Parameters
    ----------
    needs
        Versions that the save can't be read without.

    Raises
    ------
    SupersededError
        Naming both claims.
    BaseLostError
        Naming what is gone, or about to go.
    """
    claims = list_claims(backend)
    _refuse_newer(backend, claims, own.id)
    lost = _lost(backend, needs) if needs else []
    if own.id not in claims:
        lost.append(layout.writer_key(own.id))
    if lost:
        raise BaseLostError(
            f"{backend.url}: {', '.join(lost)} was removed while training ran; the next save writes everything whole"
        )


def list_tombstoned(backend: Backend) -> frozenset[str]:
    """Versions that carry a tombstone: they are deleted, or may be at any moment."""
    return list_ids(backend, layout.TOMBSTONES)


def list_claims(backend: Backend) -> list[ClaimId]:
    """All claims on the store, in no order."""
    return [claim for name in backend.list_names(layout.WRITERS) if (claim := ClaimId.parse(name))]


def read_base(backend: Backend, claim: ClaimId) -> str | None:
    """The version that a claim's writer started from, None if it started anew.

    Raises
    ------
    CorruptionError
        The claim can't be read, so nobody knows what its writer depends on.
    """
    key = layout.writer_key(claim)
    try:
        doc = validate.members(loads(read_object(backend, key, f"writer {claim}"), key), key)
        return None if doc["base"] is None else validate.version(doc["base"], "base")
    except (FormatError, ValueError, KeyError) as error:
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); if its writer has ended, remove it"
        ) from error


def _refuse_newer(backend: Backend, claims: Sequence[ClaimId], own: ClaimId) -> None:
    newest = max(claims, default=own)
    if newest > own:
        raise SupersededError(
            f"{backend.url}: writer {own} was superseded by {newest}, which another checkpointer began; "
            "stop this one, or load the newest version and go on from there"
        )


def _lost(backend: Backend, needs: Sequence[str]) -> list[str]:
    # In this order: a tombstone is removed only after its version, so one of the two listings shows each removal.
    tombstoned = list_tombstoned(backend)
    present = set(backend.list_names(layout.VERSIONS))
    return sorted(need for need in needs if need in tombstoned or need not in present)
