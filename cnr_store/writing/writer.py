"""The one way to write a version: plan, stage (encode and put), commit.

Nothing of a version is visible before its commit record, which is created last and exclusively. A failed attempt
removes its objects. If its record may have been sent, the writer first voids its id, so that the record can't appear
later; if it can't tell, it removes nothing. No other version ever uses an attempt's objects.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from cnr_backends import Backend, BackendError, ObjectExistsError, Transfer
from cnr_store.catalog import claims, fencing
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.fencing import Seen
from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import decode_record, encode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.writing.patience import Patience
from cnr_store.writing.patient_backend import PatientBackend
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import Staged, stage

log = logging.getLogger("cnr_store")


class Writer:
    """Writes versions, one after the other, under one claim.

    The claim is made at the first write, so a job that only reads claims nothing. It is refused if another process has
    claimed the store, or committed, since this writer was made or restarted. `restart` gives the claim up: the next
    write claims the store anew, from the version that was loaded. So does an attempt of unknown outcome: if it was
    committed after all, retention would keep it, instead of what this writer depends on, for the old claim.

    Parameters
    ----------
    backend
        Where the store is.
    workers
        Threads that encode.
    patience
        With what the network failed; by default nothing is tried again.

    Attributes
    ----------
    encoding_seconds, putting_seconds
        Of all writes so far, those of all threads added up.
    """

    def __init__(self, backend: Backend, workers: int, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._direct = backend
        self._backend = PatientBackend(backend, self._patience)
        self.encoding_seconds = 0.0
        self._workers = workers
        self._claim: claims.Claim | None = None
        self._base: str | None = None
        self._after: ClaimId | None = None
        self._made: ClaimId | None = None
        self._token = _new_token()
        self._seen = fencing.look(Catalog(backend))

    @property
    def putting_seconds(self) -> float:
        return self._backend.seconds_putting

    @property
    def claim(self) -> ClaimId | None:
        """The claim that versions are written under; None before the first write."""
        return self._claim.id if self._claim else None

    @property
    def removable(self) -> str:
        """The greatest version of other writers that retention may remove for this one; "" if there is none."""
        return self._seen.removable

    def restart(self, base: str, seen: Seen) -> None:
        """Take the store over as it was `seen`: the next write claims it anew, from the version `base`."""
        self._claim, self._after, self._base, self._token = None, None, base, _new_token()
        seen = seen.including(base)
        self._seen = replace(seen, removable=seen.version)

    def resume_last(self) -> None:
        """Go by what this process saw of the store when it last loaded or saved there, not by what is there now."""
        seen = fencing.last_seen(self._backend)
        # A store that was removed is none to go by. One that was made in its place is refused at the claim.
        if seen is not None and self._seen.store:
            self._seen = seen

    def renew(self, base: str | None) -> None:
        """Give the claim up for a new one, from `base` or from nothing. The next write is refused if another writer
        has claimed the store meanwhile.
        """
        if self._claim is not None:
            self._after, self._claim, self._token = self._claim.id, None, _new_token()
        self._base = base

    def close(self) -> None:
        """Mark the last claim closed: nothing is kept for this writer any more. It must not write again."""
        if self._made is not None:
            claims.close(self._backend, self._made)

    def _claimed(self) -> claims.Claim:
        if self._claim is None:
            self._claim = self._claim_anew()
            self._made = self._claim.id
            self._seen = replace(
                self._seen, store=claims.store_id(self._backend)
            )  # it may be one that was just made
            self._backend.hold_reserve()
        return self._claim

    def _claim_anew(self) -> claims.Claim:
        if self._after is not None:
            return fencing.renewed_claim(
                self._backend, self._after, self._base, self._token, self._seen.store
            )
        run_before = "" if self._base is not None else fencing.open_run(self._backend)
        claim = fencing.first_claim(self._backend, self._seen, self._base, self._token)
        if self._base is None and claim.id.generation > 1:
            log.warning(
                "%s was written by earlier runs and none of their versions was loaded: this run begins anew, and its "
                "versions are the latest from now on. To go on from an earlier version, call load() before the first "
                "save%s",
                *(self._backend.url, run_before),
            )
        return claim

    def write(self, plan: Plan, rows_done: Callable[[], None] = lambda: None) -> Record:
        """Write a version and commit it.

        Parameters
        ----------
        rows_done
            Called when every row has been taken from its source, or never will be.

        Raises
        ------
        SaveError
            With the cause. The version does not exist and never will.
        SupersededError
            A newer writer has claimed the store.
        BaseLostError
            A version that this one depends on was removed.
        """
        claim, version, nonce, sent = None, None, secrets.token_hex(16), False
        try:
            try:
                claim = self._claimed()
                version = claim.next_version()
                with Transfer(self._workers, 2 * self._workers) as transfer:
                    staged = stage(self._backend, version, plan, transfer)
            finally:
                rows_done()
            self.encoding_seconds += staged.encoding_seconds
            record = _record(self._backend, version, plan, staged, nonce)

            def attempt() -> Record:
                nonlocal sent
                # Each attempt looks again: another may claim during a pause.
                fencing.check_may_commit(self._backend, claim, record.needs)
                sent = True
                return commit(self._direct, record)

            # An attempt that arrived although its answer was lost makes the next one fail, and `_give_up` finds it.
            return self._committed(self._patience.run(attempt))
        except Exception as error:  # whatever went wrong, the attempt must be given up
            left = ""
            if version and claim and sent:
                landed = self._give_up(claim, version, nonce, plan.previous)
                if isinstance(landed, Record):
                    return self._committed(landed)
                left = landed
            elif version:
                left = self._remove(version)
            if isinstance(error, CheckpointError):
                raise
            named = f" as version {version}" if version else ""
            raise SaveError(
                f"step {plan.step} was not saved{named} to {self._backend.url}: {error}. "
                f"The versions before it are untouched and its rows stay marked for the next save{left}"
            ) from error

    def _committed(self, record: Record) -> Record:
        self._backend.hold_reserve()  # a failed save may have used it up
        self._seen = self._seen.including(record.id)
        self.remember()
        return record

    def remember(self) -> None:
        """Let `resume_last` of later writers of this process go by what this one has seen."""
        fencing.remember(self._backend, self._seen)

    def _give_up(self, claim: claims.Claim, version: str, nonce: str, previous: str | None) -> Record | str:
        """End an attempt whose record may have been sent: void its id, then remove its objects.

        Returns the record if the commit landed after all, as it may when only the response was lost; else what
        `_remove` does.
        """
        try:
            landed = self._void(claim, version, nonce)
        except (BackendError, CheckpointError) as error:
            # The storage does not answer. The id is not used again, and if a commit was sent it was complete.
            self.renew(previous)
            return f". Its objects stay, because it could not be voided: {error}"
        return landed or self._remove(version)

    def _void(self, claim: claims.Claim, version: str, nonce: str) -> Record | None:
        """Create a void record in the place of an attempt's. Returns the attempt's if that is there."""
        key = layout.record_key(version)
        void = encode_void(str(claim.id), secrets.token_hex(16), time.time())
        try:
            self._backend.with_reserve(lambda: self._backend.create(key, void))
        except ObjectExistsError:
            landed = decode_record(self._backend.get(key), version)
            if landed is not None and landed.nonce != nonce:
                raise SaveError(f"another writer committed version {version}") from None
            return landed
        return None

    def _remove(self, version: str) -> str:
        """Remove the objects of an attempt that can't be committed any more, but a void record.

        Returns what an error must say of those that are left: nothing where all are gone.
        """
        folder, record = layout.version_key(version), layout.record_key(version)
        try:
            keys = [key for key, _ in self._backend.list_keys(folder) if key != record]
            with Transfer(self._workers, 2 * self._workers) as transfer:
                for _ in transfer.map(self._backend.delete, keys):
                    pass
            self._backend.sweep(folder)
        except BackendError as error:
            return f". What it wrote could not be removed: {error}"
        return ""


def _new_token() -> str:
    return secrets.token_hex(4)


def _record(backend: Backend, version: str, plan: Plan, staged: Staged, nonce: str) -> Record:
    """Put manifest and state, and make the record that names them."""
    moved = {path: entry.stored for path, entry in staged.arrays.items() if entry.stored}
    manifest = encode_manifest(Manifest(version, staged.parts).renamed(moved))
    state = dumps(plan.state)
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
        arrays=staged.arrays,
        nodes=staged.nodes,
        policy=plan.policy,
        restores=plan.restores,
        objects_bytes=staged.nbytes,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        state_sha256=hashlib.sha256(state).hexdigest(),
        metadata=plan.metadata,
        requires=required_features(staged.arrays),
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
