"""The one way to write a version: plan, stage (encode and put), commit.

Nothing of a version is visible before its commit record, which is created last and exclusively. A failed attempt
removes its objects. If its record may have been sent, the writer first voids its id, so that the record can't appear
later; if it can't tell, it removes nothing. No other version ever uses an attempt's objects.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from cnr_backends import Backend, BackendError, ObjectExistsError, StorageFullError, Transfer
from cnr_store.catalog import claims, fencing
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.fencing import Seen
from cnr_store.errors import CheckpointError, CorruptionError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.record import Record
from cnr_store.writing.commit import (
    commit,
    commit_document,
    finish_record,
    put_state,
    put_state_parts,
    read_outcome,
    remove_attempt,
    void_attempt,
)
from cnr_store.writing.lineage import Lineage, check_parents
from cnr_store.writing.patience import Patience, PatientBackend
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import stage
from cnr_store.writing.staged import Staged
from cnr_store.writing.team import Team, error_document

log = logging.getLogger("cnr_store")


class Writer:
    """Writes versions, one after the other, under one claim.

    The claim is made at the first write, so a job that only reads claims nothing. It is refused if another process has
    claimed the store, or committed, since this writer was made or restarted. `restart` gives the claim up: the next
    write claims the store anew, from the version that was loaded. So does an attempt of unknown outcome: if it was
    committed after all, retention would keep it, instead of what this writer depends on, for the old claim.

    `backend`: where the store is.
    `workers`: threads that encode.
    `patience`: with what the network failed; by default nothing is tried again.
    `room_advice`: says what the caller of a save can do about a full store.

    `encoding_seconds`, `putting_seconds`: of all writes so far, those of all threads added up.
    `of_run`: False for versions that stand alone, such as imports: no run begins anew with them.
    """

    def __init__(
        self,
        backend: Backend,
        workers: int,
        patience: Patience | None = None,
        room_advice: Callable[[Backend], str] = lambda _: "",
    ) -> None:
        self._patience = patience or Patience()
        self._room_advice = room_advice
        self._direct = backend
        self._backend = PatientBackend(backend, self._patience)
        self.encoding_seconds = 0.0
        self.of_run = True
        self._workers = workers
        self._claim: claims.Claim | None = None
        self._base: str | None = None
        self._after: ClaimId | None = None
        self._made: ClaimId | None = None
        self._token = secrets.token_hex(4)
        self._shared: ClaimId | None = None
        self._seen = fencing.look(Catalog(backend))

    @property
    def putting_seconds(self) -> float:
        return self._backend.seconds_putting

    @property
    def operations(self) -> int:
        """How many operations of the store have succeeded."""
        return self._backend.operations

    @property
    def has_claimed(self) -> bool:
        """Whether it has claimed the store since it was made or restarted. It may have to renew that claim."""
        return self._claim is not None or self._after is not None

    @property
    def unloaded(self) -> str:
        """That the first write will begin anew in a store with versions, as its caller is told; "" if it won't."""
        begins_anew = not self.has_claimed and self._base is None
        return fencing.unloaded(self._backend, self._seen) if begins_anew else ""

    @property
    def removable(self) -> str:
        """The greatest version of other writers that retention may remove for this one; "" if there is none."""
        return self._seen.removable

    def restart(self, base: str, seen: Seen) -> None:
        """Take the store over as it was `seen`: the next write claims it anew, from the version `base`."""
        self._claim, self._after, self._base, self._token = None, None, base, secrets.token_hex(4)
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
            self._after, self._claim, self._token = self._claim.id, None, secrets.token_hex(4)
        self._base = base

    def close(self) -> None:
        """Mark the last claim closed: nothing is kept for this writer any more. It must not write again."""
        if self._made is not None:
            claims.close(self._backend, self._made)

    def _claimed(self) -> claims.Claim:
        if self._claim is None:
            backend, seen = self._backend, self._seen
            if self._after is None:
                self._claim = fencing.first_claim(backend, seen, self._base, self._token, of_run=self.of_run)
            else:
                self._claim = fencing.renewed_claim(backend, self._after, self._base, self._token, seen.store)
            self._made = self._claim.id
            # It may be one that was just made.
            self._seen = replace(seen, store=claims.store_id(backend))
            backend.hold_reserve()
        return self._claim

    def hold(self, lineage: Lineage) -> tuple[list[str], Record | None]:
        """Claim the store, so that nothing of `lineage` is removed any more. Training waits, so nothing is tried again.

        Returns: The versions that were removed before, and a fold that makes them needless, if there is one.
        """
        self._patience.begin(training_waits=True)
        self._claimed()
        lost = fencing.find_lost(self._direct, lineage.versions)
        return lost, lineage.find_fold(Catalog(self._direct), lost) if lost else None

    def write(
        self, plan: Plan, rows_done: Callable[[], None] = lambda: None, team: Team | None = None
    ) -> Record:
        """Write a version and commit it. If that raises, the version does not exist and never will.

        `BaseLostError` if a version that this one depends on was removed.

        `rows_done`: called, perhaps twice, when no row is read from the model any more. What it raises fails the save.
        `team`: the ranks that write it together, each calling this with its part of the plan. Their first rank claims
        and commits. None where this process has all of it.
        """
        team = team or Team.alone()
        self._patience.on_pause = team.pause  # a rank that asks the storage again does not stand still
        try:
            # Ranks that are done with this save, and decide about the next, wait for this one while it goes on.
            with team.group.working("save", lambda: team.beats):
                return (self._follow if team.rank else self._lead)(plan, rows_done, team)
        finally:
            self._patience.on_pause = lambda: None

    def _lead(self, plan: Plan, rows_done: Callable[[], None], team: Team) -> Record:
        claim, version, nonce, sent = None, None, secrets.token_hex(16), False
        try:
            try:
                team.beat("claim")
                claim = self._claimed()
                version = claim.next_version()
                planned = plan.digest() if team.world > 1 else ""
                team.announce({"version": version, "nonce": nonce, "plan": planned})
                staged = self._stage(version, plan, rows_done, team)
            finally:
                rows_done()
            state = put_state(self._backend, version, plan, staged)
            team.vote({})
            for vote in team.votes()[1:]:
                staged.add(vote)
            team.beat("record")
            record = finish_record(self._backend, version, plan, staged, state, nonce)

            def attempt() -> Record:
                nonlocal sent
                team.beat("commit")
                # Each attempt looks again: another may claim during a pause.
                fencing.check_may_commit(self._backend, claim, record.needs)
                sent = True
                try:
                    return commit(self._direct, record)
                except ObjectExistsError:
                    # The attempt before has arrived; or it is void, by a writer that has taken the store over.
                    fencing.check_may_commit(self._backend, claim, record.needs)
                    raise

            # An attempt that arrived although its answer was lost makes the next one fail, and `_give_up` finds it.
            return self._committed(self._patience.run(attempt), team)
        except Exception as error:  # whatever went wrong, the attempt must be given up
            team.give_up(error, is_excused=self._patience.outage.excuses(error))
            left = ""
            if version and claim and sent:
                landed = self._give_up(claim, version, nonce, plan.previous)
                if isinstance(landed, Record):
                    return self._committed(landed, team)
                left = landed
            # The others wait for this, and what is removed may be much.
            team.conclude(error_document(self._failure(error, plan.step, version, left, team)))
            if version and not left:
                left = remove_attempt(self._backend, self._workers, version)
            if StorageFullError.__name__ in (type(error).__name__, team.failure[0]):
                advice = self._room_advice(self._direct)  # also where another rank met it
                left += advice and f". {advice}"
            failure = self._failure(error, plan.step, version, left, team)
            if failure is error:
                raise
            raise failure from error

    def _follow(self, plan: Plan, rows_done: Callable[[], None], team: Team) -> Record:
        """Write this rank's part, and learn from the first rank, or from the store, what became of the version."""
        version = None
        try:
            try:
                team.beat("claim")
                announced = team.announced()
                version = str(announced["version"])
                if plan.digest() != announced["plan"]:
                    raise SaveError(
                        f"rank {team.rank} decided otherwise than rank 0 what the version of step {plan.step} holds, "
                        "so it was not saved: give all ranks the same model and options, or call save with full=True"
                    )
                self._check_shared(version)
                staged = self._stage(version, plan, rows_done, team)
                # A mount that is lost leaves a folder that takes objects.
                self._check_shared(version, again=True)
            finally:
                rows_done()
            team.vote(staged.to_vote())
        except Exception as error:
            # Nothing is committed without this rank's vote.
            team.give_up(error, is_excused=self._patience.outage.excuses(error))
            failure = self._failure(error, plan.step, version, "", team)
            if failure is error:
                raise
            raise failure from error
        return read_outcome(self._backend, self._direct, version, announced["nonce"], plan, staged, team)

    def _stage(self, version: str, plan: Plan, rows_done: Callable[[], None], team: Team) -> Staged:
        team.beat("encode")
        began = time.perf_counter()
        check_parents(plan.rows, self._direct, plan.step)
        with Transfer(self._workers, 2 * self._workers) as transfer:
            staged = stage(self._backend, version, plan, transfer, team, rows_done)
        put_state_parts(self._backend, version, plan, staged)
        staged.ranks[team.rank] = staged.nbytes, time.perf_counter() - began
        self.encoding_seconds += staged.encoding_seconds
        return staged

    def _failure(
        self, error: Exception, step: int, version: str | None, left: str, team: Team
    ) -> CheckpointError:
        """What the caller is told of a save that failed."""
        named = f" as version {version}" if version else ""
        return team.told(
            error,
            lambda cause: (
                f"step {step} was not saved{named} to {self._backend.url}: {cause}. "
                f"Earlier versions are untouched, and the next save has its rows{left}"
            ),
        )

    def _check_shared(self, version: str, *, again: bool = False) -> None:
        """Check that this rank sees the store that the first rank writes to: once a claim, unless `again`."""
        attempt = VersionId.parse(version)
        if attempt is None or (attempt.claim == self._shared and not again):
            return
        name = layout.claim_name(attempt.claim.generation)
        with suppress(CorruptionError):  # it is lost, or another store's
            if claims.read_claim(self._backend, name).id == attempt.claim:
                self._shared = attempt.claim
                return
        raise SaveError(
            f"this rank does not find {layout.writer_key(name)} in {self._backend.url}, although the first rank wrote "
            "it: give all ranks the URL of one store that all of them can reach, and see that it is still mounted here"
        )

    def _committed(self, record: Record, team: Team) -> Record:
        team.conclude(commit_document(record))
        self._backend.hold_reserve()  # a failed save may have used it up
        self._seen = self._seen.including(record.id)
        self.remember()
        return record

    def remember(self) -> None:
        """Let `resume_last` of later writers of this process go by what this one has seen."""
        fencing.remember(self._backend, self._seen)

    def _give_up(self, claim: claims.Claim, version: str, nonce: str, previous: str | None) -> Record | str:
        """End an attempt whose record may have been sent: void its id.

        Returns the record if the commit landed after all, as it may when only the response was lost; else what an error
        must say of objects that have to stay: nothing if they may go.
        """
        try:
            return void_attempt(self._backend, self._direct, claim.id, version, nonce) or ""
        except (BackendError, CheckpointError) as error:
            # The storage does not answer. The id is not used again, and if a commit was sent it was complete.
            self.renew(previous)
            return f". Its objects stay, because it could be neither voided nor confirmed: {error}"
