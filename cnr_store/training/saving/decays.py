"""Moves the grids of arrays whose rows decay, from one save to the next.

Dense optimizers multiply what they keep for rows that are not looked up by one factor at every step. The ratios of
their values now and at the last save are equal, but for rounding, and those of other rows are spread: so the factor is
where the ratios of some rows lie densest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_codecs import FloatingRows
from cnr_codecs.payload.coded import MAX_CODE, MAX_SHIFT
from cnr_store.format.record import STILL, Move
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.tensors import AnyArray
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.snapshot import Snapshot
from cnr_store.training.saving.tally import continues
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.row_codes import Known, gridded_codec, is_exact

_ROWS = 2048
"""That are looked at, evenly spread over an array."""
_LEAST_ROWS = 512
"""Of an array: in smaller ones, little is won."""
_LEAST_RATIOS, _LEAST_SHARE = 8, 1 / 8
"""That lie at the densest place, of those of a rank and of all, or it counts as none."""
_WIDTH = 1.5e-5
"""Of that place, in octaves: some steps round differently by some 1e-7 each."""
_SMALL = 2.0**-100
"""Smaller values are left out: some decay no further."""
_SPARE_OCTAVES = 160
"""Of codes that are left to values as large as they may be, up to 2**33."""


@dataclass(frozen=True, eq=False)
class _Sample:
    """Values of some rows as they were saved, the largest of each, when the grid had moved by so many octaves.

    `columns`, `values`: (n,): where these are, and they.
    """

    columns: npt.NDArray[np.intp]
    values: npt.NDArray[np.float32]
    octaves: float


class Decays:
    """Where the grids of arrays move to, one save at a time; alike on all ranks.

    Those of state alone move, of float32 on floating grids whose rows are relative: weights have followers, which would
    get all rows of a table.

    `off_grid`: by path, why arrays of this rank whose grid can't go on from where it has moved to are whole.
    `told`: what this rank's samples tell, to be merged by `merge_told`.
    `agreed`: what all ranks' samples tell.
    """

    def __init__(self, codecs: CodecChoice) -> None:
        self._codecs = codecs
        self._saved: dict[str, _Sample] = {}  # of the last version
        self._noted: dict[str, _Sample] = {}  # of the one that is saved
        self._now: dict[str, AnyArray] = {}  # the sampled rows at this save
        self.off_grid: Mapping[str, str] = {}
        self.told: Mapping[str, list[float] | None] = {}
        self.agreed: Mapping[str, float] = {}

    def judge(
        self, arrays: Iterable[RowArray], lines: Mapping[str, ArrayLine], has_codes: Callable[[str], bool]
    ) -> None:
        """Begin a save: find what is `off_grid` and `told`, and `agreed` where there are no other ranks.

        `has_codes`: whether codes of an array are known. Digests don't tell whether a row is raw.
        """
        self._now, told, off_grid = {}, dict[str, list[float] | None](), dict[str, str]()
        for array in arrays:
            path, line = array.path, lines.get(array.path)
            if line is None:
                continue
            if line.move != STILL and (why := self._why_off(array, line.move)):
                off_grid[path] = why
            elif path in self._saved and continues(array, line) and self._may_move(array):
                told[path] = _ratios(self._saved[path], self._rows(array)) if has_codes(path) else None
        self.off_grid, self.told, self.agreed = off_grid, told, merge_told([told])

    def next_line(self, path: str, line: ArrayLine) -> ArrayLine:
        """The line of an array of which all rows are compared, as the next version goes on."""
        octaves = self.agreed.get(path, 0)
        if octaves <= _octaves(line.move) + _WIDTH:  # or it is rounding
            return line
        shift = math.floor(octaves)
        scale = float(np.float32(2 ** (octaves - shift)))
        return replace(line, move=(scale, shift) if scale < 2 else (scale / 2, shift + 1))

    def on_next(self, path: str, known: Known, line: ArrayLine) -> Known | None:
        """What is known of such an array, on the grid that the next version has; None if it can't be told."""
        following = self.next_line(path, line)
        if known.codes is None and following is not line:
            return None
        return replace(known, grid=known.grid and known.grid.at(*following.move))

    def moved(
        self, snapshot: Snapshot, lines: Mapping[str, ArrayLine], whole: Collection[str]
    ) -> Mapping[str, ArrayLine]:
        """The lines of all arrays as the next version goes on; notes rows of those that later ones may compare.

        `whole`: paths of the arrays of which it has all rows.
        """
        compared, self._noted = snapshot.compared, {}
        lines = {
            path: self.next_line(path, line) if path in compared else line for path, line in lines.items()
        }
        for array in snapshot.arrays:
            is_due = array.path in compared or array.table.name in snapshot.unsafe
            if is_due and self._may_move(array):
                line = None if array.path in whole else lines.get(array.path)
                self._noted[array.path] = self._sample(array, STILL if line is None else line.move)
        return lines

    def commit(self) -> None:
        """Go by what was noted, once it is committed."""
        self._saved = self._noted

    def adopt(self, arrays: Iterable[RowArray], lines: Mapping[str, ArrayLine]) -> None:
        """Go by arrays as they were loaded."""
        self._now = {}
        due = [each for each in arrays if each.path in lines and self._may_move(each)]
        self._saved = {each.path: self._sample(each, lines[each.path].move) for each in due}

    def _why_off(self, array: RowArray, move: Move) -> str:
        codec = gridded_codec(self._codecs.of(array))
        # No reader could mix its rows with those beneath.
        if not isinstance(codec, FloatingRows) or is_exact(codec):
            return "its rows are stored in another way"
        has_room = move[1] <= min(MAX_SHIFT, (MAX_CODE >> codec.mantissa_bits) - _SPARE_OCTAVES)
        return "" if has_room else "its values have decayed by more than its integers have room for"

    def _may_move(self, array: RowArray) -> bool:
        codec = gridded_codec(self._codecs.of(array))
        if not isinstance(codec, FloatingRows) or is_exact(codec):
            return False
        is_floating = codec.relative and array.element == "float32"
        return is_floating and not array.is_weight and array.shape[0] >= _LEAST_ROWS and array.local_rows > 0

    def _rows(self, array: RowArray) -> AnyArray:
        if array.path not in self._now:
            rows = array.local_rows
            ids = np.linspace(0, rows - 1, min(rows, _ROWS)).astype(np.int64)
            self._now[array.path] = np.empty((len(ids), array.local_columns), np.float32)
            array.copy_rows(ids, self._now[array.path])
        return self._now[array.path]

    def _sample(self, array: RowArray, move: Move) -> _Sample:
        rows = self._rows(array)
        columns = np.argmax(np.abs(rows), axis=1)
        return _Sample(columns, rows[np.arange(len(rows)), columns], _octaves(move))


def merge_told(said: Sequence[Mapping[str, list[float] | None]]) -> dict[str, float]:
    """By path, the octaves by which the grid is to have moved, from what each rank tells; none where too few agree."""
    agreed = {}
    for path in {path for each in said for path in each}:
        told = [each[path] for each in said if path in each]
        if None in told:
            continue
        places, counts, seen = np.array(told, np.float64).T
        place, count = _densest(places, counts)
        if count > 0 and count >= _LEAST_SHARE * seen.sum():
            agreed[path] = place
    return agreed


def _ratios(sample: _Sample, rows: AnyArray) -> list[float]:
    """The octaves by which most rows that decayed want the grid to have moved, how many, and of how many."""
    if len(sample.values) != len(rows):
        return [0.0, 0.0, 0.0]
    before, now = sample.values, rows[np.arange(len(rows)), sample.columns]
    with np.errstate(all="ignore"):
        ratios = before / now.astype(np.float64)
        is_told = (np.abs(before) > _SMALL) & (np.abs(now) > _SMALL) & (ratios > 0.5) & (ratios < 1 / _SMALL)
    octaves = np.log2(ratios[is_told])
    place, count = _densest(octaves, np.ones(len(octaves)))
    return [sample.octaves + place, count if count >= _LEAST_RATIOS else 0.0, float(len(octaves))]


def _densest(places: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Where places lie densest, each of so much weight, and how much lies there."""
    if not len(places):
        return 0.0, 0.0
    order = np.argsort(places)
    places, sums = places[order], np.cumsum([0, *counts[order]])
    ends = np.searchsorted(places, places + _WIDTH, "right")
    weights = sums[ends] - sums[:-1]
    first = int(np.argmax(weights))
    return float(np.median(places[first : ends[first]])), float(weights[first])


def _octaves(move: Move) -> float:
    return math.log2(move[0]) + move[1]
