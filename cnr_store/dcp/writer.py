"""Writes versions for `torch.distributed.checkpoint.save` and ``async_save``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cnr_backends import open_backend
from cnr_codecs import LosslessRows, RowCodec
from cnr_store.catalog import fencing
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.dcp.boxes import (
    LocalItems,
    PlacedTensor,
    dense_write,
    local_items,
    merged_values,
    place_tensors,
    rows_write,
)
from cnr_store.dcp.contents import Contents, StoredTensor
from cnr_store.errors import OptionError, SaveError
from cnr_store.format.layout import table_name
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import room_advice
from cnr_store.policies.checks import integer
from cnr_store.policies.policy import decide
from cnr_store.policies.widths import LOSSLESS, Bits, match_pattern
from cnr_store.ranks.group import Alone, Document
from cnr_store.ranks.protocol import Team
from cnr_store.training.distributed.torch_group import job_group
from cnr_store.training.model.patterns import check_patterns
from cnr_store.training.model.tensors import dtype_named
from cnr_store.training.saving.agreement import check_alike, together
from cnr_store.training.saving.codec_choice import CodecChoice, CodecOption
from cnr_store.training.saving.never_below_codec import QUANTIZABLE
from cnr_store.writing.exchange import joined
from cnr_store.writing.lineage import spent_once_restored
from cnr_store.writing.plan import DenseWrite, Plan, placeholder
from cnr_store.writing.writer import Writer as VersionWriter

log = logging.getLogger("cnr_store")
_NUMBER = "dcp/number"
_UNDER_WAY = "another save of this writer is under way: wait for its future first"


class Writer(StorageWriter):
    """Writes versions for `torch.distributed.checkpoint.save` and ``async_save``, one after the other.

    Every version is whole. Floating tensors of two dimensions and at least 16 KiB become arrays of rows, and so do
    those of one dimension that ranks share; everything else is dense. Values that are no tensors are stored as JSON,
    and refused unless that holds them exactly. All is lossless, but what `tables` names together with `bits` or
    `codec`.

    All ranks make a writer at the same point of the program and use it for all saves. A version exists once `save` has
    returned on any rank. If any rank fails before the commit, nothing of it is visible; if one fails behind it, the
    version is whole. In both cases the same writer may save again. The step of a version is the `checkpoint_id` given
    to `save`, in digits; without one, it is the last version's plus 1.

    Parameters
    ----------
    url, storage_options
        The store: an fsspec URL, a path, or a Zarr store, and options of its filesystem.
    tables
        Names of tensors of two dimensions (without ``.weight``), or patterns of names, that are tables: arrays of rows
        however small, with the codecs of `bits` and `codec`.
    bits, codec
        How rows of `tables` are stored, as in `Checkpointer`. Lossless by default.
    previous
        The version that the state was loaded from, such as `Reader.version`: the next one continues it. By default the
        first version follows none.
    workers
        Threads that encode, on each rank.
    process_group
        The ranks that save, as given to `save`. By default all of them.
    no_dist
        Whether this process saves alone, as given to `save`.
    timeout_seconds
        How long a rank that does not come or makes no progress is waited for.

    Raises
    ------
    OptionError
        An option is out of range, or widths are given without `tables`.
    RanksError
        Some ranks did not make the writer.
    cnr_backends.OpenError
        The URL can't be opened.
    """

    def __init__(
        self,
        url: Url,
        *,
        tables: Sequence[str] = (),
        bits: Bits | None = None,
        codec: CodecOption = None,
        previous: Version | None = None,
        workers: int = 2,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        timeout_seconds: float = 600,
        **storage_options: Any,
    ) -> None:
        super().__init__()
        self._tables = dict.fromkeys(check_patterns("tables", tables), True)
        if (bits is not None or codec is not None) and not self._tables:
            raise OptionError("bits and codec are for tables: name them with tables=['users', 'items*']")
        self._codecs = CodecChoice(LOSSLESS if bits is None and codec is None else bits, codec)
        workers = integer("workers", workers, minimum=1)
        backend = open_backend(url, **storage_options)
        catalog = Catalog(backend)
        catalog.check_format()
        self._writer = VersionWriter(backend, workers, room_advice=room_advice)
        self._last: Record | None = None
        self._restores, self._spent = 0, 0.0
        if previous is not None:
            seen = fencing.look(catalog)
            self._last = catalog.find(previous)
            self._restores, self._spent = self._last.restores + 1, spent_once_restored(self._last, {})
            self._writer.restart(self._last.id, seen)
        self._named_step = NamedStep()
        self._number = 0  # of the last save, as the first rank counts them
        self._saving = threading.Lock()
        self._group = Alone(timeout_seconds) if no_dist else job_group(process_group, timeout_seconds)

    @property
    def version(self) -> VersionInfo:
        """The version that was saved last, or the one that the next continues.

        Raises
        ------
        OptionError
            There is none yet.
        """
        if self._last is None:
            raise OptionError("nothing was saved by this writer yet")
        return VersionInfo.from_record(self._last)

    def close(self) -> None:
        """End this job's run in the store. No save may follow, and all ranks call it."""
        try:
            self._writer.close()
        finally:
            self._group.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Give the next version the step that a `checkpoint_id` names. DCP does not call this without one.

        Raises
        ------
        OptionError
            It is not a step in digits.
        """
        self._named_step.next = None
        if checkpoint_id is not None:
            if not self.validate_checkpoint_id(str(checkpoint_id)):
                raise OptionError(
                    f"checkpoint_id={checkpoint_id!r}: give the step in digits, such as '600'; the writer has the URL"
                )
            self._named_step.next = integer("checkpoint_id", int(str(checkpoint_id)), minimum=0)

    def storage_meta(self) -> None:
        """Take the step that was named for the save that begins here: it may fail before its plan is made."""
        self._named_step.begin()

    # DCP passes on what it was called with only to a method that has `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, whatever became of the one before it.

        Parameters
        ----------
        is_coordinator
            Whether DCP takes this rank for the first.
        args
            Not used.
        kwargs
            May have `use_collectives`.

        Raises
        ------
        OptionError
            `save` was told of other ranks than this writer, or to use no collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                "use_collectives=False: ranks that do not plan together can't write one version; leave it out"
            )
        if is_coordinator != (self._group.rank == 0):
            raise OptionError(
                f"save takes this rank for {'the first' if is_coordinator else 'another than the first'}, and the "
                f"writer for rank {self._group.rank} of {self._group.world}: give both the same process_group and "
                "no_dist"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan itself."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans themselves: planners that cache plans would hand back what was put into those of an earlier save.

        The first rank tells the number of the save beside them. DCP gives no rank its plan before that, so a rank that
        missed a save has the number of this one.

        Raises
        ------
        OptionError
            `save` was told of more or fewer ranks than this writer.
        """
        if len(plans) != self._group.world:
            raise OptionError(
                f"{len(plans)} ranks save, and {self._group.world} made the writer: give save and Writer the same "
                "process_group and no_dist"
            )
        if self._saving.locked():
            raise SaveError(_UNDER_WAY)  # whose ranks may still have to read their number
        self._number += 1
        self._group.keyvalue.set(_NUMBER, str(self._number).encode())
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and commit the version, all ranks together: what a `plan` holds, as its `planner` gives it.

        Raises
        ------
        SaveError
            With the cause. The version does not exist and never will.
        StateError, UnsupportedModelError
            Something can't be stored exactly.
        OptionError
            A pattern of `tables`, `bits` or `codec` fits nothing.
        RanksError
            A rank does not answer.
        SupersededError
            Another writer has claimed the store.
        """
        if not self._saving.acquire(blocking=False):
            raise SaveError(_UNDER_WAY)
        try:
            self._last = self._write(plan, planner)
            self._restores, self._spent = self._last.restores, self._last.spent
        finally:
            self._saving.release()
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the version was committed when all ranks had written. `metadata` and `results` are not used."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a `checkpoint_id` is a step in digits."""
        return str(checkpoint_id).isascii() and str(checkpoint_id).isdecimal()

    def __reduce__(self) -> Any:
        raise TypeError("a Writer can't go to another process: give async_save AsyncCheckpointerType.THREAD")

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Record:
        self._number = int(self._group.keyvalue.get(_NUMBER) or 0)
        phase = f"save number {self._number}"
        local, merged = together(
            self._group,
            phase,
            lambda: local_items(plan, planner, self._group.rank),
            lambda found: {**found.say(), **self._where()},
            lambda: 0,
            lambda documents: {"said": documents},
        )
        said = merged["said"]
        check_alike(phase, said, ("checkpoint_id",))
        team = Team(self._group, self._number)
        try:
            record = self._writer.write(self._plan(local, said, team), team=team)
        except BaseException as error:  # also an interrupt, so that no rank waits for this one
            team.give_up(error)
            raise
        if team.rank == 0:
            log.info("saved step %d as version %s, %d bytes", record.step, record.id, record.nbytes)
        return record

    def _where(self) -> Document:
        """What the ranks go by beside their state. The outcome of a save may have been lost on the way to some."""
        last, named = self._last, self._named_step.now
        step = named if named is not None else 0 if last is None else last.step + 1
        return {
            "checkpoint_id": named,
            "step": step,
            "previous": None if last is None else last.id,
            "parent_paths": {} if last is None or self._group.rank > 0 else last.stored_paths,
            "restores": self._restores,
            "spent": self._spent,
        }

    def _plan(self, local: LocalItems, said: Sequence[Document], team: Team) -> Plan:
        first = said[0]
        self._codecs.choose_step(first["spent"], {})
        placed = place_tensors(said, lambda table: bool(match_pattern(self._tables, table)))
        self._check_tables(placed)
        # What ranks hold in other boxes than rows is put together at once, that of dense arrays as they are written.
        apart = [each for each in placed if each.is_rows and each.is_split and each.owner >= 0]
        gathered = joined([dense_write(each, local, team.rank) for each in apart], team)
        whole = {write.path: write for write in gathered}
        values, paths = merged_values(said)
        tensors = {
            tensor.name: StoredTensor(tensor.path, tensor.shape, dtype_named(tensor.element))
            for tensor in placed
        }
        dense = [dense_write(each, local, team.rank) for each in placed if not each.is_rows]
        dense += [
            DenseWrite(
                path,
                local.beside[path].values if rank == team.rank else placeholder(shape, dtype),
                torch_dtype,
                is_here=rank == team.rank,
            )
            for rank, doc in enumerate(said)
            for path, (shape, dtype, torch_dtype) in doc["beside"].items()
        ]
        return Plan(
            step=first["step"],
            previous=first["previous"],
            rows=[rows_write(each, local, whole, team, self._codec(each)) for each in placed if each.is_rows],
            dense=dense,
            state=Contents(tensors, values, paths).to_state(),
            policy=asdict(decide("full", None, full=True)),
            restores=first["restores"],
            spent=first["spent"],
            parent_paths=first["parent_paths"],
        )

    def _check_tables(self, placed: Sequence[PlacedTensor]) -> None:
        names = [table_name(tensor.name) for tensor in placed if tensor.is_rows]
        for pattern in self._tables:
            if not any(match_pattern({pattern: True}, name) for name in names):
                raise OptionError(
                    f"tables: the pattern {pattern!r} fits no floating tensor of two dimensions; there are "
                    f"{', '.join(map(repr, names)) or 'none'}"
                )
        self._codecs.check_tables([name for name in names if match_pattern(self._tables, name)])

    def _codec(self, tensor: PlacedTensor) -> RowCodec:
        name = table_name(tensor.name)
        if not match_pattern(self._tables, name) or tensor.element not in QUANTIZABLE:
            return LosslessRows()
        return self._codecs.codec_for(name, tensor.nbytes)


class NamedStep(threading.local):
    """The step that a `checkpoint_id` names.

    DCP makes all calls of a save in one thread, so another save that is called for meanwhile does not change its step.
    """

    # next, now: of the save that begins next, and of the one that has begun. None if none was named.
    next: int | None = None
    now: int | None = None

    def begin(self) -> None:
        """Take the step for a save, and for no later one, whatever becomes of it."""
        self.now, self.next = self.next, None
