"""What became of a version, for a rank that has voted for it: the first rank says so, or else the store does."""

from __future__ import annotations

import secrets
import time

from cnr_backends import Backend, BackendError, ObjectExistsError
from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.layout import VersionId
from cnr_store.format.record import Record
from cnr_store.format.record_document import decode_record, encode_void
from cnr_store.ranks.group import Document
from cnr_store.writing.team import Team, error_document, error_from


def read_outcome(
    backend: Backend, direct: Backend, version: str, nonce: str, step: int, team: Team
) -> Record:
    """Wait for the outcome of a version, and read its record.

    Parameters
    ----------
    direct
        The store without repetitions, to void the version if the first rank does not answer.
    nonce
        That the first rank has given the version.

    Raises
    ------
    CheckpointError
        The version was not committed; or it is not known whether it was, or its record can't be read, as the message
        says.
    """
    try:
        outcome = team.round.outcome() or _arbitrate(direct, version, team)
        if "error" in outcome:
            raise error_from(outcome)
        record = decode_record(backend.get(layout.record_key(version)), version)
    except BackendError as error:
        raise SaveError(
            f"step {step}: rank {team.rank} can't tell whether version {version} of {backend.url} was committed: "
            f"{error}. The next save of all ranks finds out, and is whole"
        ) from error
    if record is None or record.nonce != nonce:
        raise SaveError(f"version {version} was committed by another writer than the first rank")
    return record


def _arbitrate(backend: Backend, version: str, team: Team) -> Document:
    """Let the store decide about a version of which the first rank says nothing any more.

    Whoever creates the object of its record decides: the first rank commits, any other makes the version void.
    """
    attempt = VersionId.parse(version)
    team.round.fail("outcome", "it hears nothing of rank 0")  # what failed before, such as rank 0, goes first
    cause = team.round.failure[1]
    if attempt is None or not backend.atomic_create:
        raise SaveError(
            f"{cause}, and {backend.url} can't decide about version {version}: whether it was committed is not known"
        )
    key = layout.record_key(version)
    try:
        backend.create(key, encode_void(str(attempt.claim), secrets.token_hex(16), time.time()))
    except ObjectExistsError:
        if decode_record(backend.get(key), version) is not None:
            return {"committed": version}
    return error_document(SaveError(f"{cause}: version {version} of {backend.url} was made void"))
