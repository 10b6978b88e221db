"""Plans the next version: what it holds of each array of rows, and over which base; and copies those rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cnr_codecs import LosslessRows
from cnr_store.format.record import Record
from cnr_store.policies.past import SINCE, DeltaBytes, Since
from cnr_store.policies.policy import Decision, Offer, decide
from cnr_store.policies.whole_tables import ADVICE, summary
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tables import Table
from cnr_store.training.model.trained_model import TrainedModel
from cnr_store.training.process.memory import free_bytes
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.decays import Decays
from cnr_store.training.saving.explanation import ExplainedTable, Explanation
from cnr_store.training.saving.options import Options
from cnr_store.training.saving.snapshot import Copies, Snapshot, Staging
from cnr_store.training.saving.tally import ArrayOf, Bitmaps, Changed, RowSets, Tally, continues, place
from cnr_store.training.tracking.bitmap import bitmap_bytes, count
from cnr_store.training.tracking.comparison import Comparison
from cnr_store.writing.lineage import ArrayLine, Lineage
from cnr_store.writing.plan import Plan
from cnr_store.writing.row_codes import CodeCache, Known, is_exact, is_same_grid, relative_codec
from cnr_store.writing.steps import finds_step, stored_grid

_MIN_SHARE_TO_KEEP = 1 / 8
"""Of all tables' bytes: below it, tables whose rows all changed are no reason for retention to keep a version."""
_Config = Mapping[str, Any]
_Past = tuple[Lineage, Bitmaps]


class Planner:
    """Plans the rows of the next version: which tables are written whole, which as a delta, and over which base.

    Every rank of a job plans the same version, each with the rows that it has.
    """

    def __init__(self, trained: TrainedModel, options: Options, tally: Tally) -> None:
        # Lineage, and by array, packed, the rows changed since its whole version. They are one attribute, so that an
        # interrupt never leaves the lineage of one version beside the rows of another.
        self._past: _Past = Lineage(), {}
        self.refitted: dict[str, str] = {}  # by path, why the next version has arrays whole: see `_refits`
        self._foreseen: tuple[_Past, Record, _Past] | None = None
        self._tables = trained.tables
        self._codecs, self._policy = options.codecs, options.policy
        self._costs, self._tally = options.costs, tally
        self._code_cache, self._delta_bytes = CodeCache(free_bytes), DeltaBytes()
        self.comparison = Comparison()
        self.decays = Decays(options.codecs)
        # What arrays are compared with: the last version, or their whole one, which later deltas depend on.
        self._parents: Since = "previous" if options.policy in ("consecutive", "auto") else "baseline"
        keeps = None if options.policy == "full" else self._parents
        own = Staging(options.limits.snapshot_bytes), self._code_cache, self._codecs, tally, keeps
        self._copies = Copies(*own, compares_all=options.audits_all)

    @property
    def lineage(self) -> Lineage:
        """The version that the next one continues."""
        return self._past[0]

    @property
    def reads_model(self) -> bool:
        """Whether rows of the last plan are still in the model."""
        return self._copies.staging.left_bytes > 0

    @property
    def _since_whole(self) -> Bitmaps:
        return self._past[1]

    def close(self) -> None:
        """Give the memory of snapshots back."""
        self._copies.staging.clear()
        self._code_cache.clear()
        self.comparison.close()

    def drop_bases(self, why: str = "") -> None:
        """Make the next version whole, and say why. It still continues the last version, with its count of restores."""
        self.continue_from(self.lineage.alone(why), {})

    def continue_from(self, lineage: Lineage, since_whole: Bitmaps) -> None:
        """Continue the version at the end of `lineage`.

        `since_whole`: by path of an array, packed: the rows that changed since its whole version was saved.
        """
        self._code_cache.clear()
        self._copies.samples.clear()
        self._past = lineage, since_whole

    def foresee_commit(self, record: Record, sets: RowSets) -> None:
        """Work out what `apply_commit` will continue from, on the thread that writes."""
        past = self._past
        self._foreseen = past, record, _following(past, record, sets)

    def apply_commit(self, record: Record, sets: RowSets) -> None:
        """Continue a version that was committed with these rows. A second call changes nothing."""
        # An interrupt between this and what follows it makes the queue call again.
        if record.id == self.lineage.version:
            return
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[0] is not self._past or foreseen[1] is not record:
            foreseen = self._past, record, _following(self._past, record, sets)
        after = foreseen[2][0]
        self._code_cache.commit(record.id, after.grids_of(record, self._code_cache.written))
        self.decays.commit()
        self._delta_bytes.note(record.id, record.policy, record.shared_bytes)
        self._past = foreseen[2]

    def sets(self, arrays: Iterable[RowArray], dirty: Bitmaps, compared: Bitmaps) -> RowSets:
        """The rows of arrays that the next version may have to hold. `dirty`, `compared`: as in `RowSets`."""
        return RowSets(arrays, dirty, compared, self._since_whole, self._parents)

    def apply_fold(self, version: str, nbytes: int) -> None:
        """Let later deltas depend on `version` alone, which the lineage goes back to and whose fold takes `nbytes`."""
        since_whole = self._since_whole
        if version == self.lineage.version:
            since_whole = {path: np.zeros_like(rows) for path, rows in since_whole.items()}
        self._past = self.lineage.folded(version, nbytes), since_whole

    def judge(self, arrays: Sequence[RowArray]) -> dict[str, str]:
        """Begin a save: find `refitted`."""
        lines, codecs = self.lineage.lines, self._codecs
        self._choose_step(arrays)
        self.refitted = _refits(arrays, lines, codecs)
        self.decays.judge(arrays, lines, self._code_cache.may_have_codes)
        self.refitted |= self.decays.off_grid
        return self.refitted

    def choose_step(self, arrays: Iterable[RowArray]) -> None:
        """Choose the step that the budget allows; the next version is whole if those beneath it are too coarse."""
        if why := self._choose_step(arrays):
            self.drop_bases(why)

    def _choose_step(self, arrays: Iterable[RowArray]) -> str:
        lines = self.lineage.lines
        stored = {
            (each.table.name, each.nbytes): lattice.rms_step
            if (lattice := lines[each.path].lattice)
            else None
            for each in arrays
            if each.is_weight and each.path in lines
        }
        return self._codecs.choose_step(self.lineage.spent, stored)

    def compare(self, arrays: Iterable[RowArray], names: Collection[str]) -> Bitmaps:
        """The changed rows of tables, by what is known of the rows stored.

        An array of which nothing is known is left out: all of its rows are written, or those flagged. Rows that other
        ranks write are not looked at.

        `names`: from `Tracker.to_compare`.
        """
        found: Bitmaps = {}
        for array in arrays:
            if array.table.name not in names or self._tally.is_cut(array):
                continue
            own, changed = self._tally.own(array), np.zeros(bitmap_bytes(array.table.local_rows), np.uint8)
            if own.start < own.stop:
                known = self._known(array, own)
                known = known and self.decays.on_next(array.path, known, self.lineage.lines[array.path])
                if known is None:
                    continue
                place(self.comparison.changed(array.narrowed(own), known), own.start, changed)
            found[array.path] = changed
        return found

    def compares(self, names: Collection[str], full: bool) -> bool:
        """Whether the next save compares these tables, if anything is known of their rows; alike on all ranks."""
        return bool(names) and not self._is_full(full)

    def to_learn(
        self, path: str, table: Table, columns: int, configs: Sequence[_Config | None], names: Collection[str]
    ) -> Known | None:
        """What a load is to note of the rows of an array that it reads; None if no later save asks for it.

        `configs`: the codecs of the links that are read, newest first.
        `names`: from `Tracker.to_compare`.
        """
        config, grids = configs[0], [stored_grid(each) for each in configs]
        grid = grids[0] if all(is_same_grid(each, grids[0]) for each in grids) else None
        is_in_columns = [part.columns for part in table.parts] != [table.dim]
        is_unwanted = grid is not None and grid.is_exact and not self._codecs.exact_parents
        if self._policy == "full" or is_in_columns or config is None or is_unwanted:
            return None
        is_relative = grid is not None and bool(config.get("relative"))
        is_alike = grid is not None or all(each == config for each in configs)
        if not is_alike or not (is_relative or table.name in names):
            return None
        shape = table.local_rows, columns
        codes = self._code_cache.new_codes(path, shape, grid)
        if codes is None and table.name not in names:
            return None
        noted = codes, np.zeros(shape[0], np.uint64), config
        return Known(None, grid, table.first_row, shape, *noted, of_whole=self._parents == "baseline")

    def adopt(self, learned: Mapping[str, Known], arrays: Iterable[RowArray]) -> None:
        """Take what a load noted of the version that the next one continues, and the arrays as it left them."""
        for path, known in learned.items():
            line = self.lineage.lines.get(path)
            if line is not None:
                self._code_cache.adopt(path, known, line.base(self._parents))
        self.decays.adopt(arrays, self.lineage.lines)

    def _known(self, array: RowArray, own: slice) -> Known | None:
        """What is known of an array's rows in the version that its next delta depends on; `own`: of those held."""
        line = self.lineage.lines.get(array.path)
        if line is None or array.path in self.refitted or not continues(array, line):
            return None
        codec = self._codecs.over(array, line)
        base, shape = line.base(self._parents), (own.stop - own.start, (*array.shape, 1)[1])
        return self._code_cache.find(array.path, codec, base, array.table.first_row + own.start, shape)

    def _is_full(self, full: bool) -> bool:
        return full or self._policy == "full" or self.lineage.past is None

    def count(self, snapshot: Snapshot) -> Changed:
        """Count the rows that the next version may have to hold; every rank counts at once."""
        if self._is_full(snapshot.full):
            return Changed({})
        choices: dict[str, tuple[Since, ...]] = {"auto": SINCE, "consecutive": ("previous",)}
        sets, own = snapshot.sets, choices.get(self._policy, ("baseline",))
        return Changed({each: self._tally.counts(sets.arrays, partial(sets.of, since=each)) for each in own})

    def decide(self, snapshot: Snapshot, changed: Changed) -> Decision:
        """Let the policy decide what the next version is; a caller who wants it whole overrules it."""
        bits = self._codecs.resolve_auto(self.lineage.restores)
        full, past = snapshot.full, self.lineage.past
        weighs = self._policy == "auto" and past is not None and not full
        offer = self._offer(snapshot, changed) if weighs else None
        decision = decide(self._policy, past, full, offer, self._costs, self._delta_bytes.is_relative)
        if decision.full:
            self._codecs.choose_step(self.lineage.spent, {})
        return replace(decision, bits=bits, reason=(not full and self.lineage.why_alone) or decision.reason)

    def _offer(self, snapshot: Snapshot, changed: Changed) -> Offer:
        whole, codecs = self._whole_reasons(snapshot).keys(), self._codecs
        self._delta_bytes.is_relative = any(relative_codec(codecs.of(each)) for each in snapshot.arrays)
        sums = dict.fromkeys(SINCE, float(snapshot.dense_bytes))
        for array in snapshot.arrays:
            for since in SINCE:
                rows = array.shape[0] if array.path in whole else changed.rows(since, array.path)
                sums[since] += self._codecs.row_bytes(array) * rows
        return Offer(*(round(self._delta_bytes.share(since) * sums[since]) for since in SINCE))

    def explain(
        self, sets: RowSets, arrays: Sequence[RowArray], ways: Mapping[str, str], unsafe: Mapping[str, str]
    ) -> Explanation:
        """What a delta of these rows would hold.

        `ways`: how the rows of the other tables are tracked.
        `unsafe`: as in a `Snapshot`.
        """
        self._codecs.resolve_auto(self.lineage.restores)
        unsafe = self._tally.why_whole(arrays, self.lineage, unsafe)
        since: Since = "previous" if self._policy == "consecutive" else "baseline"
        tables = []
        for table in self._tables:
            own, name = [array for array in arrays if array.table is table], table.name
            weight = ArrayOf(table.path, table)
            rows = sets.of(weight, since) if table.path in self._since_whole else sets.dirty[name]
            why = self.refitted.get(table.path) or unsafe.get(name)
            is_compared = why is not None and table.path in sets.compared
            is_whole = why is not None and not is_compared
            changed = table.local_rows if is_whole else count(rows)
            codec = self._codecs.of(own[0])
            is_lossless = isinstance(codec, LosslessRows) or is_exact(codec)
            bits = 32 if is_lossless else codec.get_config().get("bits")
            size = sum(self._codecs.row_bytes(each) for each in own)
            told = name, table.rows, is_whole, why or ways[name], bits, changed
            sizes = round(changed * size), round(table.rows * size)
            tables.append(ExplainedTable(*told, *sizes, is_compared))
        known = self._codecs.budget, self._code_cache.nbytes
        absolute = _why_absolute(arrays, self._codecs, self._code_cache, self._tally)
        return Explanation.of(tables, arrays, self._copies.staging.limit_bytes, *known, absolute)

    def plan(self, decision: Decision, snapshot: Snapshot, changed: Changed) -> Callable[[], Plan]:
        """Copy the rows of the version that was decided on, as far as there is room.

        What is returned makes the plan, on the thread that writes: training does not wait for thousands of arrays.
        """
        lineage = self.lineage
        reasons: dict[str, str] = {}
        if not decision.full:
            reasons = _worth_whole(snapshot.arrays, decision.since, changed, self._codecs, self._since_whole)
            reasons |= self._whole_reasons(snapshot)
        whole = {array.path for array in snapshot.arrays} if decision.full else reasons.keys()
        lines = self.decays.moved(snapshot, lineage.lines, whole)
        rows = self._copies.rows(decision, snapshot, lines, changed, whole)
        policy = _policy_document(decision, snapshot, changed, reasons, self._codecs)
        live_bytes, live_threads = self._copies.staging.left_bytes, torch.get_num_threads()

        def finish() -> Plan:
            writes = rows()
            return Plan(
                step=snapshot.pending.step,
                previous=lineage.version,
                rows=writes,
                dense=[*snapshot.dense, *snapshot.own_dense],
                state=snapshot.state,
                state_parts=snapshot.parts,
                state_sha256=snapshot.part_digests,
                policy=policy,
                needs=lineage.needs((write.path, write.base) for write in writes if write.base is not None),
                restores=lineage.restores,
                spent=lineage.spent,
                metadata=snapshot.metadata,
                parent_paths=lineage.paths,
                live_bytes=live_bytes,
                live_threads=live_threads,
                seconds=snapshot.pending.seconds,
            )

        return finish

    def _whole_reasons(self, snapshot: Snapshot) -> dict[str, str]:
        """Why arrays are written whole although the policy may want a delta, by path."""
        # State beside a table that is whole is whole, too, unless it was compared.
        reasons = self._tally.why_whole(snapshot.arrays, self.lineage, snapshot.unsafe)
        return {
            array.path: reasons[array.table.name]
            for array in snapshot.arrays
            if array.table.name in reasons and array.path not in snapshot.compared
        } | dict(self.refitted)


def _following(past: _Past, record: Record, sets: RowSets) -> _Past:
    after = past[0].after(record)
    return after, sets.since_whole(record.id, after.lines)


def _refits(
    arrays: Iterable[RowArray], lines: Mapping[str, ArrayLine], codecs: CodecChoice
) -> dict[str, str]:
    """By path, why arrays need another step. Of many ranks, the first alone knows: see `Fit`."""
    why = {path: line.fit.why_whole for path, line in lines.items() if line.fit.why_whole}
    due = [each for each in arrays if each.path in why and finds_step(codecs.of(each))]
    return {each.path: why[each.path] for each in due}


def _why_absolute(
    arrays: Iterable[RowArray], codecs: CodecChoice, codes: CodeCache, tally: Tally
) -> dict[str, str]:
    """By path, why `exact_parents` does nothing for arrays; of none, if it is not given."""
    why = {}
    for array in arrays if codecs.exact_parents else ():
        cut = "several ranks hold columns of its rows" if tally.is_cut(array) else ""
        no_room = "" if codes.may_have_codes(array.path) else "no room in memory"
        why[array.path] = codecs.why_absolute(array) or cut or no_room
    return {path: each for path, each in why.items() if each}


def _worth_whole(
    arrays: Sequence[RowArray], since: Since, changed: Changed, codecs: CodecChoice, known: Collection[str]
) -> dict[str, str]:
    """Why arrays are whole, by path: all rows changed, and are not relative, so that a delta takes no less.

    Later deltas depend on a whole, so retention keeps this version with everything in it. Small arrays are not
    worth that where their delta would depend on the baseline, which is kept anyway.

    `known`: by `Table.path`, the tables of which a whole version is known.
    """
    due = [each for each in arrays if changed.rows(since, each.path) == each.shape[0]]
    due = [each for each in due if relative_codec(codecs.of(each)) is None]
    its, all_bytes = (
        sum(each.nbytes for each in some if each.is_weight) for some in (due, arrays if due else ())
    )
    is_much = since == "previous" or its >= _MIN_SHARE_TO_KEEP * all_bytes
    worth = [each.path for each in due if is_much or each.table.path not in known]
    return dict.fromkeys(worth, "all of its rows changed")


def _policy_document(
    decision: Decision, snapshot: Snapshot, changed: Changed, reasons: Mapping[str, str], codecs: CodecChoice
) -> dict[str, Any]:
    """What the record says of a decision. `reasons`: why arrays are whole, by path."""
    policy, weights = asdict(decision), [each for each in snapshot.arrays if each.is_weight]
    if whole := {each.table.name: reasons[each.path] for each in weights if each.path in reasons}:
        sizes = dict.fromkeys(whole, (0.0, 0.0))
        for each in snapshot.arrays:
            if each.path in reasons and (own := sizes.get(each.table.name)) is not None:
                rows, size = changed.rows(decision.since, each.path), codecs.row_bytes(each)
                sizes[each.table.name] = own[0] + size * each.shape[0], own[1] + size * rows
        policy |= {"whole": summary(whole, sizes), "advice": ADVICE}
    names = {array.table.name for array in snapshot.arrays if array.path in snapshot.compared}
    if compared := {name: why for name, why in snapshot.unsafe.items() if name in names}:
        policy["compared"] = summary(compared)
    if codecs.budget is not None:
        policy["budget"] = {"percent": codecs.budget.percent, "rms_step": codecs.budget.rms_step}
    return policy
