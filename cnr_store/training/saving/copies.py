"""Copies the rows that a version needs, as far as there is room, and makes the writes of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

import numpy as np

from cnr_store.format.grid import Counts
from cnr_store.policies.past import Since
from cnr_store.policies.policy import Decision
from cnr_store.training.devices.encode import RowsFromDevice
from cnr_store.training.model.row_arrays import RowArray, checked
from cnr_store.training.saving.codec_choice import CodecChoice, takes_changing_rows
from cnr_store.training.saving.snapshot import LiveRows, Snapshot, StagedRows, StagedTogether, Staging
from cnr_store.training.saving.tally import Changed, Tally
from cnr_store.training.tracking.bitmap import Bitmap, RowIds, rows_of
from cnr_store.writing.exchange import is_sent_encoded
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.plan import RowsWrite
from cnr_store.writing.row_codes import LEAST_DIGESTED_BYTES, CodeCache, gridded_codec
from cnr_store.writing.scales import ScaleSample
from cnr_store.writing.steps import finds_step


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
        self.staging.reset()
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
                over=line.links[0] if line else None,
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
