"""Brings a part of a version into a model, or a whole one into a model that differs from the one saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from cnr_store.format.layout import decode_name, dense_path, weight_path
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.training.loading.optimizer_fit import OptimizerFit, fit_optimizer
from cnr_store.training.loading.restore import Restored, left_out_of
from cnr_store.training.loading.row_fill import Fill, RowsRead
from cnr_store.training.loading.selection import Match, Selection, TableFit
from cnr_store.training.loading.state_tree import accepted, decode_tree
from cnr_store.training.loading.validate_state import check_slots, check_tree
from cnr_store.training.model.optimizer_state import load_optimizer
from cnr_store.training.model.rng_state import set_rng_state
from cnr_store.training.model.tables import (
    Table,
    dense_tensors,
    extra_state,
    load_extra_state,
    parameter_names,
)
from cnr_store.training.model.tensors import assign_ids, dense_tensor, overwriting
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.writing.lineage import Lineage

Array = np.ndarray[Any, Any]
log = logging.getLogger("cnr_store")


class ChosenRows:
    """A tensor, (rows,) or (rows, k), some of whose rows are read; the others stay. It may be of another type."""

    def __init__(self, reader: ArrayReader, tensor: torch.Tensor, fit: TableFit) -> None:
        self.reader = reader
        self.tensor = tensor
        self._wanted = np.full(fit.stored_rows, fit.ids is None, np.uint8)
        if fit.ids is not None:
            self._wanted[fit.ids] = 1

    def fill(self, first: int, rows: int) -> None:
        """Fill those of the `rows` rows from row `first` on that are wanted."""
        wanted = self._wanted[first : first + rows]
        at = np.flatnonzero(wanted)
        if not at.size:
            return
        out = np.empty((rows, self.reader.columns), self.reader.dtype)
        self.reader.read_rows(first, out, wanted.copy())
        values = out[at].reshape(at.size, *self.tensor.shape[1:])
        if self.tensor.dtype is torch.bfloat16:
            values = values.astype(np.float32)  # the array type of bfloat16
        assign_ids(self.tensor, first + at, values)


class PartialRestore:
    """One load of what a `Selection` chooses.

    Nothing of the model is changed before the proof is complete.
    """

    def __init__(
        self,
        catalog: Catalog,
        record: Record,
        model: nn.Module,
        tables: Sequence[Table],
        optimizers: Sequence[Optimizer],
        selection: Selection,
    ) -> None:
        self._catalog = catalog
        self._record = record
        self._model = model
        self._tables = tables
        self._optimizers = optimizers
        self._selection = selection
        self._where = f"version {record.id} of {catalog.backend.url}"
        self._info = VersionInfo.from_record(record)
        self._match = Match(self._where)
        self._fits: list[OptimizerFit] = []
        self._state: Any = None
        self._objects: list[str] = []
        self._extra = False
        self._exact: set[str] = set()

    @torch.inference_mode(False)  # what optimizers are given is theirs, to be trained with
    def check(self, objects: Mapping[str, Any]) -> None:
        """Find what is to be loaded, and compare it with the model.

        Raises
        ------
        ModelMismatchError
            It doesn't fit: with ``strict="raise"`` in any way, else in one that can't be passed over.
        CorruptionError, FormatError
            The version is damaged.
        """
        self._check_model()
        stored = self._catalog.state(self._record)
        self._state = decode_tree(self._catalog, self._record, stored, self._where)
        check_tree(self._state, self._where)
        self._check_optimizers()
        if self._selection.everything:
            self._check_beside(objects)
        differences = self._match.differences()
        if differences and self._selection.strict == "raise":
            raise ModelMismatchError(
                f"{self._where} does not fit the model: {differences}; strict='report' loads what does"
            )
        if differences and self._selection.strict == "report":
            log.warning("%s is loaded as far as it fits the model: %s", self._where, differences)

    def _check_model(self) -> None:
        weights = self._stored("tables/", "/weight")
        self._match.take_tables(self._selection, weights, self._tables)
        for fit in self._match.tables:
            ArrayReader(self._catalog, self._record, weight_path(fit.table.name))
        dense = self._stored(dense_path("model", ""), "")
        shapes = {name: entry.shape for name, entry in dense.items()}
        tensors = dense_tensors(self._model, self._tables)
        self._match.take_tensors(self._selection, shapes, tensors, self._dense_type)

    def _stored(self, prefix: str, suffix: str) -> dict[str, ArrayEntry]:
        return {
            decode_name(path[len(prefix) : len(path) - len(suffix)]): entry
            for path, entry in self._record.arrays.items()
            if path.startswith(prefix) and path.endswith(suffix)
        }

    def _dense_type(self, name: str) -> str:
        grid = dense_layout(self._catalog, self._record, dense_path("model", name))
        stored_type = grid.torch_dtype or grid.dtype.name
        dtype = getattr(torch, stored_type, None)
        if isinstance(dtype, torch.dtype) and dtype.itemsize != grid.dtype.itemsize:
            raise CorruptionError(
                f"{self._where}: {name!r}: {grid.dtype} does not hold the bits of {stored_type[:40]}"
            )
        return stored_type

    def _check_optimizers(self) -> None:
        if not self._optimizers:
            return
        trees, match = self._state["optimizers"], self._match
        rows = {name: entry.shape[0] for name, entry in self._stored("tables/", "/weight").items()}
        for path in check_slots(trees, rows, self._record.arrays, self._where):
            ArrayReader(self._catalog, self._record, path)
        names = parameter_names(self._model)
        loaded = {fit.table.parameter_name for fit in match.tables} | match.tensors.keys()
        for position, optimizer in enumerate(self._optimizers):
            tree = trees[position] if position < len(trees) else None
            if tree is None or tree["class"] != type(optimizer).__name__:
                match.missing.append(f"state of optimizer {position} ({type(optimizer).__name__})")
                continue
            fit = fit_optimizer(
                optimizer, names, self._tables, tree, match.tables, loaded, self._record.arrays
            )
            self._fits.append(fit)
            match.missing += [f"state of {name!r} in optimizer {position}" for name in fit.kept]
            if self._selection.everything and not fit.takes_settings(names):
                match.missing.append(f"settings of optimizer {position}")

    def _check_beside(self, objects: Mapping[str, Any]) -> None:
        stored = self._state["objects"]
        self._objects = [name for name in objects if name in stored]
        self._match.missing += [f"state of {name!r}" for name in objects if name not in stored]
        self._match.unexpected += left_out_of(self._state, self._optimizers, objects)
        own, other = extra_state(self._model).keys(), self._state["extra_state"].keys()
        self._extra = own == other
        if not self._extra:
            self._match.missing += sorted(own)
            self._match.unexpected += sorted(other)

    @torch.inference_mode(False)
    def run(
        self, objects: Mapping[str, Any], rng: bool, transfer: Transfer
    ) -> tuple[Restored, dict[str, Bitmap]]:
        """Read what was found, once `check` has passed.

        Returns
        -------
        What was restored, and for each table that is now what the version holds, packed, the rows that changed since
        its whole version.

        Raises
        ------
        CorruptionError
            The version is damaged; the model is then partly overwritten.
        """
        fills = {
            weight_path(fit.table.name): self._fill(weight_path(fit.table.name), fit.table.parameter, fit)
            for fit in self._match.tables
        }
        for found in self._fits:
            for path, fit, tensor in found.targets():
                fills[path] = self._fill(path, tensor, fit)
        RowsRead.run(list(fills.values()), transfer)
        self._exact = {path for path, read in fills.items() if isinstance(read, RowsRead)}
        self._read_dense(transfer)
        names = parameter_names(self._model)
        for found in self._fits:
            self._load_optimizer(found, names)
        self._load_beside(objects, rng)
        changed = {
            fit.table.name: read.changed()
            for fit in self._match.tables
            if isinstance(read := fills[weight_path(fit.table.name)], RowsRead)
        }
        return self._restored(), changed

    def _load_optimizer(self, found: OptimizerFit, names: Mapping[int, str]) -> None:
        optimizer, cast = found.optimizer, self._match.cast
        owned = [one for group in optimizer.param_groups for one in group["params"] if one in optimizer.state]
        others = {one: optimizer.state[one] for one in owned if names.get(id(one)) not in found.loaded}
        converted = {fit.table.parameter_name for fit in found.fits.values() if fit.table.name in cast}
        tree, slots = found.merged(names, settings=self._selection.everything)
        with accepted(self._where, f"{type(optimizer).__name__}.load_state_dict"):
            load_optimizer(optimizer, names, self._tables, tree, slots, {*converted, *cast})
        # What was not chosen has gone through foreign code, too, and stays as it was.
        optimizer.state.update(others)

    def _fill(self, path: str, tensor: torch.Tensor, fit: TableFit) -> Fill:
        reader = ArrayReader(self._catalog, self._record, path)
        return RowsRead(reader, tensor) if fit.exact else ChosenRows(reader, tensor, fit)

    def _read_dense(self, transfer: Transfer) -> None:
        tensors = self._match.tensors

        def read(name: str) -> tuple[Array, str | None]:
            return read_dense(self._catalog, self._record, dense_path("model", name))

        for tensor, (values, torch_dtype) in zip(tensors.values(), transfer.map(read, tensors), strict=True):
            with overwriting(tensor):
                tensor.detach().copy_(dense_tensor(values, torch_dtype))

    def _load_beside(self, objects: Mapping[str, Any], rng: bool) -> None:
        if not self._selection.everything:
            return
        if self._extra:
            with accepted(self._where, "a module's set_extra_state"):
                load_extra_state(self._model, self._state["extra_state"])
        for name in self._objects:
            with accepted(self._where, f"load_state_dict of {name!r}"):
                objects[name].load_state_dict(self._state["objects"][name])
        if rng and self._state["rng"] is not None:
            set_rng_state(self._state["rng"])

    def _restored(self) -> Restored:
        info, match = self._info, self._match
        return Restored(
            info,
            info.step,
            self._state["reader"],
            info.metadata,
            missing=tuple(match.missing),
            unexpected=tuple(match.unexpected),
            grown=match.grown,
            cast=match.cast,
        )

    def trusted(self, lineage: Lineage) -> Lineage:
        """The part of the version's lineage that deltas may lean on: arrays that are now as they are stored."""
        lines = {path: line for path, line in lineage.lines.items() if path in self._exact}
        return replace(lineage, lines=lines)
