"""Loads versions into a model that is being trained, so that its next save continues them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cnr_backends import BackendError, Transfer
from cnr_store.catalog import claims, fencing
from cnr_store.catalog.catalog import Catalog, Version
from cnr_store.catalog.fencing import Seen
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.array_reader import READ_WORKERS
from cnr_store.chains.salvage import SalvagedRows, merged, salvaged_document, salvaged_from
from cnr_store.errors import CorruptionError, OptionError, VersionNotFoundError
from cnr_store.format.record import Record
from cnr_store.ranks.group import Document, Group
from cnr_store.training.loading.fallback import load_found, load_newest_sound
from cnr_store.training.loading.joint_load import load_jointly, on_all, on_first_then_all
from cnr_store.training.loading.load_result import Restored, warn_salvaged
from cnr_store.training.loading.restore import Restore
from cnr_store.training.loading.selection import Selection
from cnr_store.training.model.row_arrays import RowArray, sampled_scale
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.agreement import check_alike
from cnr_store.training.saving.explanation import bytes_text
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.save_queue import SaveQueue
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.lineage import Lineage, spent_once_restored
from cnr_store.writing.patience import PatientBackend
from cnr_store.writing.steps import lattice_of

log = logging.getLogger("cnr_store")

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

    @staticmethod
    def check_options(fallback: bool, selection: Selection) -> None:
        """Refuse options that contradict each other."""
        if fallback and not selection.whole:
            raise OptionError(
                "fallback=True works only for complete loads: leave tables, tensors, rows and strict out"
            )

    def load(
        self, version: Version, fallback: bool, selection: Selection, salvage: bool, goes_on: bool
    ) -> Restored:
        """Load a version, or what `selection` chooses of it: see `Checkpointer.load`.

        `goes_on`: whether saves may follow.
        """
        self.catalog.shared = {} if self.group.world > 1 else None
        self.catalog.refresh()
        find = load_newest_sound if fallback else load_found
        seen = Seen()

        def look() -> None:
            nonlocal seen
            seen = fencing.look(self.catalog)

        try:
            with self.group.working("load", lambda: self.backend.operations):
                self._agree(version, fallback, selection, salvage)
                return load_jointly(
                    self.group,
                    lambda attempt: find(self.catalog, version, attempt, look),
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
