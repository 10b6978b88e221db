"""The commit of a version: its manifest, its state, and last its record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cnr_backends import Backend
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import MAX_RANKS, STATE_PARTS
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import decode_record, encode_record
from cnr_store.format.state import dumps
from cnr_store.format.validate_policy import MAX_RANKS_LISTED
from cnr_store.writing.plan import Plan
from cnr_store.writing.staged import Staged


class State(NamedTuple):
    """The state that was put, and the digests of the ranks' parts that it names, in rank order."""

    nbytes: int
    sha256: str
    parts: Sequence[str]


def check_planned(plan: Plan, planned: str, rank: int) -> None:
    """Check that this rank plans what the first rank has, before it writes anything of it.

    Raises
    ------
    SaveError
    """
    if plan.digest() != planned:
        raise SaveError(
            f"rank {rank} decided otherwise than rank 0 what the version of step {plan.step} holds, so it was not "
            "saved: give all ranks the same model and options, or call save with full=True"
        )


def put_state_parts(backend: Backend, version: str, plan: Plan, staged: Staged) -> None:
    """Put what single ranks have of the state, as far as it is here."""
    for rank, part in plan.state_parts.items():
        data = dumps(part)
        backend.put(layout.version_key(version, layout.state_part(rank)), data)
        staged.nbytes += len(data)
        staged.state_sha256[rank] = hashlib.sha256(data).hexdigest()


def put_state(backend: Backend, version: str, plan: Plan, staged: Staged) -> State:
    """Put the state that all ranks share, which names the parts of each. Needs no vote, so it is not waited for.

    Raises
    ------
    SaveError
        More ranks save than readers accept.
    """
    here = staged.state_sha256
    parts = plan.state_sha256 or [here[rank] for rank in range(len(here))]
    if len(parts) > MAX_RANKS:
        raise SaveError(f"{len(parts)} ranks save one version, and at most {MAX_RANKS} can")
    state = dumps(plan.state | {"ranks": [*parts]} if parts else plan.state)
    backend.put(layout.version_key(version, "state/main.json"), state)
    return State(len(state), hashlib.sha256(state).hexdigest(), parts)


def finish_record(
    backend: Backend, version: str, plan: Plan, staged: Staged, state: State, nonce: str
) -> Record:
    """Put the manifest, and make the record that names it and the state.

    Raises
    ------
    SaveError
        A rank has put another part of the state than it said it would.
    """
    changed = [rank for rank, sha256 in enumerate(state.parts) if staged.state_sha256.get(rank) != sha256]
    if changed:
        raise SaveError(f"rank {changed[0]} put another part of the state than it had as the save began")
    moved = {path: entry.stored for path, entry in staged.arrays.items() if entry.stored}
    manifest = encode_manifest(Manifest(version, staged.parts).renamed(moved))
    sizes = {path: sum(part.nbytes for part in parts.values()) for path, parts in staged.parts.items()}
    arrays = {path: replace(entry, nbytes=sizes.get(path, 0)) for path, entry in staged.arrays.items()}
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
        objects_bytes=staged.nbytes + state.nbytes + len(manifest),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=state.sha256,
        metadata=plan.metadata,
        requires=(*required_features(staged.arrays), *((STATE_PARTS,) if state.parts else ())),
    )


def _figures(plan: Plan, staged: Staged) -> dict[str, Any]:
    """What the save took, for people."""
    seconds = {name: round(value, 4) for name, value in plan.seconds().items()}
    ranks = {"ranks": _shares(staged.ranks)} if len(staged.ranks) > 1 else {}
    return ({"seconds": seconds} if seconds else {}) | ranks


def _shares(ranks: Mapping[int, tuple[int, float]]) -> dict[str, Any]:
    """What each rank put, and how long it took, for people; of many ranks, the least, the mean and the most."""
    nbytes, seconds = zip(*(ranks[rank] for rank in sorted(ranks)), strict=True)
    return {
        "world": len(ranks),
        "bytes": _listed(nbytes),
        "seconds": _listed([round(each, 3) for each in seconds]),
    }


def _listed(values: Sequence[float]) -> Any:
    if len(values) <= MAX_RANKS_LISTED:
        return list(values)
    mean = round(sum(values) / len(values), 3)
    return {"min": min(values), "mean": mean, "max": max(values)}


def commit(backend: Backend, record: Record) -> Record:
    """Create the record's object, exclusively: from here on the version exists.

    Raises
    ------
    SaveError
        Readers would refuse the record. Nothing was created: they would fail at it in every listing.
    """
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
