"""The one way to write a version: plan, stage (encode and put), commit.

Nothing of a version is visible before its commit record, which is created last and exclusively. A failed attempt
voids its id, so that it can't appear later, and its objects are never used by another version.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from cnr_backends import Backend, BackendError, ObjectExistsError, ObjectNotFoundError, Transfer
from cnr_store import claims
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, decode_record, encode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.plan import Plan
from cnr_store.stage import Staged, put_object, stage

log = logging.getLogger("cnr_store")


class Writer:
    """Writes versions, one after the other, under one claim.

    The claim is made at the first write, so whoever only reads claims nothing. `restart` gives it up: the next
    write claims a new generation, from the version that was loaded.
    """

    def __init__(self, backend: Backend, workers: int) -> None:
        self._backend = backend
        self._workers = workers
        self._claim: claims.Claim | None = None
        self._base: str | None = None

    def restart(self, base: str | None) -> None:
        """Go on from the version `base`, or from nothing, under a new claim."""
        self._claim, self._base = None, base

    def _say_if_nothing_was_loaded(self) -> None:
        if self._claim is not None and self._base is None and self._claim.id.generation > 1:
            log.warning(
                "%s was written by earlier runs and none of their versions was loaded: this run begins anew, and its "
                "versions are the latest from now on. To go on from an earlier one, call load() before the first save",
                self._backend.url,
            )

    def write(self, plan: Plan, rows_done: Callable[[], None] = lambda: None) -> Record:
        """Write a version and commit it.

        Parameters
        ----------
        rows_done
            Called when every row has been taken from its source, or never will be.

        Raises
        ------
        SaveError
            With the cause; the version does not exist and never will.
        SupersededError
            A newer writer has claimed the store.
        """
        version, nonce = None, secrets.token_hex(16)
        try:
            try:
                if self._claim is None:
                    self._claim = claims.claim(self._backend, self._base)
                    self._say_if_nothing_was_loaded()
                version = self._claim.next_version()
                with Transfer(self._workers, 2 * self._workers) as transfer:
                    staged = stage(self._backend, version, plan, transfer)
            finally:
                rows_done()
            record = _record(self._backend, version, plan, staged, nonce)
            claims.check(self._backend, self._claim, plan.needs)
            return commit(self._backend, record)
        except Exception as error:  # whatever went wrong, the attempt must be voided
            landed = version and _give_up(self._backend, version, str(self._claim and self._claim.id), nonce)
            if landed:
                return landed
            if isinstance(error, CheckpointError):
                raise
            raise SaveError(
                f"step {plan.step} was not saved as version {version or '(none claimed)'} "
                f"of {self._backend.url}: {error}. "
                "The versions before it are untouched and its rows stay marked for the next save"
            ) from error


def _record(backend: Backend, version: str, plan: Plan, staged: Staged, nonce: str) -> Record:
    """Put manifest and state, and make the record that names them."""
    manifest = encode_manifest(Manifest(version, staged.parts))
    state = dumps(plan.state)
    for name, data in (("manifest", manifest), ("state/main.json", state)):
        staged.nbytes += put_object(backend, layout.version_key(version, name), data)
    return Record(
        id=version,
        nonce=nonce,
        step=plan.step,
        time=time.time(),
        previous=plan.previous,
        needs=plan.needs,
        arrays=staged.arrays,
        nodes=staged.nodes,
        policy=plan.policy,
        restores=plan.restores,
        objects_bytes=staged.nbytes,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=hashlib.sha256(state).hexdigest(),
        metadata=plan.metadata,
    )


def commit(backend: Backend, record: Record) -> Record:
    """Create the record's object, exclusively: from here on the version exists."""
    data = encode_record(record)
    backend.create(record.key(), data)
    return replace(record, record_bytes=len(data))


def _give_up(backend: Backend, version: str, by: str, nonce: str) -> Record | None:
    """Burn an attempt's id so that nothing of it can appear later.

    Returns the record if the commit landed after all, as it may when only the response was lost.
    """
    key = layout.record_key(version)
    try:
        try:
            backend.create(key, encode_void(by, secrets.token_hex(16)))
        except ObjectExistsError:
            found = decode_record(backend.get(key), version)
            return found if found is not None and found.nonce == nonce else None
    except (BackendError, CheckpointError, ObjectNotFoundError) as error:
        # The storage does not answer. The id is not used again, and if a commit was sent it was complete.
        log.warning("version %s could not be voided: %s", version, error)
    return None
