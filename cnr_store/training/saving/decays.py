"""Moves the grids of arrays whose rows decay: from one save to the next, as samples of these rows tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cnr_codecs import FloatingRows
from cnr_store.format.record import STILL
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import AnyArray
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.options import codec_of
from cnr_store.training.saving.snapshot import Snapshot
from cnr_store.writing.decay import Sample, has_room, largest, next_move, sampled_rows, total_of
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.row_codes import Known, gridded_codec

_LEAST_ROWS = 512
"""Of an array: in smaller ones, little is won."""


class Decays:
    """Where the grids of arrays move to, one save at a time.

    Those of state alone move, of float32 on floating grids whose rows are relative: weights have followers, which would
    get all rows of a table.

    `moves`: whether grids move at all, and not only stay where they are. Of many ranks, each would find another factor.
    """

    def __init__(self, codecs: CodecChoice, *, moves: bool) -> None:
        self._codecs, self._moves = codecs, moves
        self._saved: dict[str, Sample] = {}  # of the last version
        self._lines: dict[str, ArrayLine] = {}  # of arrays that were compared, as the next version moves them
        self._now: dict[str, AnyArray] = {}  # the sampled rows at this save
        self._noted: dict[str, Sample] = {}

    def clear(self) -> None:
        """Forget all: no grid moves in the next version."""
        self._saved, self._noted = {}, {}

    def adopt(self, path: str, known: Known) -> None:
        """Take what was read of an array, as it is in the version that the next one continues."""
        if known.sample is not None:
            self._saved[path] = known.sample

    def off_grid(self, arrays: Sequence[RowArray], lines: Mapping[str, ArrayLine]) -> dict[str, str]:
        """Begin with the arrays as they are now. By path, why those whose grid can't go on from there are whole."""
        self._lines, self._now, self._noted = {}, {}, {}
        moved = {path: line.move for path, line in lines.items() if line.move != STILL}
        found = {}
        for array in (each for each in arrays if each.path in moved) if moved else ():
            codec = gridded_codec(codec_of(self._codecs, array))
            if not isinstance(codec, FloatingRows):  # no reader could mix its rows with those beneath
                found[array.path] = "its rows are stored in another way"
            elif not has_room(codec.grid, moved[array.path]):
                found[array.path] = "its values have decayed by more than its integers have room for"
        return found

    def on_next(self, array: RowArray, known: Known, line: ArrayLine) -> Known:
        """What is known of an array of which all rows are compared, on the grid that the next version has."""
        if known.grid is None:
            return known
        if known.codes is not None and self._may_move(array):  # digests don't tell whether a row is raw
            line = replace(line, move=next_move(self._saved.get(array.path), self._rows(array), line.move))
            self._lines[array.path] = line
        return replace(known, grid=known.grid.at(*line.move))

    def moved(
        self, snapshot: Snapshot, lines: Mapping[str, ArrayLine], whole: Collection[str]
    ) -> Mapping[str, ArrayLine]:
        """The `lines` of all arrays as the next version goes on; notes rows of those that later ones may compare.

        `whole`: paths of the arrays of which it has all rows.
        """
        compared = snapshot.compared
        lines = {**lines, **{path: line for path, line in self._lines.items() if path in compared}}
        for array in snapshot.arrays:
            is_due = array.path in compared or array.table.name in snapshot.unsafe
            if not (is_due and self._may_move(array)):
                continue
            line = None if array.path in whole else lines.get(array.path)
            move = STILL if line is None else line.move
            self._noted[array.path] = Sample(*largest(self._rows(array)), total_of(move))
        return lines

    def commit(self) -> None:
        """Go by what was noted, once it is committed."""
        self._saved = self._noted

    def _may_move(self, array: RowArray) -> bool:
        codec = gridded_codec(codec_of(self._codecs, array)) if self._moves else None
        is_floating = isinstance(codec, FloatingRows) and codec.relative and array.element == "float32"
        return is_floating and not array.is_weight and array.local_rows >= _LEAST_ROWS

    def _rows(self, array: RowArray) -> AnyArray:
        if array.path not in self._now:
            ids = sampled_rows(array.local_rows)
            rows = self._now[array.path] = np.empty((len(ids), array.local_columns), np.float32)
            array.copy_rows(ids, rows)
        return self._now[array.path]
