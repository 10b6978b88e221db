"""Who may write: a generation a run, claimed at its first save; the newest claim fences the others off.

A claim is the object ``writers/GENERATION-TOKEN``. The token is random, so two runs that claim the same
generation at the same moment have different keys and ids; the greater id is the newer. A writer lists the
claims before it commits: if one is newer than its own, it stops with `SupersededError`. A commit that slips
through between that look and the newer claim is a complete version of the older run: nothing is lost or torn.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cnr_backends import Backend, ObjectExistsError
from cnr_store.errors import BaseLostError, SaveError, SupersededError
from cnr_store.format import layout
from cnr_store.format.arrays import document_bytes, group_document
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.state import dumps


@dataclass
class Claim:
    """One run's right to write; hands out attempt numbers, each once."""

    id: ClaimId
    _next: int = field(default=1, repr=False)

    def next_version(self) -> str:
        """Id for one attempt at a version; never given again, whatever becomes of the attempt."""
        version = VersionId(self.id, self._next)
        self._next += 1
        return str(version)


def claim(backend: Backend, base: str | None) -> Claim:
    """Claim the next generation of a store, making the store if there is none.

    `base` is the version the run starts from; it is recorded so that nobody deletes it under a live run.
    """
    _create_if_missing(
        backend, layout.ROOT_KEY, document_bytes(group_document({"cnr": {"format": layout.FORMAT}}))
    )
    _create_if_missing(backend, f"{layout.VERSIONS}/{layout.NODE}", document_bytes(group_document()))
    newest = max(_generations(backend), default=ClaimId(0, ""))
    generation = newest.generation + 1
    if generation > layout.MAX_GENERATION:
        raise SaveError(
            f"{backend.url}: {newest} uses the last generation there is; if no writer of this store made it, remove "
            f"{layout.writer_key(newest)}"
        )
    mine = ClaimId(generation, secrets.token_hex(4))
    doc = {"generation": generation, "token": mine.token, "base": base, "time": time.time()}
    backend.create(layout.writer_key(mine), dumps(doc))
    return Claim(mine)


def check(backend: Backend, mine: Claim, needs: Sequence[str]) -> None:
    """Stop a writer that is no longer the newest, or whose save leans on what is gone.

    Parameters
    ----------
    needs
        Versions that the save can't be read without.

    Raises
    ------
    SupersededError
        Naming both claims.
    BaseLostError
        Naming what is gone.
    """
    there = _claims(backend)
    newest = max(there, default=mine.id)
    if newest > mine.id:
        raise SupersededError(
            f"{backend.url}: writer {mine.id} was superseded by {newest}, which another process started; "
            "stop this one, or load the newest version and go on from there"
        )
    lost = sorted(set(needs) - set(backend.list_names(layout.VERSIONS))) if needs else []
    if mine.id not in there:
        lost.append(layout.writer_key(mine.id))
    if lost:
        raise BaseLostError(
            f"{backend.url}: {', '.join(lost)} was removed while training ran; the next save writes everything whole"
        )


def _claims(backend: Backend) -> list[ClaimId]:
    return [known for name in backend.list_names(layout.WRITERS) if (known := ClaimId.parse(name))]


def _generations(backend: Backend) -> list[ClaimId]:
    versions = (VersionId.parse(name) for name in backend.list_names(layout.VERSIONS))
    return _claims(backend) + [version.claim for version in versions if version]


def _create_if_missing(backend: Backend, key: str, data: bytes) -> None:
    try:
        backend.create(key, data)
    except ObjectExistsError:
        return
