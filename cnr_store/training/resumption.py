"""Loads versions into a model that is being trained, so that its next save continues them.

First the load of one version, then that of many ranks together, and the choice of another version where one was removed
or is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cnr_backends import BackendError, Transfer
from cnr_store.catalog import claims, fencing
from cnr_store.catalog.catalog import Catalog, Version
from cnr_store.catalog.fencing import Seen
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.array_reader import READ_WORKERS
from cnr_store.chains.salvage import SalvagedRows, merged, salvaged_document, salvaged_from
from cnr_store.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    ModelMismatchError,
    OptionError,
    RanksError,
    VersionNotFoundError,
    listed,
)
from cnr_store.format.layout import VersionId
from cnr_store.format.record import Record
from cnr_store.ranks.decisions import error_document, error_from
from cnr_store.ranks.group import Document, Group
from cnr_store.training.loading.load_result import Restored, warn_salvaged
from cnr_store.training.loading.match import Selection
from cnr_store.training.loading.restore import Restore
from cnr_store.training.model.row_arrays import RowArray, sampled_scale
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.agreement import check_alike, on_all
from cnr_store.training.saving.explanation import bytes_text
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.save_queue import SaveQueue
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.lineage import Lineage, spent_once_restored
from cnr_store.writing.patience import PatientBackend
from cnr_store.writing.steps import lattice_of

log = logging.getLogger("cnr_store")

T = TypeVar("T")
_Scales = dict[str, tuple[int, float]]


@dataclass(frozen=True)
class Loader:
    """Loads versions in place, and lets the saves of `saves` continue them. No save may be under way."""

    backend: PatientBackend  # that `catalog` reads through
    catalog: Catalog
    trained: TrainedModel
    options: Options
    saves: SaveQueue
    group: Group

    def load(
        self, version: Version, fallback: bool, selection: Selection, salvage: bool, goes_on: bool
    ) -> Restored:
        """Load a version, or what `selection` chooses of it: see `Checkpointer.load`.

        `goes_on`: whether saves may follow.
        """
        self.catalog.shared = {} if self.group.world > 1 else None
        self.catalog.refresh()
        seen = Seen()

        def look() -> None:
            nonlocal seen
            seen = fencing.look(self.catalog)

        try:
            with self.group.working("load", lambda: self.backend.operations):
                self._agree(version, fallback, selection, salvage)
                return load_jointly(
                    self.group,
                    lambda attempt: load_chosen(self.catalog, version, fallback, attempt, look),
                    lambda get: self._load(get, selection, salvage, seen, goes_on),
                    self.catalog.find,
                )
        except CorruptionError as error:
            self.saves.planner.drop_bases()  # what is damaged may lie under the next delta
            if not fallback:
                error.add_note(
                    f"In {self.catalog.backend.url}. `cnr verify --deep` lists what is damaged and what can be "
                    "restored. load(salvage=True) gives damaged rows their newest older values; load(fallback=True) "
                    "loads the newest sound version instead, if there is one."
                )
            elif not salvage:
                error.add_note(
                    "resume(salvage=True), or load(salvage=True), gives damaged rows their newest older values."
                )
            raise
        finally:
            self.catalog.shared = None

    def _agree(self, version: Version, fallback: bool, selection: Selection, salvage: bool) -> None:
        """Check that all ranks load the same: the next save goes by what each of them has loaded."""
        if self.group.world == 1:
            return
        said = {
            "version": version.id if isinstance(version, VersionInfo) else version,
            "fallback": fallback,
            "salvage": salvage,
            "selection": selection.digest(),
        }

        def judge(documents: list[Document]) -> Document:
            check_alike("load", documents, list(said), OptionError)
            return {}

        self.group.decide("load", said, judge)

    def _load(
        self, get: Callable[[], Record], selection: Selection, salvage: bool, seen: Seen, goes_on: bool
    ) -> Restored:
        trained, saves = self.trained, self.saves
        began, read_before = time.perf_counter(), self.backend.bytes_read

        def prove() -> tuple[Record, Restore, Lineage]:
            record = get()
            restore = Restore(
                self.catalog, record, trained, self.options.objects, selection, salvage, self.group
            )
            return record, restore, self._lineage_before(record, salvage)

        def progress() -> int:
            return self.backend.operations

        record, restore, before = on_first_then_all(
            self.group,
            "load: the version and the model",
            prove,
            progress,
            lambda proven: self.catalog.pack(proven[0]),
            self.catalog.unpack,
        )
        saves.planner.drop_bases()  # until every row is read, only whole tables are safe
        saves.audit.forget()

        def read() -> tuple[Restored, dict[str, Bitmap], _Scales]:
            try:
                with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
                    names = saves.tracker.to_compare(saves.tracker.reasons())
                    learn = partial(saves.planner.to_learn, names=names) if goes_on else None
                    found = restore.run(self.options.job.rng, transfer, saves.tracker.clear, learn)
                    saves.tracker.adopt_replaced()  # by code of the caller that the load ran
                    restore.explain_changes(saves.tracker)
                    return *found, _scales(record, trained.row_arrays()) if goes_on else {}
            finally:
                trained.follow_loaded()

        restored, since_whole, scales = on_all(self.group, "load: the rows", read, progress)
        saves.writer.restart(record.id, seen)
        saves.writer.remember()
        # Last, so that after an interrupt before it, the next version depends on nothing.
        lineage = before.alone() if restore.is_damaged else self._lineage(record, before)
        salvaged = {name: salvaged_document(each) for name, each in restored.salvaged.items()}
        said = {"alone": lineage.past is None, "salvaged": salvaged, "scales": scales}
        agreed = self.group.decide("load: end", said, _merge_ends)
        if agreed["alone"]:
            lineage, since_whole = before.alone(), {}
        lineage = replace(restore.trusted(lineage), spent=spent_once_restored(record, agreed["scales"]))
        # The others are saved whole, whatever changes them.
        saves.audit.renew([array for array in trained.row_arrays() if array.path in lineage.lines])
        saves.planner.continue_from(lineage, since_whole)
        saves.planner.adopt(restore.learned, trained.row_arrays())
        rows = {name: salvaged_from(each) for name, each in agreed["salvaged"].items()}
        restored = replace(restored, salvaged=rows)
        if self.group.rank == 0:
            warn_salvaged(restored, self.catalog.backend.url)
            nbytes = bytes_text(self.backend.bytes_read - read_before)
            log.info(
                "loaded version %s, step %d: %s rows, %s read in %.1f s",
                *(record.id, record.step, f"{restore.rows:,}", nbytes),
                time.perf_counter() - began,
            )
        return restored

    def _lineage_before(self, record: Record, salvage: bool) -> Lineage:
        try:
            return Lineage.from_record(self.catalog, record)
        except CorruptionError:
            if not salvage:
                raise
            return Lineage(record.id, restores=record.restores + 1, spent=record.spent)

    def _lineage(self, record: Record, before: Lineage) -> Lineage:
        """What the next version may depend on, once `record` was read; `before` is its lineage as the reads began.

        A version may be folded, and the versions that it depended on removed, at any moment. Which rows changed since
        its whole link then depends on when each array was read, so the next version depends on nothing.
        """
        try:
            to_delete = claims.list_tombstoned(self.catalog.backend)
            is_unchanged = Lineage.from_record(self.catalog, record).lines == before.lines
        except (BackendError, CorruptionError, VersionNotFoundError):
            # Everything has been read by now, so a storage that does not answer any more is no reason to fail.
            is_unchanged = False
        return before.without(to_delete) if is_unchanged else before.alone()


def _scales(record: Record, arrays: Sequence[RowArray]) -> _Scales:
    """Rows and scale of what this process holds of tables that a version has on lattices, by path."""
    lattices = {path: lattice_of(entry.codec) for path, entry in record.arrays.items()}
    return {
        array.path: (array.table.local_rows, sampled_scale(array, lattice.step))
        for array in arrays
        if array.is_weight and (lattice := lattices.get(array.path)) is not None and lattice.step is not None
    }


def _merge_ends(documents: list[Document]) -> Document:
    """What a load has come to on all ranks: whether any has nothing to build on, the rows that any salvaged, and the
    scales of tables: the mean of their rows.
    """
    salvaged: dict[str, SalvagedRows | None] = {}
    counts, scales = dict[str, int](), dict[str, float]()
    for doc in documents:
        for name, rows in doc["salvaged"].items():
            salvaged[name] = merged(salvaged.get(name), salvaged_from(rows))
        for path, (count, scale) in doc["scales"].items():
            counts[path] = counts.get(path, 0) + count
            scales[path] = scales.get(path, 0.0) + count * scale
    return {
        "alone": any(doc["alone"] for doc in documents),
        "salvaged": {name: salvaged_document(rows) for name, rows in salvaged.items() if rows is not None},
        "scales": {path: total / max(counts[path], 1) for path, total in scales.items()},
    }


PIECE_BYTES = 8 << 20
"""Sent at once: a large store's metadata takes long, and a rank is waited for as long as it makes progress."""
Attempt = Callable[[Record], Restored]
JointAttempt = Callable[[Callable[[], Record]], Restored]


def on_first_then_all(
    group: Group,
    phase: str,
    work: Callable[[], T],
    progress: Callable[[], int],
    pack: Callable[[T], bytes],
    unpack: Callable[[bytes], None],
) -> T:
    """Do something on the first rank, then on the others with what that one has read, as `on_all` does.

    `pack`: what the first rank has read, for `unpack` of the others.
    """
    if group.world == 1:
        return work()
    first = on_all(group, phase, lambda: [work()] if group.rank == 0 else [], progress)

    def follow() -> T:
        data = _broadcast(group, lambda: pack(first[0]))
        if group.rank == 0:
            return first[0]
        unpack(data)
        return work()

    return on_all(group, phase, follow, progress)


def _broadcast(group: Group, pack: Callable[[], bytes]) -> bytes:
    """What rank 0 packs, on all ranks, right after a decision."""
    try:
        data = pack() if group.rank == 0 else b""
        head = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        told = json.loads(group.broadcast(json.dumps(head).encode() if group.rank == 0 else None))
        pieces = [
            group.broadcast(data[begin : begin + PIECE_BYTES] if group.rank == 0 else None)
            for begin in range(0, told["bytes"], PIECE_BYTES)
        ]
    except BaseException as error:
        if not isinstance(error, RanksError):  # the others may wait for this rank
            group.break_off()
        raise
    data = data or b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != told["sha256"]:
        raise RanksError(f"rank {group.rank} got other bytes than rank 0 sent: load again")
    return data


def load_jointly(
    group: Group,
    choose: Callable[[Attempt], Restored],
    attempt: JointAttempt,
    find: Callable[[str], Record],
) -> Restored:
    """Load on all ranks what the first one chooses.

    `choose`: calls what it is given for the versions that it tries. Only the first rank runs it.
    `attempt`: loads one version, together with the other ranks. Gets a function that finds its record, which may fail.
    `find`: the record of a version by its id.
    """
    if group.world == 1:
        return choose(lambda record: attempt(lambda: record))
    if group.rank > 0:
        return _follow(group, attempt, find)

    def try_together(record: Record) -> Restored:
        _tell(group, {"try": record.id})
        return attempt(lambda: record)

    try:
        restored = choose(try_together)
    except Exception as error:
        _tell(group, error_document(error))
        raise
    except BaseException as error:  # an interrupt
        group.refuse("load", type(error).__name__)
        raise
    _tell(group, {})
    return restored


def _follow(group: Group, attempt: JointAttempt, find: Callable[[str], Record]) -> Restored:
    restored: Restored | None = None
    failure: Exception | None = None
    while "try" in (told := _tell(group, {})):
        restored, failure = None, None
        try:
            restored = attempt(partial(find, str(told["try"])))
        except Exception as error:  # noqa: BLE001 - the first rank has heard of it, and decides what is tried next
            failure = error
        except BaseException as error:  # an interrupt: the first rank comes to its next decision
            group.refuse("load", type(error).__name__)
            raise
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure  # the storage's, say, which the others only heard of
    if "error" in told or restored is None:
        raise error_from(told)
    return restored


def _tell(group: Group, said: Document) -> Document:
    """What the first rank says."""
    return group.decide("load", said, lambda documents: documents[0])


_MAX_LISTINGS = 5
Look = Callable[[], None]


def load_chosen(catalog: Catalog, version: Version, fallback: bool, load: Attempt, look: Look) -> Restored:
    """Load the version asked for; with `fallback` it, or the newest one before it that is not damaged.

    No version is verified before it is loaded: a load proves whatever it reads, so verifying would read everything
    twice. A load that fails half way has overwritten a part of the model, and the next one overwrites all of it.

    `load`: loads a whole version, whatever an earlier call has left in the model.
    `look`: called right before each listing that chooses what is loaded.
    """
    for listings_left in reversed(range(_MAX_LISTINGS)):
        look()
        try:
            return _load_first_sound(catalog, version, load) if fallback else load(catalog.find(version))
        except VersionNotFoundError:
            if version != "latest" or not listings_left:
                raise
            # Retention removes a version only once there are newer ones: list again, and do not go back.
            catalog.refresh()
    raise AssertionError


def _load_first_sound(catalog: Catalog, version: Version, load: Attempt) -> Restored:
    """Load the first version that is not damaged, and log what was skipped."""
    url = catalog.backend.url
    skipped: list[tuple[str, CheckpointError]] = []
    causes: dict[str, list[str]] = {}
    wanted = catalog.resolve(version)
    for name, record in _newest_first(catalog, wanted):
        try:
            restored = _load_version(catalog, name, record, load)
        except (CorruptionError, FormatError, ModelMismatchError) as error:
            mismatch = isinstance(error, ModelMismatchError)
            # After a skipped version a mismatch is no longer raised: its message would promise an unchanged model,
            # which the load of that version may have overwritten.
            if mismatch and not skipped:
                raise
            reason = "does not fit" if mismatch else "is damaged"
            told = causes.setdefault(str(error), [])
            what = f"the same as {told[0]}" if told else error
            log.error("version %s of %s %s and was skipped: %s", name, url, reason, what)
            skipped.append((name, error))
            told.append(name)
        else:
            if skipped:
                log.error(
                    "version %s of %s, step %d, was loaded instead of %s, and training continues from there. To keep "
                    "what was trained after it, stop now, and run `cnr repair`, or call resume(salvage=True)",
                    *(name, url, restored.step, skipped[0][0]),
                )
            return replace(restored, skipped=tuple((name, str(error)) for name, error in skipped))
    if not skipped:
        return load(catalog.find(version))  # raises the error that says what is missing
    damage = "\n".join(
        f"{cause} (version{'s' * (len(names) > 1)} {listed(names, 8)})" for cause, names in causes.items()
    )
    raise CorruptionError(
        f"{url}: nothing could be loaded: {wanted!r} and all versions before it are damaged or do not fit the model, "
        f"which may be partly overwritten now. `cnr verify {url}` shows what can be restored:\n{damage}"
    ) from skipped[0][1]


def _load_version(catalog: Catalog, name: str, record: Record | CheckpointError, load: Attempt) -> Restored:
    """Load one version; once more if it seems damaged, since a fold may have replaced its chain meanwhile."""
    try:
        if isinstance(record, CheckpointError):
            raise record
        return load(record)
    except (CorruptionError, FormatError) as error:
        catalog.refresh()
        reread = catalog.find_record(name)
        if reread is None:
            raise VersionNotFoundError(
                f"version {name} of {catalog.backend.url} was removed while it was read"
            ) from error
        return load(reread)


def _newest_first(catalog: Catalog, wanted: str | int) -> Iterator[tuple[str, Record | CheckpointError]]:
    """The version asked for and those before it; of one whose record is damaged, the error.

    A damaged record does not tell its step: where a step is asked for, each such version may be the one.
    """
    catalog.check_format()
    names = catalog.ids_from_newest() if wanted == "latest" else catalog.ids()
    if isinstance(wanted, str) and wanted != "latest":
        if VersionId.parse(wanted) is None or wanted not in names:
            return
        names = names[names.index(wanted) :]
    reached = isinstance(wanted, str)
    for name in names:
        try:
            record = catalog.find_record(name)
        except (CorruptionError, FormatError) as error:
            yield name, error
            continue
        if record is None and name == wanted:
            return  # an attempt that never became a version
        reached = reached or (record is not None and record.step == wanted)
        if reached and record is not None:
            yield name, record
