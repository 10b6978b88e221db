"""Saves and loads a model that trains: `Checkpointer`, and `save` and `load` for a single time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import nn
from torch.optim import Optimizer

from cnr_backends import Transfer, open_backend
from cnr_codecs import LosslessRows
from cnr_store.bits import Bits
from cnr_store.catalog import Catalog, Version, VersionInfo
from cnr_store.errors import ClosedError, OptionError, UnsupportedModelError
from cnr_store.format.layout import weight_path
from cnr_store.format.record import Record
from cnr_store.lineage import Lineage
from cnr_store.plan import Plan, RowsWrite
from cnr_store.policy import Decision, check_policy, decide
from cnr_store.reading.access import Url
from cnr_store.training.bitmap import Bitmap, rows_of
from cnr_store.training.codecs import CodecChoice, CodecOption
from cnr_store.training.optimizers import as_list
from cnr_store.training.restore import Restore, Restored
from cnr_store.training.snapshot import (
    LiveRows,
    RowArray,
    Staging,
    row_arrays,
    snapshot_dense,
    table_aliases,
)
from cnr_store.training.tables import Table, find_tables
from cnr_store.training.tracker import Tracker
from cnr_store.write import Writer

log = logging.getLogger("cnr_store")
Bitmaps = dict[str, Bitmap]
_LOSSLESS = LosslessRows()


class PendingSave:
    """A save under way.

    Attributes
    ----------
    step
        The step it saves.
    stall_seconds
        How long `save` held the training thread.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        self._future: Future[Record] = Future()
        self._asked = False

    def done(self) -> bool:
        """Whether it has been committed or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> VersionInfo:
        """Wait for the commit, at most `timeout` seconds.

        Raises
        ------
        SaveError, SupersededError
            Why there is no such version. Its rows are part of the next save.
        TimeoutError
            It is still being written.
        """
        try:
            return VersionInfo.of(self._future.result(timeout))
        finally:
            self._asked = self._future.done()


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
        ``full``, ``one-shot``, ``consecutive`` or ``intermittent``.
    bits
        Width of quantized rows: 2, 3, 4, 8, 32 (lossless), ``auto``, or a mapping from name patterns to these.
    codec
        Another codec for the rows: name, configuration, object, or a mapping from name patterns to these.
    state
        Further objects with `state_dict` and `load_state_dict`, by name: schedulers, scalers, metrics.
    storage_options
        For the filesystem, as in fsspec.
    workers
        Threads that encode and write.
    snapshot_bytes
        Host memory for the rows of a snapshot. Rows beyond it are encoded before `save` returns.
    rng
        Whether the global random number generators are saved and restored.

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
        state: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        workers: int = 2,
        snapshot_bytes: int = 2 << 30,
        rng: bool = True,
    ) -> None:
        workers = _count("workers", workers, least=1)
        snapshot_bytes = _count("snapshot_bytes", snapshot_bytes, least=0)
        self._policy = check_policy(policy)
        self._codecs = CodecChoice(bits, codec)
        self._objects = _stateful(state or {})
        self._rng = rng
        self._model = _module(model)
        self._optimizers = as_list(optimizer)
        self._tables = find_tables(model)
        self._aliases = table_aliases(model, self._tables)
        self._workers = workers
        backend = open_backend(url, **(storage_options or {}))
        self._catalog = Catalog(backend)
        self._catalog.check_format()
        self._writer = Writer(backend, workers)
        self._staging = Staging(snapshot_bytes)
        self._lineage = Lineage()
        self._since_whole: Bitmaps = {}
        self._pending: tuple[PendingSave, Bitmaps] | None = None
        self._closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cnr-save")
        self._tracker = Tracker(self._tables, self._optimizers)

    def save(self, step: int, reader: Any = None, metadata: Any = None, full: bool = False) -> PendingSave:
        """Take the state of this moment and write it behind training's back.

        A save that is still being written is waited for first: two never overlap.

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

        Raises
        ------
        ClosedError, StateError, UnsupportedModelError
            Nothing was written and nothing is forgotten.
        """
        self._check_open()
        step = _count("step", step, least=0)
        began = time.perf_counter()
        self._settle()
        pending = PendingSave(step)
        taken = snapshot_dense(
            self._model, self._tables, self._optimizers, self._objects, reader, metadata, self._rng
        )
        decision = decide(self._policy, self._lineage.sizes_bytes, full=full)
        arrays = row_arrays(self._tables, self._optimizers)
        unsafe = self._tracker.whole_reasons()
        dirty = self._tracker.swap()
        self._pending = (pending, dirty)
        try:
            rows = self._plan_rows(decision, arrays, dirty, unsafe)
        except BaseException:
            self._pending = None
            self._tracker.restore(dirty)
            raise
        plan = Plan(
            step=step,
            previous=self._lineage.version,
            rows=rows,
            dense=taken.dense,
            state=taken.state,
            policy=asdict(decision),
            needs=self._lineage.needs((write.path, write.base) for write in rows if write.base is not None),
            restores=self._lineage.restores,
            metadata=taken.metadata,
        )
        rows_done = threading.Event()
        self._executor.submit(self._write, pending, plan, rows_done)
        if any(isinstance(write.source, LiveRows) for write in rows):
            rows_done.wait()
        pending.stall_seconds = time.perf_counter() - began
        return pending

    def _plan_rows(
        self, decision: Decision, arrays: Sequence[RowArray], dirty: Bitmaps, unsafe: Mapping[str, str]
    ) -> list[RowsWrite]:
        """What to write of each array of rows, staged where there is room."""
        self._staging.begin()
        ids = {table.name: self._changed_ids(table, decision, dirty) for table in self._tables}
        whole = {table.name for table in self._tables if decision.full or len(ids[table.name]) == table.rows}
        whole |= unsafe.keys() | {array.table.name for array in arrays if not self._continues(array)}
        writes = []
        for array in arrays:
            table, line = array.table, self._lineage.lines.get(array.path)
            is_delta = line is not None and table.name not in whole
            written = ids[table.name] if is_delta else None
            is_weight = array.tensor is table.parameter
            writes.append(
                RowsWrite(
                    path=array.path,
                    shape=array.shape,
                    element=array.element,
                    base=line.base(decision.since) if line is not None and is_delta else None,
                    ids=written,
                    source=self._staging.take(array, written),
                    codec=self._codecs.of(table.name, table.rows * array.row_bytes)
                    if is_weight
                    else _LOSSLESS,
                    aliases=self._aliases[table.name] if is_weight else (),
                )
            )
        # What is still in the model comes first, so that training waits no longer than it must.
        return sorted(writes, key=lambda write: not isinstance(write.source, LiveRows))

    def _continues(self, array: RowArray) -> bool:
        """Whether a delta of this array's table can lean on what is stored.

        State that an optimizer has just made is written whole beside a delta; a weight never is.
        """
        line = self._lineage.lines.get(array.path)
        if line is None:
            return array.tensor is not array.table.parameter
        return (line.shape, line.element) == (array.shape, array.element)

    def _changed_ids(
        self, table: Table, decision: Decision, dirty: Bitmaps
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        bits = dirty[table.name]
        if decision.since == "baseline" and table.name in self._since_whole:
            bits = bits | self._since_whole[table.name]
        return rows_of(bits, table.rows)

    def _write(self, pending: PendingSave, plan: Plan, rows_done: threading.Event) -> None:
        try:
            record = self._writer.write(plan, rows_done.set)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            rows_done.set()
            log.error("save of step %d failed: %s", plan.step, error)
            pending._future.set_exception(error)
        else:
            pending._future.set_result(record)

    def _settle(self) -> None:
        """Wait for the save under way and take its outcome into account, on the training thread."""
        if self._pending is None:
            return
        pending, dirty = self._pending
        error = pending._future.exception()
        self._pending = None
        if error is not None:
            self._tracker.restore(dirty)
            return
        record = pending._future.result()
        self._lineage = self._lineage.after(record)
        for table in self._tables:
            line = self._lineage.lines[weight_path(table.name)]
            if line.links[0] == line.links[-1] == record.id:
                self._since_whole[table.name] = np.zeros_like(dirty[table.name])
            else:
                self._since_whole[table.name] = self._since_whole[table.name] | dirty[table.name]

    def load(self, version: Version = "latest") -> Restored:
        """Bring a version back into the model and its optimizers, in place, and go on from there.

        The next save continues that version, under a new claim.

        Raises
        ------
        EmptyStoreError, VersionNotFoundError, ModelMismatchError
            The model is unchanged.
        CorruptionError
            The version is damaged. The model may be partly overwritten: load another version.
        """
        self._check_open()
        self._settle()
        record = self._catalog.find(version)
        restore = Restore(self._catalog, record, self._model, self._tables, self._optimizers)
        restore.check(self._objects)
        lineage = Lineage.of(self._catalog, record)
        self._lineage, self._since_whole = Lineage(), {}  # until all is read, only whole tables are safe
        with Transfer(self._workers, 2 * self._workers) as transfer:
            restored, self._since_whole = restore.run(self._objects, self._rng, transfer)
        self._lineage = lineage
        self._tracker.clear()
        self._writer.restart(record.id)
        return restored

    def touch(self, table: str, ids: Any) -> None:
        """Flag rows that were changed without a lookup.

        Raises
        ------
        ModelMismatchError
            No such table, or ids out of range.
        """
        self._check_open()
        self._tracker.mark(table, ids)

    def close(self) -> None:
        """Wait for the save under way and stop tracking. Its failure, if nobody asked for its result, is raised."""
        if self._closed:
            return
        self._closed = True
        pending = self._pending
        try:
            self._settle()
        finally:
            self._tracker.close()
            self._executor.shutdown()
        if pending is not None and not pending[0]._asked:
            pending[0].result()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this checkpointer was closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OptionError(f"{name}={value!r}: give an integer of at least {least}")
    return int(value)


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    return model


def _stateful(objects: object) -> dict[str, Any]:
    if not isinstance(objects, Mapping):
        raise OptionError(f"state is a {type(objects).__name__}; give {{name: object with a state_dict}}")
    for name, value in objects.items():
        if not (
            callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        ):
            raise OptionError(
                f"state {name!r}: a {type(value).__name__} has no state_dict and load_state_dict"
            )
    return dict(objects)


def save(url: Url, model: nn.Module, optimizer: Any = None, step: int = 0, **options: Any) -> VersionInfo:
    """Save a model once and wait for it. `options` are those of `Checkpointer` and of its `save`."""
    of_save = {name: options.pop(name) for name in ("reader", "metadata", "full") if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer.save(step, **of_save).result()


def load(
    url: Url, model: nn.Module, optimizer: Any = None, version: Version = "latest", **options: Any
) -> Restored:
    """Load a model once. `options` are those of `Checkpointer`."""
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer.load(version)
