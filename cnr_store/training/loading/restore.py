"""Brings a version back into a model and its optimizers, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from cnr_backends import Transfer
from cnr_store.catalog.catalog import Catalog, VersionInfo
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.dense import dense_layout, read_dense
from cnr_store.errors import CorruptionError, ModelMismatchError
from cnr_store.format.layout import decode_name, dense_path, slot_path
from cnr_store.format.record import Record
from cnr_store.training.loading.row_fill import RowsRead
from cnr_store.training.loading.state_tree import accepted, decode_tree
from cnr_store.training.loading.validate_state import check_slots, check_tree
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.optimizer_state import check_groups, load_optimizer
from cnr_store.training.model.rng_state import set_rng_state
from cnr_store.training.model.row_arrays import row_arrays
from cnr_store.training.model.tables import (
    Table,
    check_extra_state,
    dense_tensors,
    load_extra_state,
    parameter_names,
)
from cnr_store.training.model.tensors import (
    dense_tensor,
    dtype_name,
    dtype_named,
    may_overlap_itself,
    overwriting,
)
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.lineage import Lineage

Array = np.ndarray[Any, Any]
log = logging.getLogger("cnr_store")


@dataclass(frozen=True)
class Restored:
    """What a load brought back beside the model.

    Attributes
    ----------
    version, step
        The version loaded, and its step.
    reader, metadata
        What `save` was given (of a reader object: its `state_dict()`).
    skipped
        Newer versions that were damaged, newest first: id and damage. Empty without ``fallback=True``.
    missing, unexpected
        What was chosen and only the model has, and only the version: names of tables and tensors, and ``state of
        optimizer 0`` or ``state of 'name'`` for what `optimizer` and `state` were not given for, ``state of 'parameter'
        in optimizer 0`` for what an optimizer keeps of one that the saved one did not train. With ``strict="raise"``
        only the latter are possible; all below are empty, too.
    grown
        By table with more rows than are stored: how many were loaded, and how many there are.
    cast
        By table or tensor of another element type: that of the version, and that of the model.
    """

    version: VersionInfo
    step: int
    reader: Any
    metadata: Any
    skipped: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class Restore:
    """One load: proves that the version fits, then reads it.

    Nothing of the model is changed before the proof is complete.
    """

    def __init__(
        self,
        catalog: Catalog,
        record: Record,
        model: nn.Module,
        tables: Sequence[Table],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._catalog = catalog
        self._record = record
        self._model = model
        self._tables = tables
        self._optimizers = optimizers
        self._where = f"version {record.id} of {catalog.backend.url}"
        self._state: Any = None
        self._info: VersionInfo | None = None

    @torch.inference_mode(False)  # what optimizers are given is theirs, to be trained with
    def check(self, objects: Mapping[str, Any]) -> None:
        """Compare names, shapes and types of the model, its optimizers and `objects` with what is stored.

        Raises
        ------
        ModelMismatchError
            Naming what differs, with both shapes.
        CorruptionError, FormatError
            The state is damaged.
        """
        self._info = VersionInfo.from_record(self._record)
        self.check_model()
        stored = self._catalog.state(self._record)
        self._state = decode_tree(self._catalog, self._record, stored, self._where)
        self._check_state(objects)

    def check_model(self) -> None:
        """The part of `check` that needs no state: the model's tables and dense tensors.

        Raises
        ------
        ModelMismatchError, CorruptionError, FormatError
        """
        self._check_tables()
        self._check_dense()

    def _check_tables(self) -> None:
        stored = {
            decode_name(path.split("/")[1]): entry.shape
            for path, entry in self._record.arrays.items()
            if path.startswith("tables/") and path.endswith("/weight")
        }
        self._compare("table", stored, {table.name: (table.rows, table.dim) for table in self._tables})
        for table in self._tables:
            entry = self._record.arrays[slot_path(table.name, "weight")]
            if entry.element != table.element:
                raise ModelMismatchError(
                    f"table {table.name!r} is {table.element} in the model and {entry.element} in {self._where}; "
                    f"convert the model before loading, or {IGNORE} it converted"
                )

    def _check_dense(self) -> None:
        prefix = dense_path("model", "")
        entries = {
            decode_name(path[len(prefix) :]): (path, entry)
            for path, entry in self._record.arrays.items()
            if path.startswith(prefix)
        }
        tensors = dense_tensors(self._model, self._tables)
        stored = {name: entry.shape for name, (_, entry) in entries.items()}
        self._compare("tensor", stored, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            grid = dense_layout(self._catalog, self._record, entries[name][0])
            stored_type = grid.torch_dtype or grid.dtype.name
            if stored_type != dtype_name(tensor.dtype):
                floats = tensor.is_floating_point() and dtype_named(stored_type).is_floating_point
                raise ModelMismatchError(
                    f"tensor {name!r} is {dtype_name(tensor.dtype)} in the model and {stored_type} in "
                    f"{self._where}; convert the model before loading"
                    + (f", or {IGNORE} it converted" if floats else "")
                )
            if grid.dtype.itemsize != tensor.element_size():
                raise CorruptionError(
                    f"{self._where}: {entries[name][0]}: {grid.dtype} does not hold the bits of {stored_type[:40]}"
                )

    def _compare(
        self, kind: str, stored: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]]
    ) -> None:
        missing, extra = sorted(model.keys() - stored.keys()), sorted(stored.keys() - model.keys())
        if missing or extra:
            raise ModelMismatchError(
                f"the model does not fit {self._where}: {kind}s only in the model: {missing or 'none'}, "
                f"only in the store: {extra or 'none'}; give the model that was saved, or {IGNORE} what both have"
            )
        for name, shape in model.items():
            if stored[name] != shape:
                raise ModelMismatchError(
                    f"{kind} {name!r} is {_times(shape)} in the model and {_times(stored[name])} in "
                    f"{self._where}; give the model that was saved{_for_shape(kind, stored[name], shape)}"
                )

    @torch.inference_mode(False)
    def run(
        self, objects: Mapping[str, Any], rng: bool, transfer: Transfer
    ) -> tuple[Restored, dict[str, Bitmap]]:
        """Read everything into place, once `check` has passed.

        Returns
        -------
        What was restored, and per table the packed bitmap of rows that changed since the table's whole version.

        Raises
        ------
        CorruptionError
            The version is damaged; the model is then partly overwritten and must be loaded again.
        """
        info, state = self._info, self._state
        assert info is not None  # `check` has passed
        reads = {
            table.name: self._rows_read(slot_path(table.name, "weight"), table.parameter)
            for table in self._tables
        }
        slots, of_slots = self._slots(state["optimizers"]) if self._optimizers else ([], [])
        RowsRead.run([*reads.values(), *of_slots], transfer)
        changed = {name: read.changed() for name, read in reads.items()}
        self._read_dense(transfer)
        with accepted(self._where, "a module's set_extra_state"):
            load_extra_state(self._model, state["extra_state"])
        names = parameter_names(self._model)
        for optimizer, tree, found in zip(self._optimizers, state["optimizers"], slots, strict=False):
            with accepted(self._where, f"{type(optimizer).__name__}.load_state_dict"):
                load_optimizer(optimizer, names, self._tables, tree, found)
        for name, value in objects.items():
            with accepted(self._where, f"load_state_dict of {name!r}"):
                value.load_state_dict(state["objects"][name])
        if rng and state["rng"] is not None:
            set_rng_state(state["rng"])
        left_out = tuple(left_out_of(state, self._optimizers, objects))
        return Restored(info, info.step, state["reader"], info.metadata, unexpected=left_out), changed

    def trusted(self, lineage: Lineage) -> Lineage:
        """The part of the version's lineage that deltas may lean on, once `run` has ended: all of it."""
        return lineage

    def _check_state(self, objects: Mapping[str, Any]) -> None:
        check_tree(self._state, self._where)
        trees = self._state["optimizers"]
        if self._optimizers and len(trees) != len(self._optimizers):
            raise ModelMismatchError(
                f"{self._where} holds the state of {len(trees)} optimizers, {len(self._optimizers)} were given; "
                f"give those it was saved with, or none, or {IGNORE} those that fit"
            )
        names = parameter_names(self._model)
        for position, (optimizer, tree) in enumerate(zip(self._optimizers, trees, strict=False)):
            if tree["class"] != type(optimizer).__name__:
                raise ModelMismatchError(
                    f"optimizer {position} is {type(optimizer).__name__}, in {self._where} it is {tree['class']}; "
                    f"give the one it was saved with, or {IGNORE} the model without it"
                )
            check_groups(optimizer, names, tree)
        if self._optimizers:
            rows = {table.name: table.rows for table in self._tables}
            for path in check_slots(trees, rows, self._record.arrays, self._where):
                ArrayReader(self._catalog, self._record, path)
        missing = sorted(objects.keys() - self._state["objects"].keys())
        if missing:
            raise ModelMismatchError(
                f"{self._where} holds no state of {', '.join(missing)}; leave out of `state` what was not saved, or "
                f"{IGNORE} the rest"
            )
        check_extra_state(self._model, self._state["extra_state"])

    def _rows_read(self, path: str, tensor: torch.Tensor) -> RowsRead:
        return RowsRead(ArrayReader(self._catalog, self._record, path), tensor)

    def _slots(self, trees: Sequence[Any]) -> tuple[list[dict[str, dict[str, torch.Tensor]]], list[RowsRead]]:
        """Optimizer state that follows rows, in the tensors there are, or new ones; and what will fill them."""
        there = {array.path: array.tensor for array in row_arrays(self._tables, self._optimizers)}
        by_name = {table.name: table for table in self._tables}
        found: list[dict[str, dict[str, torch.Tensor]]] = []
        reads: list[RowsRead] = []
        for tree in trees:
            of_tree: dict[str, dict[str, torch.Tensor]] = {}
            for name, slots in tree["slots"].items():
                for slot in slots:
                    path = slot_path(name, slot)
                    entry = self._record.arrays[path]
                    tensor = there.get(path)
                    if (
                        tensor is None
                        or tuple(tensor.shape) != entry.shape
                        or dtype_name(tensor.dtype) != entry.element
                        or may_overlap_itself(tensor)
                    ):
                        dtype = getattr(torch, entry.element)
                        tensor = torch.empty(entry.shape, dtype=dtype, device=by_name[name].parameter.device)
                    reads.append(self._rows_read(path, tensor))
                    of_tree.setdefault(name, {})[slot] = tensor
            found.append(of_tree)
        return found, reads

    def _read_dense(self, transfer: Transfer) -> None:
        tensors = dense_tensors(self._model, self._tables)

        def read(name: str) -> tuple[Array, str | None]:
            return read_dense(self._catalog, self._record, dense_path("model", name))

        found = transfer.map(read, tensors)
        for tensor, (values, torch_dtype) in zip(tensors.values(), found, strict=True):
            with overwriting(tensor):
                tensor.detach().copy_(dense_tensor(values, torch_dtype))


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _for_shape(kind: str, stored: Sequence[int], there: Sequence[int]) -> str:
    """What else can be done about a table that grew or shrank; only rows of the same columns can be loaded."""
    if kind != "table" or tuple(stored[1:]) != tuple(there[1:]):
        return ""
    if stored[0] < there[0]:
        return f", or {IGNORE} its rows and leaves the new ones as they are"
    return f", or load a part of it, as with rows=range({there[0]})"


def left_out_of(state: Any, optimizers: Sequence[Optimizer], objects: Mapping[str, Any]) -> list[str]:
    """What a version's state holds and nothing was given for, in words."""
    optimizer = [
        f"state of optimizer {position}" for position in range(len(optimizers), len(state["optimizers"]))
    ]
    return optimizer + [f"state of {name!r}" for name in state["objects"] if name not in objects]


def warn_left_out(restored: Restored, url: str) -> None:
    """Log what a whole load left out, since the next save would drop it in silence."""
    if restored.unexpected:
        log.warning(
            "version %s of %s also holds the %s, which the next save will not have: give Checkpointer the optimizer "
            "and the state={...} that it was saved with, or load with cnr_store.load if weights are all that is wanted",
            *(restored.version.id, url, ", ".join(restored.unexpected)),
        )
