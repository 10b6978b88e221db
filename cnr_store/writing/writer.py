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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cnr_backends import Backend, BackendError, ObjectExistsError, StorageFullError, Transfer
from cnr_codecs.lattice.segments import RowCounts
from cnr_store.catalog import claims, fencing
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.fencing import Seen
from cnr_store.errors import CheckpointError, CorruptionError, SaveError
from cnr_store.format import layout
from cnr_store.format.layout import MAX_RANKS, STATE_PARTS, ClaimId, VersionId, moved_nodes
from cnr_store.format.manifest import Manifest, encode_manifest
from cnr_store.format.record import Record, required_features
from cnr_store.format.record_document import MAX_RANKS_LISTED, decode_record, encode_record, encode_void
from cnr_store.format.state import dumps
from cnr_store.ranks.decisions import error_document, error_from
from cnr_store.ranks.group import Document
from cnr_store.ranks.protocol import Team
from cnr_store.writing.lineage import Lineage, check_parents
from cnr_store.writing.patience import Patience, PatientBackend
from cnr_store.writing.plan import Plan
from cnr_store.writing.stage import Staged, stage

log = logging.getLogger("cnr_store")


class Writer:
    """Writes versions, one after the other, under one claim.

    The claim is made at the first write, so a job that only reads claims nothing. It is refused if another process has
    claimed the store, or committed, since this writer was made or restarted. `restart` gives the claim up: the next
    write claims the store anew, from the version that was loaded. So does an attempt of unknown outcome: if it was
    committed after all, retention would keep it, instead of what this writer depends on, for the old claim.

    `backend`: where the store is; as an attribute, through what it is written, which counts the operations.
    `workers`: threads that encode.
    `patience`: with what the network failed; by default nothing is tried again.
    `room_advice`: says what the caller of a save can do about a full store.

    `encoding_seconds`: of all writes so far, those of all threads added up.
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
        self.backend = PatientBackend(backend, self._patience)
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
    def has_claimed(self) -> bool:
        """Whether it has claimed the store since it was made or restarted. It may have to renew that claim."""
        return self._claim is not None or self._after is not None

    @property
    def unloaded(self) -> str:
        """That the first write will begin anew in a store with versions, as its caller is told; "" if it won't."""
        begins_anew = not self.has_claimed and self._base is None
        return fencing.unloaded(self.backend, self._seen) if begins_anew else ""

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
        seen = fencing.last_seen(self.backend)
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
            claims.close(self.backend, self._made)

    def _claimed(self) -> claims.Claim:
        if self._claim is None:
            backend, seen = self.backend, self._seen
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
            with team.group.working("save", lambda: team.beats.count):
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
            state = put_state(self.backend, version, plan, staged)
            team.vote({})
            for vote in team.votes()[1:]:
                staged.add(vote)
            team.beat("record")
            record = finish_record(self.backend, version, plan, staged, state, nonce)

            def attempt() -> Record:
                nonlocal sent
                team.beat("commit")
                # Each attempt looks again: another may claim during a pause.
                fencing.check_may_commit(self.backend, claim, record.needs)
                sent = True
                try:
                    return commit(self._direct, record)
                except ObjectExistsError:
                    # The attempt before has arrived; or it is void, by a writer that has taken the store over.
                    fencing.check_may_commit(self.backend, claim, record.needs)
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
                left = remove_attempt(self.backend, self._workers, version)
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
        return read_outcome(self.backend, self._direct, version, announced["nonce"], plan, staged, team)

    def _stage(self, version: str, plan: Plan, rows_done: Callable[[], None], team: Team) -> Staged:
        team.beat("encode")
        began = time.perf_counter()
        check_parents(plan.rows, self._direct, plan.step)
        with Transfer(self._workers, 2 * self._workers) as transfer:
            staged = stage(self.backend, version, plan, transfer, team, rows_done)
        put_state_parts(self.backend, version, plan, staged)
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
                f"step {step} was not saved{named} to {self.backend.url}: {cause}. "
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
            if claims.read_claim(self.backend, name).id == attempt.claim:
                self._shared = attempt.claim
                return
        raise SaveError(
            f"this rank does not find {layout.writer_key(name)} in {self.backend.url}, although the first rank wrote "
            "it: give all ranks the URL of one store that all of them can reach, and see that it is still mounted here"
        )

    def _committed(self, record: Record, team: Team) -> Record:
        team.conclude(commit_document(record))
        self.backend.hold_reserve()  # a failed save may have used it up
        self._seen = self._seen.including(record.id)
        self.remember()
        return record

    def remember(self) -> None:
        """Let `resume_last` of later writers of this process go by what this one has seen."""
        fencing.remember(self.backend, self._seen)

    def _give_up(self, claim: claims.Claim, version: str, nonce: str, previous: str | None) -> Record | str:
        """End an attempt whose record may have been sent: void its id.

        Returns the record if the commit landed after all, as it may when only the response was lost; else what an error
        must say of objects that have to stay: nothing if they may go.
        """
        try:
            return void_attempt(self.backend, self._direct, claim.id, version, nonce) or ""
        except (BackendError, CheckpointError) as error:
            # The storage does not answer. The id is not used again, and if a commit was sent it was complete.
            self.renew(previous)
            return (
                ". The version may be there all the same, so its objects stay: it could be neither voided nor "
                f"confirmed: {error}"
            )


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
            raise error_from(told, SaveError)
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
