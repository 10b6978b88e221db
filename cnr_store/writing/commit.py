"""The commit of a version: its manifest, its state, and last its record; and what became of it, for other ranks."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cnr_backends import Backend, BackendError, ObjectExistsError, Transfer
from cnr_codecs.lattice.segments import RowCounts
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import MAX_RANKS, STATE_PARTS, ClaimId, VersionId
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import decode_record, encode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.format.stored_paths import moved_nodes
from cnr_store.format.validate_policy import MAX_RANKS_LISTED
from cnr_store.ranks.group import Document
from cnr_store.writing.plan import Plan
from cnr_store.writing.staged import Staged
from cnr_store.writing.team import Team, error_from


def put_state_parts(backend: Backend, version: str, plan: Plan, staged: Staged) -> None:
    """Put what single ranks have of the state, as far as it is here."""
    for rank, part in plan.state_parts.items():
        data = dumps(part)
        backend.put(layout.version_key(version, layout.state_part(rank)), data)
        staged.nbytes += len(data)
        staged.state_sha256[rank] = hashlib.sha256(data).hexdigest()


def put_state(backend: Backend, version: str, plan: Plan, staged: Staged) -> tuple[str, Sequence[str]]:
    """Put the state that all ranks share, which names the parts of each. Needs no vote, so it is not waited for.

    Returns: its digest, and those of the parts, in rank order.
    """
    here = staged.state_sha256
    parts = plan.state_sha256 or [here[rank] for rank in range(len(here))]
    if len(parts) > MAX_RANKS:
        raise SaveError(f"{len(parts)} ranks save one version, and at most {MAX_RANKS} can")
    state = dumps(plan.state | {"ranks": [*parts]} if parts else plan.state)
    backend.put(layout.version_key(version, "state/main.json"), state)
    staged.nbytes += len(state)
    return hashlib.sha256(state).hexdigest(), parts


def finish_record(
    backend: Backend, version: str, plan: Plan, staged: Staged, state: tuple[str, Sequence[str]], nonce: str
) -> Record:
    """Put the manifest, and make the record that names it and the state, from `put_state`."""
    state_sha256, parts = state
    changed = [rank for rank, sha256 in enumerate(parts) if staged.state_sha256.get(rank) != sha256]
    if changed:
        raise SaveError(f"rank {changed[0]} put another part of the state than it had as the save began")
    moved = {path: entry.stored for path, entry in staged.arrays.items() if entry.stored}
    manifest = encode_manifest(Manifest(version, staged.parts).renamed(moved))
    sizes = {path: sum(part.nbytes for part in parts.values()) for path, parts in staged.parts.items()}
    arrays = {
        path: replace(entry, nbytes=sizes.get(path, 0), **staged.counts.get(path, RowCounts())._asdict())
        for path, entry in staged.arrays.items()
    }
    backend.put(layout.version_key(version, "manifest"), manifest)
    return Record(
        id=version,
        nonce=nonce,
        step=plan.step,
        time=time.time(),
        previous=plan.previous,
        needs=plan.needs,
        arrays=arrays,
        nodes=staged.nodes,
        policy={**plan.policy, **_figures(plan, staged)},
        restores=plan.restores,
        spent=plan.spent,
        objects_bytes=staged.nbytes + len(manifest),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=state_sha256,
        metadata=plan.metadata,
        requires=(*required_features(staged.arrays), *((STATE_PARTS,) if parts else ())),
    )


def _figures(plan: Plan, staged: Staged) -> dict[str, Any]:
    """What the save took, for people; of many ranks, what each put, and how long it took."""
    found: dict[str, Any] = {}
    if seconds := {name: round(value, 4) for name, value in plan.seconds().items()}:
        found["seconds"] = seconds
    if len(staged.ranks) > 1:
        nbytes, took = zip(*(staged.ranks[rank] for rank in sorted(staged.ranks)), strict=True)
        each = {"bytes": _listed(nbytes), "seconds": _listed([round(each, 3) for each in took])}
        found["ranks"] = {"world": len(staged.ranks), **each}
    return found


def _listed(values: Sequence[float]) -> Any:
    """Values by rank; of many ranks, the least, the mean and the most."""
    if len(values) <= MAX_RANKS_LISTED:
        return list(values)
    mean = round(sum(values) / len(values), 3)
    return {"min": min(values), "mean": mean, "max": max(values)}


def commit(backend: Backend, record: Record) -> Record:
    """Create the record's object, exclusively: from here on the version exists."""
    data = encode_record(record)
    try:
        decode_record(data, record.id)
    except CheckpointError as error:
        raise SaveError(
            f"step {record.step} was not saved as version {record.id} of {backend.url}: its record can't be read again "
            f"({error}). Earlier versions are untouched, and the next save has its rows"
        ) from error
    backend.create(record.key(), data)
    return replace(record, record_bytes=len(data))


_TOLD = (
    *("time", "objects_bytes", "record_bytes", "shared_bytes", "manifest_sha256", "state_sha256"),
    *("metadata", "requires"),
)
"""What of a record only the first rank knows."""


@dataclass(frozen=True)
class ToldRecord(Record):
    """The record of a version, as the first rank tells of it: without Zarr documents, and sizes of single arrays."""

    told_shared_bytes: int = 0  # its `shared_bytes`

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

    `plan`, `staged`: of this rank, which has planned the same tables.
    `told`: from `commit_document`.
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
        spent=plan.spent,
        told_shared_bytes=fields.pop("shared_bytes"),
        requires=tuple(fields.pop("requires")),
        **fields,
    )


def read_outcome(
    backend: Backend, direct: Backend, version: str, nonce: str, plan: Plan, staged: Staged, team: Team
) -> Record:
    """Wait for the outcome of a version, and return its record. It is read only if the first rank is silent.

    `direct`: the store without repetitions, to void the version if the first rank does not answer.
    `nonce`: that the first rank has given the version.
    `plan`, `staged`: what this rank has written.
    """
    told = team.outcome()
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
    # What failed before, such as rank 0, goes first.
    team.fail("outcome", "it hears nothing from rank 0")
    cause = team.failure[1]
    if attempt is None or not backend.atomic_create:
        raise SaveError(
            f"{cause}. It is not known whether version {version} of {backend.url} was committed: that storage has no "
            "exclusive create to find out"
        )
    record = _void(backend, direct.create, attempt.claim, version)
    if record is not None:
        return record
    raise SaveError(
        f"{cause}: version {version} of {backend.url} was made void, so that it can't be committed later"
    )


def void_attempt(
    backend: Backend, direct: Backend, claim: ClaimId, version: str, nonce: str
) -> Record | None:
    """Create a void record in the place of an attempt's. Returns the attempt's if that is there."""

    def create(key: str, data: bytes) -> None:
        backend.with_reserve(lambda: backend.create(key, data))

    landed = _void(backend, create, claim, version)
    if landed is not None:
        if landed.nonce != nonce:
            raise SaveError(f"another writer committed version {version}")
        direct.confirm(layout.record_key(version))  # what failed may have been the sync behind it
    return landed


def _void(
    backend: Backend, create: Callable[[str, bytes], None], claim: ClaimId, version: str
) -> Record | None:
    key = layout.record_key(version)
    try:
        create(key, encode_void(str(claim), secrets.token_hex(16), time.time()))
    except ObjectExistsError:
        return decode_record(backend.get(key), version)
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
