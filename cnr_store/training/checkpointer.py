"""Saves and loads a model that trains: `Checkpointer`, and `save` and `load` for a single time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from cnr_backends import Transfer, open_backend
from cnr_store.catalog import claims
from cnr_store.catalog.catalog import Catalog, Version, VersionInfo
from cnr_store.errors import (
    CheckpointError,
    ClosedError,
    CorruptionError,
    OptionError,
    VersionNotFoundError,
)
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import Rules
from cnr_store.policies.policy import Costs, check_policy
from cnr_store.policies.widths import LOSSLESS, Bits, ExpectedRestores, StateBits
from cnr_store.reading.opening import READ_WORKERS, Url
from cnr_store.training.loading.fallback import load_found, load_newest_sound
from cnr_store.training.loading.restore import Restore
from cnr_store.training.loading.restored import Restored, warn_left_out
from cnr_store.training.loading.selection import Selection, Strict
from cnr_store.training.model.arguments import (
    Overlap,
    check_callback,
    check_count,
    check_model,
    check_overlap,
    check_stateful,
)
from cnr_store.training.model.optimizer_state import as_list, table_slots
from cnr_store.training.model.row_arrays import row_arrays
from cnr_store.training.model.tables import find_tables
from cnr_store.training.preemption import Preemption, watch_signals
from cnr_store.training.saving.auto_maintenance import BackgroundMaintenance
from cnr_store.training.saving.codec_choice import CodecChoice, CodecOption
from cnr_store.training.saving.pending_save import PendingSave, ReentrantGuard
from cnr_store.training.saving.planner import Planner
from cnr_store.training.saving.save_queue import SaveCallbacks, SaveQueue
from cnr_store.training.saving.snapshot import Staging, snapshot_dense, table_aliases
from cnr_store.training.tracking.audit import Audit
from cnr_store.training.tracking.model_guard import ModelStructure
from cnr_store.training.tracking.optimizer_rules import trusted_classes
from cnr_store.training.tracking.tracker import Tracker
from cnr_store.writing.lineage import Lineage
from cnr_store.writing.writer import Writer


class Checkpointer:
    """Checkpoints a model while it trains.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    model
        Its `nn.Embedding` and `nn.EmbeddingBag` weights are stored by rows, everything else whole.
    optimizer
        One, a list, or None. It decides which rows may move without being looked up, and its state is saved.
        With None, tables are tracked as if rows move only when they are looked up, and every row looked up in
        one interval is saved in the next one too, since its update may come late.
    policy
        ``full``, ``one-shot``, ``consecutive``, ``intermittent``, or ``auto``, which chooses at each save by cost.
    bits
        Width of quantized rows: 2, 3, 4, 8, 32 (lossless), ``auto``, or a mapping from name patterns to these.
    codec
        Another codec for the rows: name, configuration, object, or a mapping from name patterns to these.
    state_bits
        Width of optimizer state that follows rows: 2, 3, 4, 8, 32 (lossless, the default), or a mapping from patterns
        of ``TABLE/SLOT``, such as ``"users/exp_avg*"``, to these; what no pattern fits is lossless.
    expected_restores
        Failures per node and hour, nodes and hours that the run is planned for: what ``bits="auto"`` goes by.
    restores_per_save
        Restores to be expected between two saves: what ``policy="auto"`` weighs reading by.
    state
        Further objects with `state_dict` and `load_state_dict`, by name: schedulers, scalers, metrics.
    storage_options
        For the filesystem, as in fsspec.
    workers
        Threads that encode. Puts and reads wait in threads of their own.
    snapshot_bytes
        Host memory for the rows of a snapshot. Rows beyond it are encoded before `save` returns.
    rng
        Whether the global random number generators are saved and restored.
    overlap
        What a save does while another is still being written: ``wait`` for that, or ``skip`` itself.
    on_done
        Called with each `PendingSave` on the thread that writes, once it has been committed or has failed. The next
        save waits for it, so let it be short; what it raises is only logged.
    audit
        Whether each save compares samples of the rows believed unchanged with how they were; or the bytes that all
        samples may take: True stands for 1 MiB.
    keep_last, keep_every
        After each commit, in the background, remove the versions that neither rule asks for, as `cnr_store.gc`
        does: so many of the newest, and one of every so many steps. None and None keep all.
    max_chain
        After a commit, in the background, fold the version as `cnr_store.compact` does if reading it touches more than
        so many versions. None folds nothing. A failure is only logged.
    trusted_optimizers
        Classes of your own whose steps leave every row without a gradient, and its state, bit for bit as it is. Only
        the rows with a gradient are then saved; a row that moves nevertheless is lost from deltas.

    Raises
    ------
    OptionError, UnsupportedModelError, cnr_backends.OpenError, FormatError
    """

    def __init__(
        self,
        url: Url,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        policy: str = "intermittent",
        bits: Bits = "auto",
        codec: CodecOption = None,
        state_bits: StateBits = LOSSLESS,
        expected_restores: ExpectedRestores | Mapping[str, Any] | None = None,
        restores_per_save: float = 0.1,
        state: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        workers: int = 2,
        snapshot_bytes: int = 2 << 30,
        rng: bool = True,
        overlap: Overlap = "wait",
        on_done: Callable[[PendingSave], object] | None = None,
        audit: bool | int = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
        max_chain: int | None = None,
        trusted_optimizers: Collection[type[Optimizer]] = (),
    ) -> None:
        rules = Rules(keep_last, keep_every)
        workers = check_count("workers", workers, minimum=1)
        max_chain = None if max_chain is None else check_count("max_chain", max_chain, minimum=1)
        snapshot_bytes = check_count("snapshot_bytes", snapshot_bytes, minimum=0)
        self._overlap = check_overlap(overlap)
        on_done = check_callback("on_done", on_done)
        trusted = trusted_classes(trusted_optimizers)
        policy = check_policy(policy)
        costs = Costs(keep_last, restores_per_save)
        codecs = CodecChoice(bits, codec, ExpectedRestores.of(expected_restores), state_bits)
        self._objects = check_stateful(state or {})
        self._rng = rng
        self._audit = Audit.from_option(audit)
        self._model = check_model(model)
        self._optimizers = as_list(optimizer)
        self._tables = find_tables(model)
        self._places = ModelStructure(model)
        codecs.check_tables([table.name for table in self._tables])
        codecs.warn_unknown_slots(partial(table_slots, self._optimizers, self._tables))
        backend = open_backend(url, **(storage_options or {}))
        self._catalog = Catalog(backend)
        self._catalog.check_format()
        self._writer = Writer(backend, workers)
        self._upkeep = BackgroundMaintenance(backend, rules, max_chain, workers)
        self._planner = Planner(
            self._tables, table_aliases(model, self._tables), codecs, Staging(snapshot_bytes)
        )
        self._closed = False
        self._turn = ReentrantGuard()
        self._tracker = Tracker(self._tables, self._optimizers, trusted)
        self._saves = SaveQueue(
            self._tables,
            self._optimizers,
            self._planner,
            self._writer,
            self._tracker,
            self._audit,
            SaveCallbacks(self._upkeep.after, on_done, self._turn),
            policy,
            costs,
        )
        # Ahead of the first save, so that compiling never stands between a save and its commit.
        sizes = {table.name: (table.parameter.nbytes, table.dim, table.element) for table in self._tables}
        self._saves.ahead(partial(codecs.warm, sizes))

    def save(
        self,
        step: int,
        reader: Any = None,
        metadata: Any = None,
        full: bool = False,
        overlap: Overlap | None = None,
    ) -> PendingSave:
        """Take the state of this moment and write it behind training's back.

        Two saves are never written at once: see `overlap`. A skipped one forgets nothing.

        Parameters
        ----------
        step
            The caller's count of training steps.
        reader
            An object with `state_dict`, or a plain state: where the data stands.
        metadata
            Small values for people; listed by `versions`.
        full
            Write everything whole, whatever the policy says.
        overlap
            Instead of the checkpointer's, for this save.

        Raises
        ------
        ClosedError, StateError, UnsupportedModelError, ModelMismatchError
            Nothing was written and nothing is forgotten. With the last, the model's tables are no longer those that
            this checkpointer was made for.
        OptionError
            `step` or `overlap` is out of range.
        SaveError, SupersededError
            The save before this one failed, and nobody has asked for its result. This one was not begun; the next
            one has the rows of both.
        TrackingError
            Rows have changed that nothing told of. Nothing was written; their table's next version is whole.
        """
        with self._turn.take("save"):
            self._check_open()
            step = check_count("step", step, minimum=0)
            overlap = self._overlap if overlap is None else check_overlap(overlap)
            began = time.perf_counter()
            latest = self._saves.latest
            if overlap == "skip" and latest is not None and not latest.done():
                return PendingSave.skip(step, latest.step)
            self._saves.settle(tell_before=step)
            if (folded := self._upkeep.take_folded()) is not None:
                self._planner.folded(folded)
            self._follow_model()  # or what stands in a table's place would pass as dense
            pending = PendingSave(step)
            taken = snapshot_dense(
                self._model, self._tables, self._optimizers, self._objects, reader, metadata, self._rng
            )
            self._saves.begin(pending, taken, full)
            pending.stall_seconds = time.perf_counter() - began
            return pending

    def load(
        self,
        version: Version = "latest",
        fallback: bool = False,
        *,
        tables: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        rows: Any = None,
        strict: Strict = "raise",
    ) -> Restored:
        """Bring a version, or a part of it, back into the model and its optimizers, in place.

        The next save continues that version, under a new claim; it writes each table whole that is not exactly the
        version's.

        State of an optimizer, or of an object of `state`, that the version holds and this checkpointer was not given
        is left out: it is listed in ``unexpected`` of the result and logged, because the next save will drop it.

        Parameters
        ----------
        version
            An id, a `VersionInfo`, a step, or ``latest``.
        fallback
            Whether a damaged version is skipped for the newest sound one before it. Each skipped version is logged as
            an error and listed in ``skipped`` of the result.
        tables, tensors
            Load only these tables, with the optimizer state beside their rows, and these dense tensors: names, or
            patterns of names. With either, or with `rows`, nothing else is loaded.
        rows
            Load only these rows: a range or row numbers, or by pattern of table names such a choice.
        strict
            What happens where model and version differ in names, rows or element types. ``raise`` raises an error that
            names the differences. ``ignore`` loads what fits and lists the rest in the result; ``report`` logs it,
            too. New rows keep their values.

        Raises
        ------
        EmptyStoreError, VersionNotFoundError, ModelMismatchError, UnsupportedModelError, OptionError
            The model is unchanged.
        CorruptionError
            The version is damaged, and with `fallback` all before it, too. The model may be partly overwritten: load
            another version.
        """
        selection = Selection.from_options(tables, tensors, rows, strict)
        restored = self._load_version(version, fallback, selection)
        if selection.whole:
            warn_left_out(restored, self._catalog.backend.url)
        return restored

    def _load_version(self, version: Version, fallback: bool, selection: Selection) -> Restored:
        if fallback and not selection.whole:
            raise OptionError(
                "fallback=True loads whole versions: leave tables, tensors, rows and strict out"
            )
        with self._turn.take("load"):
            self._check_open()
            self._follow_model()
            self._saves.settle()
            self._upkeep.wait()
            self._catalog.refresh()
            find = load_newest_sound if fallback else load_found
            return find(self._catalog, version, lambda record: self._load(record, selection))

    def _load(self, record: Record, selection: Selection) -> Restored:
        restore = Restore(
            self._catalog, record, self._model, self._tables, self._optimizers, self._objects, selection
        )
        before = Lineage.from_record(self._catalog, record)
        self._planner.forget()  # until every row is read, only whole tables are safe
        self._audit.forget()
        with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
            restored, since_whole = restore.run(self._rng, transfer)
        self._writer.restart(record.id)
        self._tracker.clear()
        self._audit.renew(row_arrays(self._tables, self._optimizers))
        # Last, so that an interrupt before it leaves a checkpointer whose next save is whole.
        self._planner.go_on_from(restore.trusted(self._lineage(record, before)), since_whole)
        return restored

    def _lineage(self, record: Record, before: Lineage) -> Lineage:
        """The lineage that the next version may depend on, after `record` was read.

        `before` is its lineage when the reads began.

        A version may be folded, and the versions it depended on removed, at any moment. Which rows changed since its
        whole link then depends on when each array was read, so the next version must depend on none.
        """
        try:
            to_delete = claims.list_tombstoned(self._catalog.backend)
            unchanged = Lineage.from_record(self._catalog, record).lines == before.lines
        except (CorruptionError, VersionNotFoundError):
            unchanged = False
        return before.without(to_delete) if unchanged else before.alone()

    def touch(self, table: str, ids: Any) -> None:
        """Flag rows that were changed without a lookup.

        Parameters
        ----------
        table
            The table's name: its parameter's, without a trailing ``.weight``.
        ids
            The rows: integers of any shape, as a tensor, an array or a sequence.

        Raises
        ------
        ModelMismatchError
            No such table, or ids out of range.
        """
        with self._turn.take("touch"):
            self._check_open()
            self._tracker.mark(table, ids)

    def close(self) -> None:
        """Wait for the save under way and stop tracking. Its failure, if nobody asked for its result, is raised."""
        with self._turn.take("close"):
            if self._closed:
                return
            self._closed = True
            latest = self._saves.latest
            try:
                self._saves.settle()
            finally:
                self._tracker.close()
                self._saves.close()
                self._upkeep.close()
            if latest is not None and not latest.asked:
                latest.result()

    def preemption(self, signals: Iterable[int] = (signal.SIGTERM,)) -> AbstractContextManager[Preemption]:
        """Notice that this process is to end, in time for a last save.

        In the block, the signals only make the object that it gives true. Ask between two steps, then save, and
        leave the loop. Handlers that were there before don't run meanwhile, and are put back afterwards.

        Raises
        ------
        OptionError
            Signals that can't be handled, or this is not the main thread.
        """
        self._check_open()
        return watch_signals(signals)

    def _follow_model(self) -> None:
        self._places.check()
        self._tracker.adopt_replaced()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this checkpointer was closed; make a new one")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise
            # Logged when it happened; what went wrong inside the block says more.


def save(url: Url, model: nn.Module, optimizer: Any = None, step: int = 0, **options: Any) -> VersionInfo:
    """Save a model once and wait for it.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    model, optimizer
        As for `Checkpointer`.
    step
        The caller's count of training steps.
    options
        Those of `Checkpointer` and of its `save`.
    """
    of_save = {name: options.pop(name) for name in ("reader", "metadata", "full") if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer.save(step, **of_save).result()


def load(
    url: Url,
    model: nn.Module,
    optimizer: Any = None,
    version: Version = "latest",
    fallback: bool = False,
    **options: Any,
) -> Restored:
    """Load a model once.

    Without an optimizer it loads weights alone, and does not log what else the version holds: nothing is saved here.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    model, optimizer
        As for `Checkpointer`.
    version, fallback
        As for `Checkpointer.load`.
    options
        Those of `Checkpointer` and of its `load`.
    """
    of_load = {name: options.pop(name) for name in ("tables", "tensors", "rows", "strict") if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer._load_version(version, fallback, Selection.from_options(**of_load))
