"""Who may write: a generation a run, claimed at its first save; the newest claim fences the others off.

A claim is the object ``writers/GENERATION-TOKEN``. The token is random, so two runs that claim the same
generation at the same moment have different keys and ids; the greater id is the newer. A writer lists the
claims before it commits: if one is newer than its own, it stops with `SupersededError`. A commit that slips
through between that look and the newer claim is a complete version of the older run: nothing is lost or torn.

A claim also announces what its writer leans on: until its first commit the version named as its base, then its
newest version and what that one needs. Retention keeps those; whoever finds a tombstone on what it leans on, once
it has announced itself, must not go on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cnr_backends import Backend, ObjectExistsError
from cnr_store.catalog.catalog import read_object
from cnr_store.errors import BaseLostError, CorruptionError, FormatError, SaveError, SupersededError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import document_bytes, group_document
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.state import dumps, loads


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


def choose(backend: Backend, after: ClaimId | None = None, tried: Collection[ClaimId] = ()) -> ClaimId:
    """A claim on the next generation of a store, yet to be announced; makes the store if there is none.

    Parameters
    ----------
    after
        The claim that its writer gives up for this one, if it goes on rather than takes over.
    tried
        Claims that it has tried to announce before. They may still land, so what is chosen is newer than each.

    Raises
    ------
    SupersededError
        Somebody else has claimed the store since `after`.
    """
    _create_if_missing(
        backend, layout.ROOT_KEY, document_bytes(group_document({"cnr": {"format": layout.FORMAT}}))
    )
    _create_if_missing(backend, f"{layout.VERSIONS}/{layout.NODE}", document_bytes(group_document()))
    if after is not None:
        _refuse_newer(backend, [other for other in listed(backend) if other not in tried], after)
    newest = max([*_generations(backend), *tried], default=ClaimId(0, ""))
    generation = newest.generation + 1
    if generation > layout.MAX_GENERATION:
        raise SaveError(
            f"{backend.url}: {newest} uses the last generation there is; if no writer of this store made it, remove "
            f"{layout.writer_key(newest)}"
        )
    return ClaimId(generation, secrets.token_hex(4))


def announce(backend: Backend, mine: ClaimId, base: str | None) -> Claim:
    """Make a claim that was chosen. `base` is the version the run starts from, so that nobody deletes it meanwhile."""
    doc = {"generation": mine.generation, "token": mine.token, "base": base, "time": time.time()}
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
        Naming what is gone, or about to go.
    """
    there = listed(backend)
    _refuse_newer(backend, there, mine.id)
    lost = _tombstoned(backend, needs) if needs else []
    if mine.id not in there:
        lost.append(layout.writer_key(mine.id))
    if lost:
        raise BaseLostError(
            f"{backend.url}: {', '.join(lost)} was removed while training ran; the next save writes everything whole"
        )


def tombstoned(backend: Backend) -> frozenset[str]:
    """Versions that carry a tombstone: they are gone, or may be at any moment."""
    return frozenset(filter(VersionId.parse, backend.list_names(layout.TOMBSTONES)))


def listed(backend: Backend) -> list[ClaimId]:
    """All claims there are, in no order."""
    return [known for name in backend.list_names(layout.WRITERS) if (known := ClaimId.parse(name))]


def base_of(backend: Backend, mine: ClaimId) -> str | None:
    """The version that a claim's writer started from.

    Raises
    ------
    CorruptionError
        The claim can't be read, so that nobody knows what its writer leans on.
    """
    key = layout.writer_key(mine)
    try:
        doc = validate.members(loads(read_object(backend, key, f"writer {mine}"), key), key)
        return None if doc["base"] is None else validate.version(doc["base"], "base")
    except (FormatError, ValueError, KeyError) as error:
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); if its writer has ended, remove it"
        ) from error


def _refuse_newer(backend: Backend, there: Sequence[ClaimId], mine: ClaimId) -> None:
    newest = max(there, default=mine)
    if newest > mine:
        raise SupersededError(
            f"{backend.url}: writer {mine} was superseded by {newest}, which another checkpointer began; "
            "stop this one, or load the newest version and go on from there"
        )


def _tombstoned(backend: Backend, needs: Sequence[str]) -> list[str]:
    # In this order: a tombstone goes only after what it stands for, so one of the two shows what was removed.
    gone = tombstoned(backend)
    there = set(backend.list_names(layout.VERSIONS))
    return sorted(need for need in needs if need in gone or need not in there)


def _generations(backend: Backend) -> list[ClaimId]:
    versions = (VersionId.parse(name) for name in backend.list_names(layout.VERSIONS))
    return listed(backend) + [version.claim for version in versions if version]


def _create_if_missing(backend: Backend, key: str, data: bytes) -> None:
    try:
        backend.create(key, data)
    except ObjectExistsError:
        return
