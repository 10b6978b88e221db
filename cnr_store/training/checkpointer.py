"""Saves and loads a model while it trains."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from torch import nn
from torch.optim import Optimizer

from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.catalog.fencing import warn_live_writer
from cnr_store.errors import CheckpointError, ClosedError, EmptyStoreError, OptionError, StateError
from cnr_store.maintenance.collection.rules import Rules
from cnr_store.options import (
    Failures,
    Job,
    Limits,
    Overlap,
    Retention,
    Tracking,
    given_group,
    own_keywords,
)
from cnr_store.policies.budget import DEFAULT_BUDGET
from cnr_store.policies.policy import PolicyName, check_policy
from cnr_store.policies.widths import Bits, ExpectedRestores, StateBits
from cnr_store.training.distributed.torch_group import job_group
from cnr_store.training.loading.load_result import Restored, restore_reader, warn_left_out, warn_readers
from cnr_store.training.loading.match import Selection, Strict
from cnr_store.training.model import arguments
from cnr_store.training.model.object_state import check_settings
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.process.preemption import JointPreemption, Preemption, watch_signals
from cnr_store.training.process.threads import ReentrantGuard
from cnr_store.training.resumption import Loader
from cnr_store.training.saving.auto_maintenance import BackgroundMaintenance
from cnr_store.training.saving.codec_choice import CodecChoice, CodecOption
from cnr_store.training.saving.coordinator import Coordinator, Request
from cnr_store.training.saving.explanation import Explanation
from cnr_store.training.saving.options import CONSTRUCT, Options
from cnr_store.training.saving.pending_save import PendingSave
from cnr_store.training.saving.save_queue import SaveQueue
from cnr_store.training.tracking.optimizer_rules import trusted_classes
from cnr_store.training.tracking.tracker import ModelStructure
from cnr_store.writing.patience import Patience, PatientBackend

log = logging.getLogger("cnr_store")


class Checkpointer:
    """Checkpoints a model while it trains.

    Use it as a context manager, or call `close` at the end. While one thread is in a method, others wait. A method
    raises `BusyError` when a call of the same checkpointer, or `on_done`, calls it, and `ClosedError` after `close` or
    in a fork of the process.

    Parameters
    ----------
    url
        An fsspec URL, a path, or a Zarr store.
    model
        Its `nn.Embedding` and `nn.EmbeddingBag` weights are stored by rows, everything else whole.
    optimizer
        An optimizer, a list of optimizers, or None, as they are or as Accelerate or Fabric has wrapped them.
        Their classes and settings decide which rows a step may change, and their state is saved. With None, steps of
        any `torch.optim.Optimizer` are seen all the same. A table with gradients that no such step used is compared.
    policy
        When a version is whole: ``full``, ``one-shot``, ``consecutive``, ``intermittent``, or ``auto``, which decides
        at each save by cost.
    budget
        Per cent of the loss that all restores of the run together may cost: rows and optimizer state are rounded so
        much, 0 not at all. `bits`, `codec`, `state_bits` and `Job.expected_restores` overrule it. None is none.
    bits
        Width of quantized rows: 2, 3, 4, 8, 32 (lossless), ``auto``, or a mapping from name patterns to these.
    codec
        Another codec for the rows: a name, configuration or object, or a mapping from name patterns to these. ``auto``
        is the default budget.
    state_bits
        Width of optimizer state that follows rows: 2, 3, 4, 8, 32 (lossless), ``"m1"`` to ``"m7"`` (that many bits of
        the mantissa, entropy-coded), ``"m23"`` (lossless, in fewer bytes), ``"auto"``, or a mapping to
        these from patterns of ``TABLE/SLOT``, such as ``"users/exp_avg*"``. By default, and
        where no pattern fits, state is lossless, or ``auto`` under a budget of 0.01 or more.
        ``auto`` is ``"m2"`` for ``exp_avg`` and ``momentum_buffer``, which nothing is divided by, and ``"m3"`` else.
    state
        Further objects with `state_dict` and `load_state_dict`, by name: schedulers, scalers, metrics.
    storage_options
        Options of the filesystem, as in fsspec.
    keep_last
        After each commit, in the background, remove the versions that no rule keeps, as `cnr_store.gc` does: keep so
        many of the newest. `Retention` has further rules. Without any, every version is kept.
    on_done
        Called with each `PendingSave` on the thread that writes, after the commit or the failure. The next save waits
        for it, so keep it short. What it raises is only logged.
    retention, failures, limits, tracking, job
        Groups of further options: `Retention`, `Failures`, `Limits`, `Tracking` and `Job`.

    Raises
    ------
    OptionError, UnsupportedModelError, StateError, RanksError, cnr_backends.OpenError, FormatError
    """

    @own_keywords()
    def __init__(
        self,
        url: Url,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        policy: PolicyName = "intermittent",
        budget: float | None = DEFAULT_BUDGET,
        bits: Bits | None = None,
        codec: CodecOption = None,
        state_bits: StateBits | None = None,
        state: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        on_done: Callable[[PendingSave], object] | None = None,
        retention: Retention = Retention(),
        failures: Failures = Failures(),
        limits: Limits = Limits(),
        tracking: Tracking = Tracking(),
        job: Job = Job(),
    ) -> None:
        with self._alike_on_all_ranks():
            failures, job = given_group(Failures, failures), given_group(Job, job)
            limits = given_group(Limits, limits)
            ranks = self._group = job_group(arguments.check_group(job.group), failures.timeout_seconds)
            retention, tracking = given_group(Retention, retention), given_group(Tracking, tracking)
            self._options = options = Options(
                policy=check_policy(policy),
                codecs=CodecChoice(
                    *(bits, codec, ExpectedRestores.of(job.expected_restores), state_bits, budget),
                    limits.exact_parents,
                ),
                objects=arguments.check_stateful(state or {}),
                on_done=arguments.check_callback("on_done", on_done),
                rules=Rules(keep_last, retention.keep_every, retention.keep_best),
                trusted=trusted_classes(tracking.trusted_optimizers),
                retention=retention,
                failures=failures,
                limits=limits,
                tracking=tracking,
                job=job,
            )
            self._trained = trained = TrainedModel.from_arguments(model, optimizer, tracking.exclude)
            check_settings(trained.optimizers)
            self._structure = ModelStructure(model, trained.sharded, trained.excluded)
            options.codecs.check_tables([table.name for table in trained.tables])
            if ranks.rank == 0:
                options.codecs.warn_unknown_slots(trained.table_slots)
            backend = open_backend(url, storage_options=storage_options)
            reading = PatientBackend(backend, Patience())
            self._catalog = Catalog(reading)
            self._catalog.check_format()
            self._upkeep = BackgroundMaintenance(backend, options)
            self._closed = False
            self._preemptions = 0
            self._guard = ReentrantGuard()
            self._saves = SaveQueue(backend, trained, options, self._upkeep, self._guard, ranks)
            self._coordinator = Coordinator(
                ranks, trained, options, self._saves, self._upkeep, self._follow_model
            )
            self._loader = Loader(reading, self._catalog, trained, options, self._saves, ranks)

    @contextmanager
    def _alike_on_all_ranks(self) -> Iterator[None]:
        """Around a constructor: it fails on all ranks if it fails on one, or was given other options there."""
        try:
            yield
            self._options.agree(self._group, self._catalog.backend.url, self._trained)
            if self._group.rank == 0:
                self._trained.warn_left_out()
        except BaseException as error:
            if hasattr(self, "_loader"):
                self._saves.close()
                self._upkeep.close()
            if hasattr(self, "_group"):
                self._group.refuse(CONSTRUCT, f"{type(error).__name__}: {error}")
                self._group.close()
            raise

    def save(
        self,
        step: int,
        reader: Any = None,
        metadata: Any = None,
        full: bool = False,
        overlap: Overlap | None = None,
    ) -> PendingSave:
        """Copy the state of training and write it in the background.

        Only one save is written at a time; `overlap` says what a second one does. A skipped save forgets no row.

        Parameters
        ----------
        step
            The caller's count of training steps.
        reader
            Where the data stands: an object with `state_dict`, or a plain state.
        metadata
            Small values for people. `versions` lists them.
        full
            Write everything whole, whatever the policy decides.
        overlap
            Replaces the checkpointer's `overlap` for this save.

        Raises
        ------
        OptionError
            `step` or `overlap` is out of range; or ``unloaded="raise"``, and no version of the store was loaded.
        StateError, UnsupportedModelError
            Something can't be stored exactly. Nothing was written, and no row is forgotten.
        ModelMismatchError
            The model's tables are no longer those that this checkpointer was made for. Nothing was written.
        SaveError, SupersededError
            The previous save failed, and nobody asked for its result. This save was not begun. The next one has the
            rows of both.
        TrackingError
            Rows changed without being tracked. Nothing was written. The next version of their tables is whole.
        """
        with self._guard.enter("save"):
            self._check_open()
            return self._coordinator.begin(Request(step, reader, metadata, full, overlap))

    def load(
        self,
        version: Version = "latest",
        fallback: bool = False,
        *,
        tables: str | Sequence[str] | None = None,
        tensors: str | Sequence[str] | None = None,
        rows: Any = None,
        strict: Strict = "raise",
        salvage: bool = False,
    ) -> Restored:
        """Load a version, or a part of it, into the model and its optimizers, in place.

        The next save continues this version, under a new claim. It writes each table whole that does not equal the
        version's, and all of them if upkeep removed meanwhile what it would build on. It takes the store over from
        whoever has it now, so a warning is logged if that job committed minutes ago. It is a `SupersededError` if
        another process saves or claims the store after this load.

        An optimizer or an object of `state` that the version holds and this checkpointer was not given is left out. It
        is listed in ``unexpected`` of the result and logged, because the next save will drop it. If another number of
        ranks saved the version, random number generators are seeded anew, and readers are left to `resume`, or to you:
        both is logged.

        Parameters
        ----------
        version
            An id, a `VersionInfo`, a step, or ``latest``.
        fallback
            Whether to skip damaged versions and load the newest sound one before them. Each skipped version is logged
            as an error and listed in ``skipped`` of the result.
        tables, tensors
            Load only these tables, with the optimizer state beside their rows, and only these dense tensors: names, or
            patterns of names. With either, or with `rows`, nothing else is loaded.
        rows
            Load only these rows: a range, row numbers, or a mapping to these from patterns of table names.
        strict
            What to do where model and version differ in names, rows or element types: ``raise`` an error; ``ignore``
            the differences and load what fits; or ``report`` them in the log, too. New rows keep their values. The
            result lists the differences.
        salvage
            Whether rows that are damaged or lost take the newest older value that can be read. They are logged, and
            ``salvaged`` of the result names them and the versions of their values. All other rows are exact, and the
            next save is whole. Anything else that is damaged is an error as ever. With `fallback`, too, a version is
            skipped only if it can't be salvaged.

        Raises
        ------
        EmptyStoreError, VersionNotFoundError, ModelMismatchError, UnsupportedModelError, OptionError
            The model is unchanged.
        CorruptionError
            The version is damaged, and with `fallback` so are all before it. The model may be partly overwritten:
            load another version.
        """
        selection = Selection.from_options(tables, tensors, rows, strict)
        restored = self._load(version, fallback, selection, salvage)
        if selection.everything and self._group.rank == 0:
            warn_readers(restored, self._catalog.backend.url, self._group.world)
        return restored

    def resume(self, reader: Any = None, *, salvage: bool = False) -> int:
        """Load the newest sound version, if there is one, and tell from which step training goes on.

        Damaged versions are skipped and logged, as by ``load(fallback=True)``.

        Parameters
        ----------
        reader
            Where the data stands: an object with `load_state_dict`, which gets what `save` was given as `reader`. Where
            another number of ranks saved, its `split_state(states, rank, world)` makes that of what they were given.
        salvage
            Whether a damaged version is loaded with older values for the rows that are lost, which are logged, as by
            ``load(salvage=True)``. A version is skipped only if it can't be salvaged.

        Returns
        -------
        The step of the version loaded; 0 if the store holds none.

        Raises
        ------
        OptionError
            `reader` has no `load_state_dict` (nothing was loaded); or the version was saved without a reader, or by
            another number of ranks, whose readers this one can't divide.
        ModelMismatchError, UnsupportedModelError, CorruptionError
            As for `load`.
        """
        arguments.check_reader(reader)
        try:
            restored = self._load("latest", True, Selection.from_options(), salvage)
        except EmptyStoreError:
            if self._group.rank == 0:
                log.warning(
                    "%s holds no version: training starts at step 0. If you expected one, check the URL",
                    self._catalog.backend.url,
                )
            return 0
        restore_reader(restored, reader, self._group.rank, self._group.world)
        return restored.step

    def explain(self) -> Explanation:
        """Tell what a save does with each table, and why. Print the result: it is a table.

        The estimates are of a delta that is saved now, so ask between two saves. It waits for the save under way.

        Returns
        -------
        An `ExplainedTable` for each table.
        """
        with self._guard.enter("explain"):
            self._check_open()
            self._follow_model()
            return self._saves.explain(self._trained.row_arrays())

    def _load(
        self, version: Version, fallback: bool, selection: Selection, salvage: bool, goes_on: bool = True
    ) -> Restored:
        if fallback and not selection.whole:
            raise OptionError(
                "fallback=True works only for complete loads: leave tables, tensors, rows and strict out"
            )
        with self._guard.enter("load"):
            self._check_open()
            self._follow_model()
            self._saves.finish_latest()
            # The first rank alone has any, and it may take long.
            with self._group.working("load", itertools.count().__next__):
                self._upkeep.wait()
            restored = self._loader.load(version, fallback, selection, salvage, goes_on)
        if goes_on and self._group.rank == 0:
            if selection.whole:
                warn_left_out(restored, self._catalog.backend.url)
            warn_live_writer(self._catalog)
        return restored

    def touch(self, table: str, ids: Any) -> None:
        """Flag rows that were changed without a lookup, after the change, so that the next save writes them.

        It accounts for every change of the table and its optimizer state so far, so name all the rows that changed.

        Parameters
        ----------
        table
            Name of the table.
        ids
            Row numbers: integers of any shape, as a tensor, an array or a sequence.

        Raises
        ------
        ModelMismatchError
            There is no such table, or an id is out of range. Nothing was flagged.
        """
        with self._guard.enter("touch"):
            self._check_open()
            self._saves.tracker.mark(table, ids)

    def close(self) -> None:
        """Wait for the save under way and stop tracking. A second call does nothing.

        The run's claim is marked closed: retention keeps nothing for it any more, and others may import and repair.

        Raises
        ------
        SaveError, SupersededError
            The last save failed, and nobody asked for its result.
        """
        with self._guard.enter("close"):
            if self._closed:
                return
            self._closed = True
            self._saves.hurry(orderly=True)
            latest = self._saves.latest
            try:
                self._saves.finish_latest()
                self._coordinator.tell_of_last(latest)
            finally:
                self._saves.close()
                self._upkeep.close()
                self._saves.writer.close()
                self._group.refuse("close", "its checkpointer was closed")
                self._group.close()
            if latest is not None and not latest.result_taken:
                latest.result()

    def preemption(self, signals: Iterable[int] = (signal.SIGTERM,)) -> AbstractContextManager[Preemption]:
        """Turn termination signals into a flag, so that training can save and stop between two steps.

        Inside the ``with`` block, a signal only makes the `Preemption` true. Test it between two steps; once it is
        true, save and leave the loop. Of many ranks each tests it once a step: a signal on any of them makes it true
        on all at the same step. The previous handlers don't run inside the block and are restored after it.

        Raises
        ------
        OptionError
            One of `signals` can't be handled, or this is not the main thread.
        """
        self._check_open()
        return self._watch(signals)

    @contextmanager
    def _watch(self, signals: Iterable[int]) -> Iterator[Preemption]:
        self._preemptions += 1
        is_alone, joint = self._group.world == 1, partial(JointPreemption, self._group, self._preemptions)
        with watch_signals(signals, Preemption if is_alone else joint) as preempted:
            before, self._saves.is_preempted = self._saves.is_preempted, lambda: preempted.signal is not None
            try:
                yield preempted
            finally:
                if preempted.signal is None:  # or the process ends soon, after `close`
                    self._saves.is_preempted = before

    def _follow_model(self) -> None:
        self._trained.reshard()
        self._structure.check()
        self._saves.tracker.adopt_replaced()
        self._trained.note_sharing()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this checkpointer was closed; make a new one")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise StateError(
            "a Checkpointer can't be copied or pickled: it holds a model that trains, a claim and threads; make a new "
            "one where it is needed"
        )

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._saves.hurry(orderly=error is None)
            self.close()
        except CheckpointError:
            if error is None:
                raise
            # The error of the block says more, and the failure of the save was logged when it happened.
