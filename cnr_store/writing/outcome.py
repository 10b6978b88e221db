"""What became of a version: for a rank that voted, the first rank says so, or else the store. What failed goes."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from cnr_backends import Backend, BackendError, ObjectExistsError, Transfer
from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.record import Record
from cnr_store.format.record_document import decode_record, encode_void
from cnr_store.format.stored_paths import moved_nodes
from cnr_store.ranks.group import Document
from cnr_store.writing.plan import Plan
from cnr_store.writing.staged import Staged
from cnr_store.writing.team import Team, error_from

_TOLD = (
    *("time", "objects_bytes", "record_bytes", "shared_bytes", "manifest_sha256", "state_sha256"),
    *("metadata", "requires"),
)
"""What of a record only the first rank knows."""


@dataclass(frozen=True)
class ToldRecord(Record):
    """The record of a version, as the first rank tells of it: without Zarr documents, and sizes of single arrays.

    Attributes
    ----------
    told_shared_bytes
        Its `shared_bytes`.
    """

    told_shared_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """As the first rank has added them up."""
        return self.told_shared_bytes


def commit_document(record: Record) -> Document:
    """What the first rank tells the others of a version that was committed."""
    told = {name: getattr(record, name) for name in _TOLD}
    return {"committed": record.id, "ranks": record.policy.get("ranks"), **told}


def told_record(version: str, nonce: str, plan: Plan, staged: Staged, told: Document) -> Record:
    """The record of a version that the first rank has committed, without a read of the store.

    Parameters
    ----------
    plan, staged
        Of this rank, which has planned the same tables.
    told
        From `commit_document`.
    """
    moved = moved_nodes(plan.place())
    rows = {write.path: replace(write.entry, stored=moved.get(write.path)) for write in staged.rows}
    fields = {name: told[name] for name in _TOLD}
    return ToldRecord(
        id=version,
        nonce=nonce,
        step=plan.step,
        previous=plan.previous,
        needs=plan.needs,
        arrays={**staged.arrays, **rows},
        nodes={},
        policy={**plan.policy, "ranks": told["ranks"]},
        restores=plan.restores,
        told_shared_bytes=fields.pop("shared_bytes"),
        requires=tuple(fields.pop("requires")),
        **fields,
    )


def read_outcome(
    backend: Backend, direct: Backend, version: str, nonce: str, plan: Plan, staged: Staged, team: Team
) -> Record:
    """Wait for the outcome of a version, and return its record. It is read only if the first rank is silent.

    Parameters
    ----------
    direct
        The store without repetitions, to void the version if the first rank does not answer.
    nonce
        That the first rank has given the version.
    plan, staged
        What this rank has written.

    Raises
    ------
    CheckpointError
        The version was not committed; or it is not known whether it was, as the message says.
    """
    told = team.round.outcome()
    if told is not None:
        if "error" in told:
            raise error_from(told)
        return told_record(version, nonce, plan, staged, told)
    try:
        record = _arbitrate(backend, direct, version, team)
    except BackendError as error:
        raise SaveError(
            f"step {plan.step}: rank {team.rank} can't tell whether version {version} of {backend.url} was committed: "
            f"{error}. The next save of all ranks finds out, and is whole"
        ) from error
    if record.nonce != nonce:
        raise SaveError(f"version {version} was committed by another writer than the first rank")
    return record


def _arbitrate(backend: Backend, direct: Backend, version: str, team: Team) -> Record:
    """Let the store decide about a version of which the first rank says nothing any more.

    Whoever creates the object of its record decides: the first rank commits, any other makes the version void.
    """
    attempt = VersionId.parse(version)
    team.round.fail(
        "outcome", "it hears nothing from rank 0"
    )  # what failed before, such as rank 0, goes first
    cause = team.round.failure[1]
    if attempt is None or not backend.atomic_create:
        raise SaveError(
            f"{cause}. It is not known whether version {version} of {backend.url} was committed: that storage has no "
            "exclusive create to find out"
        )
    key = layout.record_key(version)
    try:
        direct.create(key, encode_void(str(attempt.claim), secrets.token_hex(16), time.time()))
    except ObjectExistsError:
        record = decode_record(backend.get(key), version)
        if record is not None:
            return record
    raise SaveError(
        f"{cause}: version {version} of {backend.url} was made void, so that it can't be committed later"
    )


def void_attempt(
    backend: Backend, direct: Backend, claim: ClaimId, version: str, nonce: str
) -> Record | None:
    """Create a void record in the place of an attempt's. Returns the attempt's if that is there."""
    key = layout.record_key(version)
    void = encode_void(str(claim), secrets.token_hex(16), time.time())
    try:
        backend.with_reserve(lambda: backend.create(key, void))
    except ObjectExistsError:
        landed = decode_record(backend.get(key), version)
        if landed is not None and landed.nonce != nonce:
            raise SaveError(f"another writer committed version {version}") from None
        if landed is not None:
            direct.confirm(key)  # what failed may have been the sync behind it
        return landed
    return None


def remove_attempt(backend: Backend, workers: int, version: str) -> str:
    """Remove the objects of an attempt that can't be committed any more, but a void record.

    Returns what an error must say of those that are left: nothing where all are gone.
    """
    folder, record = layout.version_key(version), layout.record_key(version)
    try:
        keys = [key for key, _ in backend.list_keys(folder) if key != record]
        with Transfer(workers, 2 * workers) as transfer:
            for _ in transfer.map(backend.delete, keys):
                pass
        backend.sweep(folder)
    except BackendError as error:
        return f". What it wrote could not be removed: {error}"
    return ""
