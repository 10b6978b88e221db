"""Reads versions for `torch.distributed.checkpoint.load`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cnr_backends import Transfer, open_backend
from cnr_store.catalog.catalog import Catalog, Url, Version
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.dcp.contents import Contents, StoredTensor
from cnr_store.errors import OptionError, RanksError
from cnr_store.format.record import Record
from cnr_store.format.state import decode_state
from cnr_store.training.loading.validate_state import torch_value
from cnr_store.training.model.tensors import assign_dense, assign_rows


class Reader(StorageReader):
    """Reads a version for `torch.distributed.checkpoint.load`, onto any number of ranks.

    Every tensor is offered whole, so the planner asks for exactly the boxes that a rank holds, and only the chunks that
    meet these are read. Versions that a `Checkpointer` saved can be loaded, too, by the names of the model's state
    dict.

    Parameters
    ----------
    url, storage_options
        The store: an fsspec URL, a path, or a Zarr store, and options of its filesystem.
    version
        An id, a `VersionInfo`, a step, a tag, or ``latest``. A `checkpoint_id` given to ``load`` comes before it: a
        step in digits, an id or a tag.

    Raises
    ------
    cnr_backends.OpenError
        The URL can't be opened.
    """

    def __init__(self, url: Url, version: Version = "latest", **storage_options: Any) -> None:
        super().__init__()
        self._backend = open_backend(url, **storage_options)
        self._given = self._version = version
        self._opened: tuple[Catalog, Record, Contents] | None = None

    @property
    def version(self) -> VersionInfo:
        """The version that was loaded last.

        Raises
        ------
        OptionError
            None was.
        """
        return VersionInfo.from_record(self._open[1])

    @property
    def _open(self) -> tuple[Catalog, Record, Contents]:
        if self._opened is None:
            raise OptionError("nothing was loaded through this reader yet")
        return self._opened

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Load once the version that a `checkpoint_id` names: a step in digits, an id or a tag."""
        if checkpoint_id is not None:
            name = str(checkpoint_id)
            self._version = int(name) if name.isdecimal() else name

    # Without the parameters of the base class: DCP would take them for leave to look for a checkpoint of one rank.
    def read_metadata(self) -> Metadata:
        """What the version holds.

        Raises
        ------
        EmptyStoreError, VersionNotFoundError, CorruptionError
        """
        catalog = Catalog(self._backend)
        # DCP resets only where it was given an id, so the next load without one is of the reader's own version again.
        chosen, self._version = self._version, self._given
        record = catalog.find(chosen)
        contents = Contents.read(catalog, record)
        self._opened = catalog, record, contents
        tensors = {name: _whole(each) for name, each in contents.tensors.items()}
        values = {name: BytesStorageMetadata() for name in contents.values}
        return Metadata(
            {**tensors, **values},
            planner_data={**{name: (name,) for name in (*tensors, *values)}, **contents.paths},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all is set up once the metadata are read.

        Parameters
        ----------
        metadata
            What `read_metadata` gave.
        is_coordinator, args, kwargs
            Not used.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the version that this rank found."""
        return replace(plan, storage_data=self._open[1].id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, once it is known that all ranks read one version.

        Raises
        ------
        RanksError
            A version was committed while the ranks looked for the latest.
        """
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise RanksError(f"ranks found different versions ({', '.join(found)}): load again, or name one")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a `plan` asks for, into the tensors that its `planner` gives.

        Raises
        ------
        CorruptionError, VersionNotFoundError
        """
        catalog, record, contents = self._open
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(contents.values[item.storage_index.fqn]))
            else:
                targets.append((item, planner.resolve_tensor(item).detach()))
        paths = {item.storage_index.fqn: contents.tensors[item.storage_index.fqn].path for item, _ in targets}
        reader_of = cache(lambda path: ArrayReader(catalog, record, path))

        def tasks() -> Iterator[Callable[[], None]]:
            for item, target in targets:
                path = paths[item.storage_index.fqn]
                if 0 in item.lengths:
                    continue
                if record.arrays[path].kind == "dense":
                    yield partial(_read_box, catalog, record, path, item, target)
                else:
                    yield from _rows_tasks(reader_of(path), item, target)

        with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
            for _ in transfer.map(lambda task: task(), tasks()):
                pass
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, doc: Any) -> io.BytesIO:
        """A value as the bytes that planners load.

        They unpickle them, and without a proof of what is in there. So nothing that was stored gets there: the value is
        decoded from JSON into plain types, and pickled here.
        """
        catalog, record, _ = self._open
        value = decode_state(
            doc, read=lambda path: read_dense(catalog, record, path)[0], from_leaf=torch_value
        )
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        return data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False, because a `checkpoint_id` alone does not tell the store."""
        return False


def _whole(stored: StoredTensor) -> TensorStorageMetadata:
    """A tensor as one chunk of full size."""
    size = torch.Size(stored.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [chunk])


def _rows_tasks(reader: ArrayReader, item: ReadItem, target: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Calls that fill a tensor with a box of an array of rows, each with some of its rows."""
    first, end = item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]
    columns = _slice(item.storage_offsets[1], item.lengths[1]) if target.ndim == 2 else 0

    def read(begin: int, stop: int) -> None:
        values = reader.new_rows(stop - begin)
        reader.read(begin, values)
        assign_rows(target, begin - first, values[:, columns])

    for begin, rows in reader.regions():
        if begin < end and begin + rows > first:
            yield partial(read, max(first, begin), min(end, begin + rows))


def _read_box(catalog: Catalog, record: Record, path: str, item: ReadItem, target: torch.Tensor) -> None:
    """Fill a tensor with a box of a dense array, from the chunks that meet it."""
    offsets, lengths = item.storage_offsets, item.lengths
    values, torch_dtype = read_dense(catalog, record, path, (*offsets, 0)[0], (*lengths, 1)[0])
    box: Any = (..., *map(_slice, offsets[1:], lengths[1:]))
    assign_dense(target, values[box], torch_dtype)


def _slice(offset: int, length: int) -> slice:
    return slice(offset, offset + length)
