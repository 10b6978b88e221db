"""Decides what of each array of rows a version gets, and takes the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cnr_codecs import RowCodec
from cnr_store.errors import UnsupportedModelError
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import weight_path
from cnr_store.format.record import Record
from cnr_store.policies.policy import Costs, Decision, Offer, PolicyName, decide
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.pending_save import LeasedRows, PendingSave
from cnr_store.training.saving.snapshot import LiveRows, Staging
from cnr_store.training.tracking.bitmap import Bitmap, count, rows_of
from cnr_store.writing.lineage import Lineage
from cnr_store.writing.plan import RowsWrite

Bitmaps = dict[str, Bitmap]
Ids = np.ndarray[Any, np.dtype[np.int64]]
_FAIR_SHARE = 1 / 8
"""Of all tables' bytes: below it, tables whose rows all changed are no reason to keep a version."""


class Planner:
    """Plans the rows of the next version: which go whole, which as a delta, over which base.

    Attributes
    ----------
    lineage
        The committed version that the next one continues.
    since_whole
        Per table, packed: the rows that changed since its whole version was saved.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        aliases: Mapping[str, tuple[str, ...]],
        codecs: CodecChoice,
        staging: Staging,
    ) -> None:
        # One attribute, so that an interrupt never leaves a lineage beside the rows of another.
        self._past: tuple[Lineage, Bitmaps] = Lineage(), {}
        self._tables = tables
        self._aliases = aliases
        self._codecs = codecs
        self._staging = staging

    @property
    def lineage(self) -> Lineage:
        return self._past[0]

    @property
    def since_whole(self) -> Bitmaps:
        return self._past[1]

    def forget(self) -> None:
        """Lean on nothing: the next version is whole. It still continues the last one, with its restores."""
        self.go_on_from(self.lineage.alone(), {})

    def go_on_from(self, lineage: Lineage, since_whole: Bitmaps) -> None:
        """Continue a version that was loaded."""
        self._past = lineage, since_whole

    def committed(self, record: Record, dirty: Bitmaps) -> None:
        """A version with these dirty rows was committed; told twice, it is taken into account once."""
        if record.id == self.lineage.version:
            return
        lineage, since_whole = self.lineage.after(record), {}
        for table in self._tables:
            line = lineage.lines[weight_path(table.name)]
            flagged = dirty[table.name]
            is_whole = line.links == (record.id,)
            since_whole[table.name] = (
                np.zeros_like(flagged) if is_whole else self.since_whole[table.name] | flagged
            )
        self.go_on_from(lineage, since_whole)

    def folded(self, version: str) -> None:
        """A version that the lineage goes back to was folded, so that later ones may lean on it alone."""
        since_whole = self.since_whole
        if version == self.lineage.version:
            since_whole = {name: np.zeros_like(rows) for name, rows in since_whole.items()}
        self.go_on_from(self.lineage.folded(version), since_whole)

    def warn_unknown_slots(self, find: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """Log widths for state that there is none of: see `StateWidths.unknown_slots`."""
        self._codecs.warn_unknown_slots(find)

    def decide(
        self,
        policy: PolicyName,
        costs: Costs,
        arrays: Sequence[RowArray],
        dirty: Bitmaps,
        unsafe: Collection[str],
        *,
        full: bool = False,
        beside_bytes: int = 0,
    ) -> Decision:
        """What the next version is to be.

        Parameters
        ----------
        dirty, unsafe
            As for `rows`.
        beside_bytes
            What the version holds beside its rows.
        """
        past = self.lineage
        bits = self._codecs.after_restores(past.restores)
        weighs = policy == "auto" and past.sizes_bytes and not full
        offer = self._offer(arrays, dirty, unsafe, beside_bytes) if weighs else None
        decision = decide(policy, past.sizes_bytes, full=full, deltas=past.deltas, offer=offer, costs=costs)
        return replace(decision, bits=bits)

    def _offer(
        self, arrays: Sequence[RowArray], dirty: Bitmaps, unsafe: Collection[str], beside_bytes: int
    ) -> Offer:
        whole = {array.table.name for array in arrays if not self._continues(array)} | set(unsafe)
        since_baseline = since_previous = float(beside_bytes)
        for array in arrays:
            table = array.table
            changed, before = dirty[table.name], self.since_whole.get(table.name)
            rows = (table.rows, table.rows)
            if table.name not in whole and before is not None and before.shape == changed.shape:
                rows = count(changed | before), count(changed)
            row_bytes = self._codec(array).bytes_per_row((*array.shape, 1)[1], array.element)
            since_baseline += row_bytes * rows[0]
            since_previous += row_bytes * rows[1]
        return Offer(round(since_baseline), round(since_previous))

    def rows(
        self,
        decision: Decision,
        arrays: Sequence[RowArray],
        dirty: Bitmaps,
        unsafe: Collection[str],
        pending: PendingSave,
    ) -> list[RowsWrite]:
        """What to write of each array, staged where there is room.

        Parameters
        ----------
        dirty
            Packed bitmap per table of the rows that may have changed since the last save.
        unsafe
            Tables whose changed rows are not known.

        Raises
        ------
        UnsupportedModelError
            A row is too wide to be a chunk.
        """
        self._staging.begin()
        ids = {table.name: self._changed_ids(table, decision, dirty[table.name]) for table in self._tables}
        whole = {table.name for table in self._tables} if decision.full else self._worth_whole(decision, ids)
        whole |= {array.table.name for array in arrays if not self._continues(array)}
        whole |= set(unsafe)
        writes = [self._write(array, decision, whole, ids[array.table.name], pending) for array in arrays]
        # What is still in the model comes first, so that training waits no longer than it must.
        return sorted(writes, key=lambda write: not isinstance(write.source, LeasedRows))

    def _write(
        self, array: RowArray, decision: Decision, whole: set[str], ids: Ids, pending: PendingSave
    ) -> RowsWrite:
        table, line = array.table, self.lineage.lines.get(array.path)
        if array.row_bytes > MAX_CHUNK_DECODED_BYTES:
            raise UnsupportedModelError(
                f"{array.path}: a row takes {array.row_bytes} bytes, and at most {MAX_CHUNK_DECODED_BYTES} can be "
                "stored by rows; split the table's columns"
            )
        is_delta = line is not None and table.name not in whole
        written = ids if is_delta else None
        is_weight = array.tensor is table.parameter
        source = self._staging.take(array, written)
        return RowsWrite(
            path=array.path,
            shape=array.shape,
            element=array.element,
            base=line.base(decision.since) if line is not None and is_delta else None,
            ids=written,
            source=LeasedRows(source, pending) if isinstance(source, LiveRows) else source,
            codec=self._codec(array),
            aliases=self._aliases[table.name] if is_weight else (),
        )

    def _codec(self, array: RowArray) -> RowCodec:
        table, nbytes = array.table, array.table.rows * array.row_bytes
        if array.tensor is table.parameter:
            return self._codecs.of(table.name, nbytes)
        return self._codecs.of_state(table.name, array.slot, nbytes, array.element)

    def _continues(self, array: RowArray) -> bool:
        """Whether a delta of this array's table can lean on what is stored.

        State that an optimizer has just made is written whole beside a delta; a weight never is.
        """
        line = self.lineage.lines.get(array.path)
        if line is None:
            return array.tensor is not array.table.parameter
        return (line.shape, line.element) == (array.shape, array.element)

    def _worth_whole(self, decision: Decision, ids: Mapping[str, Ids]) -> set[str]:
        """Tables of which every row changed, so that a whole takes no more than a delta.

        Later deltas lean on a whole, so that retention keeps this version with everything in it. Small tables are
        not worth that, where a delta would lean on the baseline, which is kept anyway.
        """
        changed = [table for table in self._tables if len(ids[table.name]) == table.rows]
        their_bytes, all_bytes = (
            sum(each.parameter.nbytes for each in tables) for tables in (changed, self._tables)
        )
        if decision.since == "baseline" and their_bytes < _FAIR_SHARE * all_bytes:
            changed = [table for table in changed if table.name not in self.since_whole]
        return {table.name for table in changed}

    def _changed_ids(self, table: Table, decision: Decision, dirty: Bitmap) -> Ids:
        if decision.since == "baseline":
            before = self.since_whole.get(table.name)
            if before is None or before.shape != dirty.shape:  # nothing to lean on, or a table that grew
                return np.arange(table.rows)
            dirty = dirty | before
        return rows_of(dirty, table.rows)
