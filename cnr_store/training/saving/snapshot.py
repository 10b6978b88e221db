"""Copies the state of training, and the rows that a version needs, into plain data, which a thread can write."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from cnr_codecs import RowCodec
from cnr_store.format.grid import Counts
from cnr_store.format.layout import dense_path, is_shared
from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import ArrayLeaf
from cnr_store.policies.past import Since
from cnr_store.policies.policy import Decision
from cnr_store.training.devices.encode import RowsFromDevice
from cnr_store.training.devices.staging import encode_staged
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.model.dense_state import dense_items, extra_state, module_versions, named_state
from cnr_store.training.model.names import parameter_names
from cnr_store.training.model.object_state import (
    SpreadLeaf,
    encode_metadata,
    spread_leaf,
    tensor_leaf,
    with_leaves,
)
from cnr_store.training.model.optimizer_state import FUSED
from cnr_store.training.model.rng_state import rng_state
from cnr_store.training.model.row_arrays import RowArray, checked
from cnr_store.training.model.tensors import AnyArray, array_dtype, dense_numpy
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.codec_choice import CodecChoice, takes_changing_rows
from cnr_store.training.saving.pending_save import PendingSave
from cnr_store.training.saving.tally import Bitmaps, Changed, RowSets, Tally
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, is_compiled, rows_of
from cnr_store.training.tracking.small_tables import SmallTables
from cnr_store.writing.exchange import is_sent_encoded
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.plan import DenseWrite, RowsWrite
from cnr_store.writing.row_codes import LEAST_DIGESTED_BYTES, CodeCache, gridded_codec
from cnr_store.writing.scales import ScaleSample
from cnr_store.writing.steps import finds_step

_SAVES_BEFORE_SHRINKING = 4
_WORD_BYTES, _LINE_BYTES = 4, 64


class StagedRows:
    """Rows copied at the moment of the save."""

    def __init__(self, values: AnyArray) -> None:
        # The columns are computed because reshape can't infer a -1 for an array of no rows.
        self._values = values.reshape(len(values), math.prod(values.shape[1:]))

    def block(self, begin: int, end: int) -> AnyArray:
        return self._values[begin:end]

    def some(self, begin: int, end: int) -> StagedRows:
        """Those at these positions."""
        return StagedRows(self._values[begin:end])


@dataclass(frozen=True)
class StagedTogether:
    """Rows of small tables, copied at the moment of the save: of each array those between two places in `buffer`."""

    tables: SmallTables
    buffer: AnyArray
    begins: Sequence[int]
    ends: Sequence[int]

    def of(self, array: RowArray) -> StagedRows:
        """Those of an array of these tables."""
        at = self.tables.positions[array.path]
        values = self.buffer[self.begins[at] : self.ends[at]].view(array_dtype(array.dtype))
        return StagedRows(values.reshape(-1, array.local_columns))


@dataclass(frozen=True)
class LiveRows:
    """Rows still in the model, which training must not change until they are encoded or the save is interrupted.

    `ids` count from the first row that this process holds. With `in_place`, whole arrays are not copied if their memory
    will do. `PendingSave.end_reading` tells whether training may have changed them meanwhile.
    """

    array: RowArray
    ids: AnyArray | None
    pending: PendingSave
    in_place: bool

    def block(self, begin: int, end: int) -> AnyArray:
        self.pending.check_uninterrupted()
        if self.in_place and self.ids is None and self.array.memory is not None:
            return self.array.memory[begin:end]
        return self.array.rows(slice(begin, end) if self.ids is None else self.ids[begin:end])


class Staging:
    """Host memory for the rows of a snapshot. Each save uses it again: fresh memory costs several times a copy.

    It lies in one piece, in which arrays follow one another: so a delta that is larger than the last one needs fresh
    memory for the difference alone. What no save has used yet takes no room, as the system gives memory page by page.

    At most `limit_bytes` are held. Rows beyond them stay in the model, as `LiveRows`. Memory of which several saves in
    a row used less than half is given back. `left_bytes` are those of the rows that this snapshot left there.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.left_bytes = 0
        self._memory: AnyArray = np.empty(0, np.uint8)
        self._end = self._most_end = 0  # of what this snapshot uses, and of what any did
        self._is_outgrown = False
        self._ends = deque[int]([0], maxlen=_SAVES_BEFORE_SHRINKING)
        self._used_bytes = 0  # with what devices encoded

    def reset(self, arrays: Collection[RowArray]) -> None:
        """Start a snapshot of these arrays, which may overwrite the rows of the last one."""
        self._ends.append(self._end)
        is_idle = len(self._ends) == self._ends.maxlen and 2 * max(self._ends) < self._most_end
        if is_idle or self._is_outgrown:
            self.clear()
        self._end = self._used_bytes = self.left_bytes = 0
        if not self._memory.size:
            nbytes = sum(array.local_rows * array.row_bytes for array in arrays)
            self._memory = np.empty(min(nbytes, self.limit_bytes) + len(arrays) * _LINE_BYTES, np.uint8)

    def clear(self) -> None:
        """Give all memory back."""
        self._memory, self._most_end, self._is_outgrown = np.empty(0, np.uint8), 0, False

    def stage(
        self,
        array: RowArray,
        ids: AnyArray | None,
        pending: PendingSave,
        *,
        in_place: bool,
        codec: RowCodec | None = None,
    ) -> StagedRows | LiveRows | RowsFromDevice:
        """Copy the rows `ids` (None for all) of those that this process holds, or leave them in the model.

        `ids` count from the first row held. They stay in the model if there is no room. With `codec`, a device that
        has the array in one piece encodes them, unless some values are dropped.
        """
        if len(array.parts) == 1:
            room, tensor = self.limit_bytes - self._used_bytes, array.parts[0].tensor
            encoded = encode_staged(array.path, codec, tensor, ids, room)
            if encoded is not None:
                self._used_bytes += encoded.nbytes
                return encoded
        rows, dtype = array.local_rows if ids is None else len(ids), array_dtype(array.dtype)
        nbytes = rows * array.local_columns * dtype.itemsize
        if self._used_bytes + nbytes > self.limit_bytes:
            self.left_bytes += nbytes
            return LiveRows(array, ids, pending, in_place)
        out = self._take(nbytes).view(dtype).reshape(rows, array.local_columns)
        array.copy_rows(slice(None) if ids is None else ids, out)
        return StagedRows(out)

    def stage_together(self, tables: SmallTables, ids: RowIds, edges: RowIds) -> StagedTogether | None:
        """Copy rows of small tables: none if there is no room for all, or no kernel is compiled.

        `ids`, `edges`: as in `SmallTables.copy`.
        """
        counts = np.diff(edges)[tables.of_arrays]
        ends = np.cumsum(counts * tables.words * _WORD_BYTES)
        nbytes = int(ends[-1]) if ends.size else 0
        fits = self._used_bytes + nbytes <= self.limit_bytes
        if not (fits and is_compiled()):
            return None
        buffer = self._take(nbytes)
        begins = ends - counts * tables.words * _WORD_BYTES
        tables.copy(ids, edges, buffer.ctypes.data + begins)
        return StagedTogether(tables, buffer, begins.tolist(), ends.tolist())

    def _take(self, nbytes: int) -> AnyArray:
        self._used_bytes += nbytes
        if self._end + nbytes > len(self._memory):  # there are more arrays than at first, or tables grew
            self._is_outgrown = True
            return np.empty(nbytes, np.uint8)
        begin, self._end = self._end, self._end + nbytes + -nbytes % _LINE_BYTES
        self._most_end = max(self._most_end, self._end)
        return self._memory[begin : begin + nbytes]


@dataclass
class Snapshot:
    """The state of training at one moment."""

    # What is stored by rows, still live: the planner copies the rows that a version needs
    arrays: Sequence[RowArray]
    dense: list[DenseWrite]  # dense, state, metadata: copies of everything else
    state: Any
    metadata: Any
    # Of many ranks, by its number, what this one alone has: its reader, and its random number generators. Its dense
    # arrays are `own_dense`.
    parts: Mapping[int, Any] = field(default_factory=dict)
    own_dense: list[DenseWrite] = field(default_factory=list)
    parameters: frozenset[str] = frozenset()  # paths of the model's parameters among `dense`
    # Per table, packed: the rows that may have changed since the last save. The tracker fills it.
    dirty: Bitmaps = field(default_factory=dict)
    # By path of arrays of tables whose changed rows hooks don't know: the rows that differ from what is stored
    compared: Bitmaps = field(default_factory=dict)
    # Tables whose changed rows hooks don't know, and why
    unsafe: Mapping[str, str] = field(default_factory=dict)
    # On the first rank, the digests of the `parts` of all ranks, in rank order
    part_digests: Sequence[str] = ()
    dense_bytes: int = 0  # `own_shared_bytes` of the first rank, by which all ranks decide alike
    # The tables among `arrays` whose rows are found and copied together
    small: SmallTables = field(default_factory=lambda: SmallTables.among([]))
    # From when the save is begun on all ranks: what the caller has of it; whether it is to hold everything; and the
    # rows that changed
    pending: PendingSave = field(init=False)
    full: bool = False
    sets: RowSets = field(init=False)

    @property
    def own_shared_bytes(self) -> int:
        """Bytes of the dense arrays that any number of ranks stores once. Objects may take others on each rank."""
        return sum(write.values.nbytes for write in self.dense if is_shared(write.path))

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of all tables; and bytes of everything as it is in memory, which is what a full copy takes."""
        rows = sum({array.table.name: array.table.rows for array in self.arrays}.values())
        nbytes = sum(array.nbytes for array in self.arrays) + sum(write.values.nbytes for write in self.dense)
        return rows, nbytes


def take_snapshot(
    trained: TrainedModel,
    objects: Mapping[str, Any],
    reader: Any,
    metadata: Any,
    rng: bool,
    rank: int | None = None,
) -> Snapshot:
    """Copy dense tensors, optimizer state, RNG, reader and the state of registered objects.

    `objects`, `reader`: their states, from `state_of`.
    `rank`: this process's number, of many: each has a reader and generators of its own.
    """
    doc, names = encode_metadata(metadata), parameter_names(trained.model)
    # Hooks of state dicts, which may change the model, run before anything is copied.
    trees = trained.optimizer_trees(names)
    for tree in trees:
        tree["state"] = {name: kept for name, kept in tree["state"].items() if not trained.excluded.has(name)}
    entries = named_state(trained.model, trained.excluded)
    extra = extra_state(entries)
    dense = _copy_dense(list(dense_items(trained.model, trained.tables, entries)))
    own = {"reader": reader, "rng": rng_state() if rng else None}
    shared = {
        "reader": None,
        "objects": objects,
        "optimizers": [
            with_leaves(tree, each, names) for tree, each in zip(trees, trained.optimizers, strict=True)
        ],
        "extra_state": extra,
        "module_versions": module_versions(trained.model),
        "rng": None,
    }
    if rank is None:
        return Snapshot(trained.row_arrays(), dense, _encode(shared | own, dense), doc)
    own_dense: list[DenseWrite] = []
    part = _encode(own, own_dense, f"ranks.{rank:06d}.")
    parameters = frozenset(dense_path("model", name) for name in names.values())
    return Snapshot(
        trained.row_arrays(), dense, _encode(shared, dense), doc, {rank: part}, own_dense, parameters
    )


def add_fused(snapshot: Snapshot, trained: TrainedModel, settings: Mapping[str, Mapping[str, float]]) -> None:
    """Add the state that TorchRec's optimizers have beside rows, where they stood among those given.

    `settings`: by table: what its optimizer has on some rank that holds rows of it.
    """
    tables = trained.fused_tables
    tree = {
        "class": FUSED,
        "param_groups": [
            {**settings.get(table.name, {}), "params": [table.parameter_name]} for table, _ in tables
        ],
        "state": {},
        "slots": {table.name: sorted(sharded.slots) for table, sharded in tables if sharded.slots},
        "other": {},
    }
    snapshot.state["optimizers"].insert(trained.fused_position, _encode(tree, snapshot.dense))


def _encode(tree: Mapping[str, Any], dense: list[DenseWrite], prefix: str = "") -> Any:
    """A tree as tagged JSON. Its large arrays are appended to `dense`, under paths that begin with `prefix`."""
    used = {write.path for write in dense}

    def beside(path: str, leaf: ArrayLeaf) -> str:
        parts = [part.strip("'\"") for part in path.strip("[]").split("][")]
        place = dense_path("optim" if parts[0] == "optimizers" else "state", prefix + ".".join(parts))
        while place in used:
            place += "~"  # no encoded name holds one
        used.add(place)
        pieces = leaf.pieces if isinstance(leaf, SpreadLeaf) else None
        dense.append(DenseWrite(place, leaf.values, leaf.torch_dtype, is_own=bool(prefix), pieces=pieces))
        return place

    return encode_state(dict(tree), beside=beside, as_leaf=tensor_leaf)


def _copy_dense(entries: Sequence[tuple[str, str, torch.Tensor]]) -> list[DenseWrite]:
    """Copies of the model's own dense tensors, from `dense_items`; tied ones once, with their other names."""
    tied = [(name, owner) for name, owner, _ in entries if name != owner]
    written = []
    for name, owner, tensor in entries:
        if name != owner:
            continue
        path, aliases = dense_path("model", name), tuple(alias for alias, of in tied if of == name)
        if is_dtensor(tensor):
            leaf = spread_leaf(tensor, repr(name))
            written.append(
                DenseWrite(path, leaf.values, leaf.torch_dtype, aliases=aliases, pieces=leaf.pieces)
            )
        else:
            written.append(DenseWrite(path, *dense_numpy(tensor), aliases=aliases))
    return written


class Copies:
    """Copies rows, one snapshot at a time.

    `compares_all`: whether later saves compare all tables, also those of which hooks tell the changed rows.
    `keeps`: what later deltas depend on: the last version, or the whole one of each array; None if none comes.
    """

    def __init__(
        self,
        staging: Staging,
        code_cache: CodeCache,
        codecs: CodecChoice,
        tally: Tally,
        keeps: Since | None,
        *,
        compares_all: bool,
    ) -> None:
        self.staging, self._compares_all = staging, compares_all
        self._code_cache, self._codecs, self._tally, self._keeps = code_cache, codecs, tally, keeps
        self.samples: dict[tuple[str, int, int, range], ScaleSample] = {}  # by path and what this rank has

    def rows(
        self,
        decision: Decision,
        snapshot: Snapshot,
        lines: Mapping[str, ArrayLine],
        changed: Changed,
        whole: Collection[str],
    ) -> Callable[[], list[RowsWrite]]:
        """The rows to write of each array; they are copied now, as far as they fit.

        `changed`: how many rows changed.
        `lines`: of the version that this one continues.
        `whole`: paths of the arrays to write whole.
        """
        self.staging.reset(snapshot.arrays)
        ids, staged = self._together(decision, snapshot, whole)
        copied = {path for path in ids if path in lines} if staged is not None else set()
        listed: dict[int, RowIds] = {}  # arrays of a table share their sets
        # An array of which all rows are written takes no row numbers, of 8 bytes each.
        is_alone = self._tally.world == 1
        every = {
            array.path
            for array in snapshot.arrays
            if array.path in whole
            or (is_alone and changed.rows(decision.since, array.path) == array.shape[0])
        }
        for array in snapshot.arrays:
            if array.path not in every and array.path not in ids:
                changes = snapshot.sets.of(array, decision.since)
                if id(changes) not in listed:
                    listed[id(changes)] = rows_of(changes, array.table.local_rows)
                ids[array.path] = listed[id(changes)]
        arrays = checked(snapshot.arrays)

        def write(array: RowArray) -> RowsWrite:
            path = array.path
            rows = staged.of(array) if staged and path in copied else None
            line = None if path in whole else lines.get(path)
            counts = None if line is None else changed.counts[decision.since][path]
            return self._write(snapshot, array, line, decision, ids.get(path), counts, rows)

        # Nothing that training may change is read any more of those that were copied together.
        later = copied if is_alone else set()
        now = {array.path: write(array) for array in arrays if array.path not in later}
        return lambda: [now.get(array.path) or write(array) for array in arrays]

    def _together(
        self, decision: Decision, snapshot: Snapshot, whole: Collection[str]
    ) -> tuple[dict[str, RowIds], StagedTogether | None]:
        """The rows to write of arrays of small tables, by path, and copies of them.

        Tables whose arrays differ in what changed are left out.
        """
        small, flags = snapshot.small, dict[str, Bitmap]()
        changes = {
            array.path: snapshot.sets.of(array, decision.since)
            for array in small.arrays
            if array.path not in whole
        }
        alike: dict[str, set[int]] = {}
        for array in small.arrays:
            alike.setdefault(array.table.name, set()).add(id(changes.get(array.path)))
        for array in small.arrays:
            bits = changes.get(array.path)
            if bits is not None and len(alike[array.table.name]) == 1:
                flags[array.table.name] = bits
        for name in small.names:
            flags.setdefault(name, np.zeros_like(snapshot.dirty[name]))
        numbers, edges = small.listed(small.joined(flags))
        own = small.local(numbers, edges)
        places = dict(zip(small.names, pairwise(edges.tolist()), strict=True))
        ids = {
            array.path: own[slice(*places[array.table.name])]
            for array in small.arrays
            if array.path in changes and len(alike[array.table.name]) == 1
        }
        return ids, self.staging.stage_together(small, own, edges)

    def _write(
        self,
        snapshot: Snapshot,
        array: RowArray,
        line: ArrayLine | None,
        decision: Decision,
        ids: RowIds | None,
        counts: Counts | None,
        copied: StagedRows | None,
    ) -> RowsWrite:
        table = array.table
        written = None if line is None else ids
        base = None if line is None else line.base(decision.since)
        wanted = self._codecs.of(array)
        codec = self._codecs.over(array, line)
        held = self._tally.held(array, counts)
        first_row, rows = (0, array.shape[0]) if held is None else (held.first_row, held.rows)
        if held is not None:  # replicas of the other rows are written by other ranks
            start = first_row - table.first_row
            array = array.narrowed(slice(start, start + rows))
            if written is not None:
                begin, end = np.searchsorted(written, [start, start + rows]).tolist()
                written, copied = written[begin:end] - start, copied and copied.some(begin, end)
        codes = sample = None
        if self._keeps is not None and finds_step(wanted):
            key = array.path, array.shape[0], array.local_columns, range(first_row, first_row + rows)
            sample = self.samples.get(key) or self.samples.setdefault(key, ScaleSample(*key[1:]))
        if not self._tally.is_cut(array):
            codes = self._code_cache.for_write(
                *(array.path, codec, base, written, first_row),
                (rows, (*array.shape, 1)[1]),
                is_kept=self._keeps == "previous" or (self._keeps == "baseline" and base is None),
                is_compared=(self._compares_all or table.name in snapshot.unsafe)
                and (array.row_bytes >= LEAST_DIGESTED_BYTES or gridded_codec(codec) is not None),
            )
        own = codec if is_sent_encoded(held, codec) else None
        in_place = takes_changing_rows(codec)
        source = copied or self.staging.stage(array, written, snapshot.pending, in_place=in_place, codec=own)
        return RowsWrite(
            path=array.path,
            shape=array.shape,
            element=array.element,
            base=base,
            ids=None if written is None else written + first_row,
            source=source,
            codec=source.codec if isinstance(source, RowsFromDevice) else codec,
            aliases=table.tied_names if array.is_weight else (),
            boundaries=(*array.boundaries, table.dim) if array.boundaries else (),
            held=held,
            is_live=isinstance(source, LiveRows),
            codes=codes,
            sample=sample,
        )
