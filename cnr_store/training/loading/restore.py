"""Brings a version, or a part of it, back into a model and its optimizers, in place; rows several arrays at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from cnr_backends import BackendError, Transfer
from cnr_store.catalog.catalog import Catalog, count_parts, read_state_part
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.chains.dense import read_dense
from cnr_store.chains.link import Strays
from cnr_store.chains.salvage import SalvagedRows, SalvageReader, salvaged_by_label
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.layout import dense_path
from cnr_store.format.record import Record
from cnr_store.ranks.group import Alone, Group
from cnr_store.training.devices.staging import DeviceRows, rows_there
from cnr_store.training.distributed.pieces import LocalPiece, copy_whole, is_dtensor
from cnr_store.training.loading.load_result import Restored
from cnr_store.training.loading.match import Ids, Selection, match_model
from cnr_store.training.loading.module_load import ModuleLoad
from cnr_store.training.loading.optimizer_fit import (
    OptimizerFit,
    Slots,
    Target,
    fit_fused,
    fit_optimizers,
    move_tables,
    split_trees,
)
from cnr_store.training.loading.validate_state import (
    StoredState,
    accepted,
    check_slots,
    check_tree,
    decode_tree,
    with_parts,
)
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.dense_state import (
    Loaders,
    dense_items,
    extra_state,
    named_state,
    remade_names,
    unchanged,
)
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.object_state import spread_state
from cnr_store.training.model.optimizer_state import Tree, load_optimizer
from cnr_store.training.model.rng_state import seed_rng, set_rng_state
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import (
    AnyArray,
    assign_dense,
    assign_ids,
    copy_rows,
    dense_tensor,
    dtype_name,
    note_change,
    overwriting,
    rows_view,
)
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.tracking.bitmap import Bitmap
from cnr_store.training.tracking.tracker import Tracker
from cnr_store.writing.lineage import Lineage
from cnr_store.writing.row_codes import Known

ExpectedSlots = tuple[Optimizer, Slots]
Learn = Callable[[str, Table, int, Sequence[Mapping[str, Any] | None]], Known | None]
log = logging.getLogger("cnr_store")


class Restore:
    """One load of what a `Selection` chooses; making it proves that the version fits, `run` reads it.

    Nothing of the model is changed before the proof is complete.

    `objects`: the `state` objects of the checkpointer, by name.
    `salvage`: whether rows that are damaged or lost take older values.
    `group`: the ranks that load together; None for this process alone.

    `is_damaged`: whether `run` met rows that are damaged or lost.
    """

    @torch.inference_mode(False)  # what optimizers are given is theirs, to be trained with
    def __init__(
        self,
        catalog: Catalog,
        record: Record,
        trained: TrainedModel,
        objects: Mapping[str, Any],
        selection: Selection,
        salvage: bool = False,
        group: Group | None = None,
    ) -> None:
        self.is_damaged = False
        self._salvage = salvage
        self._catalog = catalog
        self._record = record
        self._trained = trained
        self._objects = objects
        self._group = group or Alone()
        self._names = parameter_names(trained.model)
        self._exact: Collection[str] = ()
        self.learned: Mapping[str, Known] = {}
        self._extra: dict[str, Any] = {}
        # Decodes what `metadata` was given, so it is a proof, too.
        self._info = VersionInfo.from_record(record)
        # The model is compared before the state is read, so that a wrong model costs no reading.
        self._loaders = Loaders(trained.model, [each.module for each in trained.sharded])
        self._match = match_model(
            catalog, record, trained.model, trained.tables, selection, self._loaders, trained.excluded
        )
        self._state = self._read_state()
        self._stepping, fused = split_trees(self._state.optimizers)
        if trained.optimizers or trained.fused_position is not None:
            named = self._stepping if fused is None else [*self._stepping, fused]
            check_slots(named, self._match.rows, record.arrays, self._match.where)
        trees, fused, without = move_tables(self._match, trained, self._stepping, fused, self._names)
        self._fused, self._settings = fit_fused(self._match, trained, fused, without, record.arrays)
        self._fits = self._fit_optimizers(trees, without) if trained.optimizers else []
        if selection.everything:
            self._compare_rest()
        self._match.prove()
        if group is None or group.rank == 0:
            self._match.warn()

    def _read_state(self) -> StoredState:
        """The state, with what this rank saved; or, if there were others, with what all of them saved."""
        catalog, record, where, group = self._catalog, self._record, self._match.where, self._group
        doc, seen = catalog.state(record), set[str]()
        state = check_tree(decode_tree(catalog, record, doc, where, seen), where)
        saved = count_parts(doc)
        if not saved:
            parts: list[Any] = [{"reader": state.reader, "rng": state.rng}]
        else:
            ranks = [group.rank] if saved == group.world else range(saved)
            with Transfer(READ_WORKERS, 2 * READ_WORKERS) as transfer:
                docs = list(transfer.map(lambda rank: read_state_part(catalog, record, doc, rank), ranks))
            parts = [decode_tree(catalog, record, part, where, seen) for part in docs]
        return with_parts(state, parts, max(saved, 1) == group.world, where)

    @property
    def rows(self) -> int:
        """Table rows that are read."""
        return sum(
            min(fit.stored_rows, fit.table.rows) if fit.ids is None else len(fit.ids)
            for fit in self._match.tables
        )

    def _fit_optimizers(self, trees: Sequence[Tree], without_state: set[str]) -> list[OptimizerFit]:
        match, excluded = self._match, self._trained.excluded
        names = {name for name in self._names.values() if not excluded.has(name)}
        chosen = {fit.table.parameter_name for fit in match.tables} | match.tensors.keys()
        # Whole: state of parameters, too, that a hook keeps out of the model's state dict.
        loaded = (names if match.selection.whole else chosen) - without_state
        fits = fit_optimizers(match, self._trained.optimizers, trees, self._names, loaded)
        match.prove()
        self._trained.row_arrays()  # raises if two keep state of one name for one table
        for fit in fits:
            fit.take_slots(self._record.arrays)
        return fits

    def _compare_rest(self) -> None:
        """Compare what is neither table nor tensor: `state` objects, other optimizers, extra state."""
        state, match, trained = self._state, self._match, self._trained
        lacking = [name for name in self._objects if name not in state.objects]
        if lacking:
            match.lacks(
                [f"state of {name!r}" for name in lacking],
                f"{match.where} holds no state of {', '.join(sorted(lacking))}; leave out of `state` what was not "
                f"saved, or {IGNORE} the rest",
            )
        beyond = range(len(trained.optimizers), len(self._stepping))
        match.unexpected += [f"state of optimizer {position}" for position in beyond]
        match.unexpected += [f"state of {name!r}" for name in state.objects if name not in self._objects]
        own = extra_state(named_state(trained.model, trained.excluded)).keys()
        fits = trained.excluded.fits
        self._extra = {name: value for name, value in state.extra_state.items() if not fits(name)}
        missing, unexpected = sorted(own - self._extra.keys()), sorted(self._extra.keys() - own)
        match.absent += missing
        if match.not_taken(missing + unexpected):
            match.lacks(
                missing,
                f"extra state of the model ({sorted(own)}) is not that of the checkpoint ({sorted(self._extra)}); give "
                f"the model that was saved, or {IGNORE} the rest",
            )
            match.unexpected += unexpected
            self._extra = {}

    @torch.inference_mode(False)
    def run(
        self,
        rng: bool,
        transfer: Transfer,
        on_rows: Callable[[list[ExpectedSlots]], object] = list,
        learn: Learn | None = None,
    ) -> tuple[Restored, dict[str, Bitmap]]:
        """Read everything into place.

        `on_rows` is called once all rows are read, before code of the caller that may change them.
        `learn` gives what is noted of arrays as they are read, which `learned` has then.

        Returns: What was restored, and by path of each array that is now what the version holds, packed, the rows that
        changed since its whole version.
        """
        changed, salvaged = self._read_rows(transfer, learn)
        on_rows([(fit.optimizer, fit.expected_slots()) for fit in self._fits])
        self._read_modules(transfer)
        for fit in self._fits:
            if fit.settings or "whole" not in fit.tree:  # of which no part is loaded
                self._load_optimizer(fit)
            self._trained.slot_names.follow(fit.optimizer, fit.tree["slots"])
        for table, sharded in self._trained.fused_tables:
            if table.parameter_name in self._settings:
                sharded.assign_settings(self._settings[table.parameter_name])
        self._trained.purge_caches()
        if self._match.selection.everything:
            for name, value in self._objects.items():
                if name in self._state.objects:
                    with accepted(self._match.where, f"load_state_dict of {name!r}"):
                        value.load_state_dict(self._state.objects[name])
            if rng:
                self._load_rng()
        info, match = self._info, self._match
        restored = Restored(
            info,
            info.step,
            self._state.reader,
            info.metadata,
            missing=tuple(match.missing),
            unexpected=tuple(match.unexpected),
            grown=match.grown,
            cast=match.cast,
            salvaged=salvaged,
            readers=self._state.readers,
        )
        return restored, changed

    def _read_rows(
        self, transfer: Transfer, learn: Learn | None
    ) -> tuple[dict[str, Bitmap], dict[str, SalvagedRows]]:
        """Fill the rows; what changed since its whole version by path, what was salvaged by table and slot."""
        targets: list[Target] = [(fit.table.path, fit, fit.table.parts) for fit in self._match.tables]
        targets += [target for each in self._fits for target in each.targets()]
        targets += self._fused
        fills: list[Fill] = []
        exact: dict[str, Fill] = {}
        for path, fit, parts in targets:
            reader = (SalvageReader if self._salvage else ArrayReader)(self._catalog, self._record, path)
            fills.append(fill := Fill(reader, parts, fit.ids))
            if fit.exact:
                exact[path] = fill
                if learn is not None and not self._salvage:
                    configs = [link.entry.codec for link in reader.links]
                    fill.learned = learn(path, fit.table, reader.columns, configs)
        fill_all(fills, transfer)
        salvagers = [each.reader for each in fills if isinstance(each.reader, SalvageReader)]
        self._exact = exact.keys()
        self.learned = {path: each.learned for path, each in exact.items() if each.learned is not None}
        self.is_damaged = any(reader.damage is not None for reader in salvagers)
        changed = {path: rows.changed() for path, rows in exact.items()}
        return changed, {key: rows for key, rows in salvaged_by_label(salvagers).items() if rows is not None}

    def explain_changes(self, tracker: Tracker) -> None:
        """Flag the rows that code of the caller has changed since `run` read them, where torch counts changes."""
        for table in (fit.table for fit in self._match.tables):
            if table.path in self._exact and not self._salvage:  # others are saved whole
                find = partial(differing_rows, self._catalog, self._record, table)
                tracker.named(table.name).explain_changes(find)

    def _read_modules(self, transfer: Transfer) -> None:
        """Read all that is no table into place, or give it to the modules that take it in a way of their own."""
        match, trained, loaders = self._match, self._trained, self._loaders
        tensors, names = match.tensors, [*match.tensors, *match.handed]
        entries, values = named_state(trained.model, trained.excluded), dict(self._extra)
        own = {*remade_names(tensors, dense_items(trained.model, trained.tables, entries))}
        own |= {name for name in entries if loaders.may_take(name) and not is_dtensor(tensors.get(name))}

        def read(name: str) -> tuple[AnyArray, str | None]:
            return read_dense(self._catalog, self._record, dense_path("model", name))

        for name, (array, torch_dtype) in zip(names, transfer.map(read, names), strict=True):
            tensor = tensors.get(name)
            if tensor is None or name in own:
                values[name] = dense_tensor(array, torch_dtype)
            elif is_dtensor(tensor):
                copy_whole(dense_tensor(array, torch_dtype), tensor, repr(name))
            else:
                assign_dense(tensor, array, torch_dtype)
        if values or loaders.act:
            match.versions = self._state.module_versions
            load = ModuleLoad(trained.model, trained.tables, match, values)
            taken = {*names, *match.absent, *trained.excluded.tables}
            whole = {fit.table.name for fit in match.tables if fit.ids is None}
            kept = {table.name for table in trained.tables} - whole if not match.selection.everything else ()
            with unchanged(trained.model, trained.tables, trained.excluded, taken):
                load.run(kept)

    def _load_optimizer(self, fit: OptimizerFit) -> None:
        optimizer, tables, cast = fit.optimizer, self._trained.tables, self._match.cast
        owned = [one for group in optimizer.param_groups for one in group["params"] if one in optimizer.state]
        kept = {one: optimizer.state[one] for one in owned if self._names.get(id(one)) not in fit.loaded}
        converted = {table.table.parameter_name for table in fit.fits.values() if table.table.name in cast}
        tree, slots = fit.merged(self._names, tables)
        tree |= {"state": spread_state(tree["state"], optimizer, self._names)}
        with accepted(self._match.where, f"{type(optimizer).__name__}.load_state_dict"):
            load_optimizer(optimizer, self._names, tables, tree, slots, {*converted, *cast})
        optimizer.state.update(kept)  # what was not chosen has gone through foreign code, too, and stays

    def _load_rng(self) -> None:
        """Give the random number generators the state that this rank saved, or one that no other rank has."""
        state, group = self._state, self._group
        if state.rng is not None:
            set_rng_state(state.rng)
        elif state.rng_ranks:
            seed_rng(f"{self._record.id}\n{group.rank}")
            if group.rank == 0:
                log.warning(
                    "%s was saved by another number of ranks (%d, and there are %d now), so the random number "
                    "generators do not continue: those of each rank are seeded anew, by the version and the rank",
                    *(self._match.where, state.rng_ranks, group.world),
                )

    def trusted(self, lineage: Lineage) -> Lineage:
        """The part of the version's lineage that deltas may depend on, once `run` has ended.

        After a whole load all of it, else the arrays that are now as they are stored.
        """
        if self._match.selection.whole:
            return lineage
        return replace(
            lineage, lines={path: line for path, line in lineage.lines.items() if path in self._exact}
        )


class Fill:
    """Memory to fill with rows that `reader` reads in pieces: all that both have, or some of them; other rows stay.

    The memory may have other rows than the array, and another element type.

    `parts`: the memory: some columns each, of the same rows.
    `ids`: the rows to take; None for all.

    `learned`: what is noted of the rows as they are read.
    """

    def __init__(self, reader: ArrayReader, parts: Sequence[LocalPiece], ids: Ids | None = None) -> None:
        self.reader, self.parts = reader, parts
        self.first_row, rows = (parts[0].first_row, len(parts[0].tensor)) if parts else (0, 0)
        self._wanted = None if ids is None else np.zeros(rows, np.uint8)
        if self._wanted is not None and ids is not None:
            held = ids - self.first_row
            self._wanted[held[(held >= 0) & (held < rows)]] = 1
        self._changed = np.zeros(rows, bool)
        self._memory: AnyArray | None = None  # that of the one part, if it can be read into as it is
        self._there: DeviceRows | None = None  # the one part, if its device decodes the rows
        self.learned: Known | None = None
        if ids is None and len(parts) == 1 and parts[0].columns == reader.columns:
            tensor = parts[0].tensor
            memory = rows_view(tensor)
            self._memory = memory if memory is not None and memory.dtype == reader.dtype else None
            if not isinstance(reader, SalvageReader) and dtype_name(tensor.dtype) == reader.element:
                there = rows_there(tensor, [link.entry.codec for link in reader.links])
                self._there = None if there is None else DeviceRows(there)

    def fill(self, first: int, rows: int) -> None:
        """Fill `rows` rows from row `first` of the array on; the memory has them."""
        place = slice(first - self.first_row, first - self.first_row + rows)
        if self._there is not None and self._fill_there(first, place):
            self.learned = None  # the rows are not here
            return
        self._there = None  # what its device can't decode, the host does
        wanted = None if self._wanted is None else self._wanted[place]
        if wanted is not None and not wanted.any():
            return
        if self._memory is None:
            out: AnyArray = np.empty((rows, self.reader.columns), self.reader.dtype)
        else:
            out = self._memory[place]
        learned, strays = self.learned, None
        if learned is not None and learned.grid is not None:
            strays = Strays(learned.grid, np.zeros(rows, np.uint8))
        changed = self._changed[place] = self.reader.read(first, out, wanted, strays=strays)
        if learned is not None:
            learned.read(
                out, place.start, self.reader.element, changed, None if strays is None else strays.rows
            )
        if self._memory is None:
            offsets = np.arange(rows) if wanted is None else np.flatnonzero(wanted)
            chosen = out if wanted is None else out[offsets]
            for part in self.parts:
                values = _columns(part, chosen)
                if part.tensor.dtype is torch.bfloat16:
                    values = values.astype(np.float32, copy=False)  # the array type of bfloat16
                assign_ids(part.tensor, place.start + offsets, values)

    def _fill_there(self, first: int, place: slice) -> bool:
        there, tensor = self._there, self.parts[0].tensor
        try:
            segments, self._changed[place] = self.reader.take(
                first, np.ones(place.stop - place.start, np.uint8)
            )
        except FormatError:  # chunks split columns; of anything else the host's way tells
            return False
        try:
            with overwriting(tensor):
                return there is not None and there.write(segments, place.start)
        except RuntimeError as error:
            # Whatever it was, memory that was short among others: if the device is lost, the host's way says so.
            if self._there is not None:  # no other thread has said so
                log.warning(
                    "%s: its rows could not be decoded on %s (%s: %s), so the host does",
                    *(self.reader.path, tensor.device, type(error).__name__, error),
                )
            return False

    def changed(self) -> Bitmap:
        """Packed: the rows, of those read, that some delta holds."""
        return np.packbits(self._changed, bitorder="little")


def _columns(part: LocalPiece, values: AnyArray) -> AnyArray:
    """What a part takes of rows of the whole array, (n, columns), in its own shape."""
    taken = values[:, part.first_column : part.first_column + part.columns]
    return taken.reshape(len(values), *part.tensor.shape[1:])


def fill_all(fills: Sequence[Fill], transfer: Transfer) -> None:
    """Fill all memory. Small tables are read beside each other, large ones in pieces."""
    pieces = ((fill, region) for fill in fills for region in held_regions(fill.reader, fill.parts))
    try:
        for _ in transfer.map(lambda piece: piece[0].fill(*piece[1]), pieces):
            pass
    finally:
        # A read that fails half way has changed rows, too.
        for fill in fills:
            for part in fill.parts:
                note_change(part.tensor)


def held_regions(reader: ArrayReader, parts: Sequence[LocalPiece]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the pieces to read: those of the array, as far as the memory has their rows."""
    for part in parts[:1]:
        for first, rows in reader.regions():
            begin, stop = max(first, part.first_row), min(first + rows, part.first_row + len(part.tensor))
            if begin < stop:
                yield begin, stop - begin


def differing_rows(catalog: Catalog, record: Record, table: Table) -> torch.Tensor | None:
    """The rows of a table that are not as stored: ``(n,)`` int64 from the first held. None if they can't be read."""
    differs = np.zeros(table.local_rows, bool)
    try:
        reader = ArrayReader(catalog, record, table.path)
        for first, rows in held_regions(reader, table.parts):
            stored = np.empty((rows, reader.columns), reader.dtype)
            reader.read(first, stored)
            place = slice(first - table.first_row, first - table.first_row + rows)
            for part in table.parts:
                own = np.empty((rows, *part.tensor.shape[1:]), stored.dtype)
                copy_rows(part.tensor, place, own)
                expected = np.ascontiguousarray(_columns(part, stored))
                differs[place] |= (own.view(np.uint8) != expected.view(np.uint8)).any(axis=1)
    except (BackendError, CorruptionError):  # as upkeep may have removed what was read
        return None
    return torch.from_numpy(np.flatnonzero(differs))
