"""Plans the next version: what it holds of each array of rows, and over which base; and copies those rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import torch

from cnr_store.format.grid import Counts
from cnr_store.format.record import Record
from cnr_store.policies.past import SINCE, DeltaBytes, Since
from cnr_store.policies.policy import Decision, Offer, decide
from cnr_store.policies.whole_tables import summary
from cnr_store.training.model.row_arrays import RowArray, checked
from cnr_store.training.model.tables import Table
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.saving.codec_choice import takes_changing_rows
from cnr_store.training.saving.explanation import Explanation, explained
from cnr_store.training.saving.options import Options, codec_of, row_bytes
from cnr_store.training.saving.pending_save import PendingSave
from cnr_store.training.saving.snapshot import (
    Bitmaps,
    LiveRows,
    Snapshot,
    StagedRows,
    StagedTogether,
    Staging,
)
from cnr_store.training.saving.tally import (
    Changed,
    Tally,
    changed_since,
    has_whole,
    not_continued,
    since_whole_after,
    worth_whole,
)
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, count, rows_of
from cnr_store.writing.exchange import is_sent_encoded
from cnr_store.writing.lineage import ArrayLine, Lineage
from cnr_store.writing.plan import EncodedRows, Plan, RowsWrite
from cnr_store.writing.row_codes import CodeCache
from cnr_store.writing.steps import keep_step

_Past = tuple[Lineage, Bitmaps]


class Planner:
    """Plans the rows of the next version: which tables are written whole, which as a delta, and over which base.

    Every rank of a job plans the same version, each with the rows that it has.
    """

    def __init__(self, trained: TrainedModel, options: Options, tally: Tally) -> None:
        # Lineage, and per table, packed, the rows changed since its whole version. They are one attribute, so that an
        # interrupt never leaves the lineage of one version beside the rows of another.
        self._past: _Past = Lineage(), {}
        self._foreseen: tuple[_Past, Record, _Past] | None = None
        self._tables = trained.tables
        self._codecs = options.codecs
        self._policy = options.policy
        self._costs = options.costs
        self._staging = Staging(options.snapshot_bytes)
        self._tally = tally
        self._code_cache, self._delta_bytes = CodeCache(), DeltaBytes()

    @property
    def lineage(self) -> Lineage:
        """The version that the next one continues."""
        return self._past[0]

    @property
    def reads_model(self) -> bool:
        """Whether rows of the last plan are still in the model."""
        return self._staging.left_bytes > 0

    @property
    def _since_whole(self) -> Bitmaps:
        return self._past[1]

    def close(self) -> None:
        """Give the memory of snapshots back."""
        self._staging.clear()
        self._code_cache.clear()

    def compile_steps(self) -> Iterator[None]:
        """Compile what saving and loading the tables will run, one kernel a step: see `CodecChoice.compile_steps`."""
        each = {table.name: (table.nbytes, table.dim, table.element) for table in self._tables}
        return self._codecs.compile_steps(each)

    def drop_bases(self, why: str = "") -> None:
        """Make the next version whole, and say why. It still continues the last version, with its count of restores."""
        self.continue_from(self.lineage.alone(why), {})

    def continue_from(self, lineage: Lineage, since_whole: Bitmaps) -> None:
        """Continue the version at the end of `lineage`.

        `since_whole`: per table, packed: the rows that changed since its whole version was saved.
        """
        self._code_cache.clear()
        self._past = lineage, since_whole

    def foresee_commit(self, record: Record, dirty: Bitmaps) -> None:
        """Work out what `apply_commit` will continue from, on the thread that writes."""
        past = self._past
        self._foreseen = past, record, self._following(past, record, dirty)

    def apply_commit(self, record: Record, dirty: Bitmaps) -> None:
        """Continue a version that was committed with these dirty rows. A second call changes nothing."""
        # An interrupt between this and what follows it makes the queue call again.
        if record.id == self.lineage.version:
            return
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[0] is not self._past or foreseen[1] is not record:
            foreseen = self._past, record, self._following(self._past, record, dirty)
        after = foreseen[2][0]
        self._code_cache.commit(record.id, after.grids_of(record, self._code_cache.written))
        self._delta_bytes.note(record.id, record.policy, record.shared_bytes)
        if self._tally.world == 1:  # ranks of a job are not told the sizes of single arrays
            self._codecs.note_deltas(record)
        self._past = foreseen[2]

    def _following(self, past: _Past, record: Record, dirty: Bitmaps) -> _Past:
        after = past[0].after(record)
        return after, since_whole_after(record.id, after, self._tables, past[1], dirty)

    def apply_fold(self, version: str, nbytes: int) -> None:
        """Let later deltas depend on `version` alone, which the lineage goes back to and whose fold takes `nbytes`."""
        since_whole = self._since_whole
        if version == self.lineage.version:
            since_whole = {name: np.zeros_like(rows) for name, rows in since_whole.items()}
        self._past = self.lineage.folded(version, nbytes), since_whole

    def count(self, dirty: Bitmaps, full: bool) -> Changed:
        """Count the rows that the next version may have to hold; every rank counts at once."""
        if full or self._policy == "full" or self.lineage.past is None:
            return Changed({})
        choices: dict[str, tuple[Since, ...]] = {"auto": SINCE, "consecutive": ("previous",)}
        return Changed(
            {
                since: self._tally.counts(
                    {table.name: self._changed(table, since, dirty[table.name]) for table in self._tables}
                )
                for since in choices.get(self._policy, ("baseline",))
            }
        )

    def decide(self, snapshot: Snapshot, full: bool, changed: Changed) -> Decision:
        """Let the policy decide what the next version is; `full` overrules it."""
        bits = self._codecs.resolve_auto(self.lineage.restores)
        past = self.lineage.past
        weighs = self._policy == "auto" and past is not None and not full
        offer = self._offer(snapshot, changed) if weighs else None
        decision = decide(self._policy, past, full=full, offer=offer, costs=self._costs)
        return replace(decision, bits=bits, reason=(not full and self.lineage.why_alone) or decision.reason)

    def _offer(self, snapshot: Snapshot, changed: Changed) -> Offer:
        whole = {*snapshot.unsafe, *not_continued(snapshot.arrays, self.lineage.lines)}
        sums = dict.fromkeys(SINCE, float(snapshot.dense_bytes))
        for array in snapshot.arrays:
            table = array.table
            is_whole = table.name in whole or not has_whole(table, self._since_whole.get(table.name))
            for since in SINCE:
                rows = table.rows if is_whole else changed.rows(since, table.name)
                sums[since] += row_bytes(self._codecs, array) * rows
        return Offer(*(round(self._delta_bytes.share(since) * sums[since]) for since in SINCE))

    def explain(
        self,
        arrays: Sequence[RowArray],
        dirty: Bitmaps,
        tracked: Mapping[str, str],
        unsafe: Mapping[str, str],
    ) -> Explanation:
        """What a delta of these rows would hold.

        `dirty`, `unsafe`: as in a `Snapshot`.
        `tracked`: how the rows of the other tables are tracked.
        """
        self._codecs.resolve_auto(self.lineage.restores)
        if self.lineage.version is not None:  # else: what deltas after the first version will hold
            unsafe = not_continued(arrays, self.lineage.lines) | dict(unsafe)
        since: Since = "previous" if self._policy == "consecutive" else "baseline"
        tables = []
        for table in self._tables:
            own, name = [array for array in arrays if array.table is table], table.name
            rows = self._changed(table, since, dirty[name]) if name in self._since_whole else dirty[name]
            changed = table.local_rows if name in unsafe else count(rows)
            why, nbytes = unsafe.get(name, tracked[name]), sum(row_bytes(self._codecs, each) for each in own)
            config = codec_of(self._codecs, own[0]).get_config()
            tables.append(explained(name, table.rows, name in unsafe, why, config, changed, nbytes))
        return Explanation.of(tables, arrays, self._staging.limit_bytes)

    def plan(
        self, decision: Decision, snapshot: Snapshot, changed: Changed, pending: PendingSave
    ) -> Callable[[], Plan]:
        """Copy the rows of the version that was decided on, as far as there is room.

        What is returned makes the plan, on the thread that writes: training does not wait for thousands of arrays.
        """
        lineage = self.lineage
        reasons = self._whole_reasons(decision, snapshot, changed)
        whole = {table.name for table in self._tables} if decision.full else reasons.keys()
        rows = self.rows(decision, snapshot, changed, whole, pending)
        policy = asdict(decision)
        if reasons:
            policy["whole"] = summary(reasons)
        policy |= self._codecs.explain_auto()
        live_bytes, live_threads = self._staging.left_bytes, torch.get_num_threads()

        def finish() -> Plan:
            writes = rows()
            return Plan(
                step=pending.step,
                previous=lineage.version,
                rows=writes,
                dense=[*snapshot.dense, *snapshot.own_dense],
                state=snapshot.state,
                state_parts=snapshot.parts,
                state_sha256=snapshot.part_digests,
                policy=policy,
                needs=lineage.needs((write.path, write.base) for write in writes if write.base is not None),
                restores=lineage.restores,
                metadata=snapshot.metadata,
                parent_paths=lineage.paths,
                live_bytes=live_bytes,
                live_threads=live_threads,
                seconds=pending.seconds,
            )

        return finish

    def rows(
        self,
        decision: Decision,
        snapshot: Snapshot,
        changed: Changed,
        whole: Collection[str],
        pending: PendingSave,
    ) -> Callable[[], list[RowsWrite]]:
        """The rows to write of each array, given the tables to write whole; they are copied now, as far as they fit."""
        self._staging.reset()
        ids, staged = self._together(decision, snapshot, whole)
        # A table that is whole takes no row numbers, of 8 bytes each.
        ids |= {
            table.name: None
            if table.name in whole
            else rows_of(self._changed(table, decision.since, snapshot.dirty[table.name]), table.local_rows)
            for table in self._tables
            if table.name not in ids
        }
        counts = {name: None if ids[name] is None else changed.counts[decision.since][name] for name in ids}
        arrays, lines = checked(snapshot.arrays), self.lineage.lines
        small = () if staged is None else staged.tables.arrays
        copied = {each.path for each in small if each.path in lines and ids[each.table.name] is not None}

        def write(array: RowArray) -> RowsWrite:
            name, rows = array.table.name, staged.of(array) if staged and array.path in copied else None
            return self._write(array, lines.get(array.path), decision, ids[name], counts[name], pending, rows)

        # Nothing that training may change is read any more of those that were copied together.
        later = copied if self._tally.world == 1 else set()
        now = {array.path: write(array) for array in arrays if array.path not in later}
        return lambda: [now.get(array.path) or write(array) for array in arrays]

    def _together(
        self, decision: Decision, snapshot: Snapshot, whole: Collection[str]
    ) -> tuple[dict[str, RowIds | None], StagedTogether | None]:
        """The rows to write of small tables, by table, and copies of them."""
        small, dirty, tables = snapshot.small, snapshot.dirty, {table.name: table for table in self._tables}
        flags = {name: np.zeros_like(dirty[name]) for name in small.names if name in whole}
        for name in [name for name in small.names if name not in whole]:
            flags[name] = self._changed(tables[name], decision.since, dirty[name])
        numbers, edges = small.listed(small.joined(flags))
        own = small.local(numbers, edges)
        each = zip(small.names, pairwise(edges.tolist()), strict=True)
        ids: dict[str, RowIds | None] = {name: own[slice(*at)] for name, at in each if name not in whole}
        return ids, self._staging.stage_together(small, own, edges)

    def _whole_reasons(self, decision: Decision, snapshot: Snapshot, changed: Changed) -> dict[str, str]:
        """Why tables are written whole although the policy may want a delta, by name."""
        reasons: dict[str, str] = {}
        if not decision.full:
            worth = worth_whole(self._tables, changed, decision.since, self._since_whole)
            reasons |= dict.fromkeys(worth, "all of its rows changed")
            # State beside a table that is whole must be whole, too: one bitmap per table tells the rows of both.
            reasons |= not_continued(snapshot.arrays, self.lineage.lines)
        reasons |= snapshot.unsafe
        return {table.name: reasons[table.name] for table in self._tables if table.name in reasons}

    def _write(
        self,
        array: RowArray,
        line: ArrayLine | None,
        decision: Decision,
        ids: RowIds | None,
        counts: Counts | None,
        pending: PendingSave,
        copied: StagedRows | None,
    ) -> RowsWrite:
        table = array.table
        written = None if line is None else ids
        base = None if line is None or ids is None else line.base(decision.since)
        codec = keep_step(codec_of(self._codecs, array), line.lattice if line and base else None)
        held = self._tally.held(array, None if written is None else counts)
        codes = self._code_cache.for_write(
            *(array.path, codec, base, written, table.first_row),
            (table.local_rows if copied is None else array.shape[0], (*array.shape, 1)[1]),
            parts=() if held is None else held.columns,
            is_kept=self._policy != "full" and (base is None or decision.since == "previous"),
        )
        own = codec if is_sent_encoded(held, codec) else None
        in_place = takes_changing_rows(codec)
        source = copied or self._staging.stage(array, written, pending, in_place=in_place, codec=own)
        return RowsWrite(
            path=array.path,
            shape=array.shape,
            element=array.element,
            base=base,
            ids=None if written is None else written + table.first_row,
            source=source,
            codec=source.codec if isinstance(source, EncodedRows) else codec,
            aliases=table.tied_names if array.is_weight else (),
            boundaries=(*array.boundaries, table.dim) if array.boundaries else (),
            held=held,
            is_live=isinstance(source, LiveRows),
            codes=codes,
        )

    def _changed(self, table: Table, since: Since, dirty: Bitmap) -> Bitmap:
        return changed_since(table, since, dirty, self._since_whole.get(table.name))
