"""The commit of a version: its manifest, its state, and last its record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from cnr_backends import Backend
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import STATE_PARTS
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import decode_record, encode_record
from cnr_store.format.state import dumps
from cnr_store.writing.plan import Plan
from cnr_store.writing.staged import Staged


def finish_record(
    backend: Backend, version: str, plan: Plan, staged: Staged, nonce: str, parts: Sequence[str | None]
) -> Record:
    """Put manifest and state, and make the record that names them.

    Parameters
    ----------
    parts
        By rank, the digest of its part of the state; None where there are no parts.
    """
    moved = {path: entry.stored for path, entry in staged.arrays.items() if entry.stored}
    manifest = encode_manifest(Manifest(version, staged.parts).renamed(moved))
    sizes = {path: sum(part.nbytes for part in parts.values()) for path, parts in staged.parts.items()}
    arrays = {path: replace(entry, nbytes=sizes.get(path, 0)) for path, entry in staged.arrays.items()}
    has_parts = plan.part is not None
    state = dumps(plan.state | {"ranks": list(parts)} if has_parts else plan.state)
    for name, data in (("manifest", manifest), ("state/main.json", state)):
        backend.put(layout.version_key(version, name), data)
        staged.nbytes += len(data)
    return Record(
        id=version,
        nonce=nonce,
        step=plan.step,
        time=time.time(),
        previous=plan.previous,
        needs=plan.needs,
        arrays=arrays,
        nodes=staged.nodes,
        policy=plan.policy,
        restores=plan.restores,
        objects_bytes=staged.nbytes,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=hashlib.sha256(state).hexdigest(),
        metadata=plan.metadata,
        requires=(*required_features(staged.arrays), *((STATE_PARTS,) if has_parts else ())),
    )


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
            f"({error}). The versions before it are untouched and its rows stay marked for the next save"
        ) from error
    backend.create(record.key(), data)
    return replace(record, record_bytes=len(data))
