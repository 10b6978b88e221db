"""What a writer knows of the versions it continues: each array's chain, and the sizes a policy sees."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from cnr_backends import Backend, BackendError, Transfer
from cnr_codecs import LatticeRows
from cnr_codecs.payload.coded import Grid
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import READ_WORKERS, ArrayReader
from cnr_store.errors import CheckpointError
from cnr_store.format.record import STILL, ArrayEntry, Move, Record
from cnr_store.policies.budget import restore_cost
from cnr_store.policies.past import Past, Since, past_after
from cnr_store.writing.plan import RowsWrite
from cnr_store.writing.row_codes import RowCodes, relative_codec
from cnr_store.writing.scales import Fit
from cnr_store.writing.steps import keep_grid, lattice_of, stored_grid

log = logging.getLogger("cnr_store")
_RUNS, _RUN_ROWS = 4, 16
"""Of rows that are read back. Those of a run lie in few chunks, so that not each row costs a chunk of each link."""
_RUN_SPAN = 1 << 12


@dataclass(frozen=True)
class ArrayLine:
    """The chain of one array: the versions that hold its rows, newest first; the last of them is whole.

    Rows that were stored last on a lattice have its codec, whose step the next ones keep. `move`: where floating grids
    have moved to.
    """

    links: tuple[str, ...]
    shape: tuple[int, ...]
    element: str
    lattice: LatticeRows | None = None
    move: Move = STILL
    # How its rows fit a step. Of many ranks, the first alone knows of what was written: `digest` must not see it
    fit: Fit = field(default=Fit(), repr=False, compare=False)

    def base(self, since: Since) -> str:
        """The version that a delta of the rows changed since then depends on."""
        return self.links[-1] if since == "baseline" else self.links[0]

    def until(self, version: str) -> ArrayLine:
        """The chain once `version` is whole: what lies beneath it is not needed any more."""
        if version not in self.links:
            return self
        return replace(self, links=self.links[: self.links.index(version) + 1])

    def over(self, base: str) -> tuple[str, ...]:
        """The links that a delta over `base` needs: from `base` on."""
        return self.links[self.links.index(base) :]


@dataclass(frozen=True)
class Lineage:
    """The committed version that the next one continues. Empty before the first."""

    version: str | None = None  # its id
    lines: Mapping[str, ArrayLine] = field(default_factory=dict)  # by array path
    # The last full version and the deltas since, as policies see them; None where there is none to build on
    past: Past | None = None
    restores: int = 0  # loads that training has been through
    spent: float = 0.0  # per cent of the loss that these cost at most
    # Paths that the arrays of `version` lie under, by their plain ones
    paths: Mapping[str, str] = field(default_factory=dict)
    why_alone: str = ""  # why there are no chains although there were; "" if nothing is known of it

    @property
    def versions(self) -> list[str]:
        """Every version of its chains, newest first: what the next version may depend on."""
        return sorted({version for line in self.lines.values() for version in line.links}, reverse=True)

    def digest(self) -> str:
        """What tells it from another lineage: ranks must go on from the same one."""
        text = repr((self.version, self.restores, self.spent, self.past, sorted(self.lines.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    def after(self, record: Record) -> Lineage:
        """The lineage once `record`, which continues this one, is committed."""
        lines = {}
        for path, entry in record.arrays.items():
            if entry.kind == "dense":
                continue
            older = self.lines[path].over(entry.base) if entry.base is not None else ()
            # A delta without rows adds nothing to read, so the chain stays as it was.
            links = (record.id, *older) if entry.rows or entry.base is None else older
            fit = Fit.of(entry, self.lines[path].fit if older else None)
            lines[path] = _line(links, entry, fit)
        return Lineage(record.id, lines, _past(record), self.restores, self.spent, record.stored_paths)

    def grids_of(self, record: Record, paths: Iterable[str]) -> dict[str, Grid | None]:
        """By path of each of these arrays of which `record`, the last one, wrote rows: their grid, None without one."""
        entries = {path: record.arrays[path] for path in paths if path in self.lines}
        return {path: stored_grid(entry.codec) for path, entry in entries.items() if entry.rows}

    @classmethod
    def from_record(cls, catalog: Catalog, record: Record) -> Lineage:
        """The lineage of a run that has just loaded `record`."""
        lines = {}
        for path, entry in record.arrays.items():
            if entry.kind == "dense":
                continue
            links = [link for link in ArrayReader(catalog, record, path).links if link.is_written]
            fit = Fit.of(links[-1].entry if links else entry, None)
            if entry.base is not None:
                fit = Fit.of(entry, fit)
            versions = tuple(link.version for link in links)
            lines[path] = _line(versions, entry, fit)
        past, fold = _past(record), catalog.find_fold(record.id)
        if fold is not None:
            past = past.with_fold(fold.nbytes, newest=True)
        return cls(record.id, lines, past, record.restores + 1, record.spent, record.stored_paths)

    def folded(self, version: str, nbytes: int) -> Lineage:
        """This lineage, once one of its versions has been folded in so many bytes: chains end there."""
        newest = version == self.version
        if newest:
            lines = {path: replace(line, links=(version,)) for path, line in self.lines.items()}
        else:
            lines = {path: line.until(version) for path, line in self.lines.items()}
        past = None if self.past is None else self.past.with_fold(nbytes, newest=newest)
        return replace(self, lines=lines, past=past)

    def without(self, to_delete: Collection[str]) -> Lineage:
        """This lineage if its chains have none of these versions, else one without chains."""
        return self.alone() if set(self.versions) & set(to_delete) else self

    def find_fold(self, catalog: Catalog, lost: Collection[str]) -> Record | None:
        """The newest fold of its versions that makes those that are `lost` needless, if one can be read."""
        with suppress(BackendError, CheckpointError):
            for version in self.versions:
                fold = catalog.find_fold(version)
                if fold is not None and not set(self.folded(version, fold.nbytes).versions) & set(lost):
                    return fold
        return None

    def alone(self, why: str = "") -> Lineage:
        """This lineage without chains: the next version is whole and depends on no other, and says why."""
        return replace(self, lines={}, past=None, why_alone=why)

    def needs(self, bases: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Every version that deltas of these (path, base) pairs need, newest first."""
        return tuple(
            sorted({version for path, base in bases for version in self.lines[path].over(base)}, reverse=True)
        )


def _line(links: tuple[str, ...], entry: ArrayEntry, fit: Fit) -> ArrayLine:
    return ArrayLine(links, entry.shape, entry.element, lattice_of(entry.codec), entry.move, fit)


def _past(record: Record) -> Past:
    # A version that depends on no other is full, also where no policy asked for it.
    if record.kind == "baseline":
        return Past.of(record.shared_bytes)
    return past_after(record.policy, record.shared_bytes)


def spent_once_restored(record: Record, scales: Mapping[str, float]) -> float:
    """Per cent of the loss that restores cost a run at most which goes on from a version, this one included.

    `scales`: by path, those of tables as they were restored, as far as they are known: training may have moved them
    since the steps were chosen.
    """
    costs = [
        restore_cost(_share(lattice, scales.get(path, 0.0)))
        for path, entry in record.arrays.items()
        if path.endswith("/weight") and (lattice := lattice_of(entry.codec)) is not None
    ]
    return min(record.spent + max(costs, default=0.0), 100.0)


def _share(lattice: LatticeRows, scale: float) -> float:
    """The step as a share of a table's scale: that recorded, unless the scale is another by more than a third."""
    said, step = lattice.rms_step, lattice.step
    if step is None or not scale or (said is not None and 3 / 4 <= said * scale / step <= 4 / 3):
        return said or 0.0
    return step / scale


def check_parents(writes: Sequence[RowsWrite], backend: Backend, seed: int) -> None:
    """Read some parents of relative rows back from the store; where they are not those known, no row is relative.

    64 rows of a save are read, in 4 runs, wherever they fall on its arrays. An array whose parents can't be read is
    written absolute as well, without another try: that costs no more than bytes, and where what it would be relative to
    is damaged or lost, its rows outlive that. So no save fails because this can't read.

    `writes`: of a delta. Of those that no row is to be relative of any more, all parents become unknown.
    `backend`: where the store is.
    `seed`: of the rows that are drawn.
    """
    relative = [
        (each, each.codes) for each in writes if each.codes is not None and each.codes.parent is not None
    ]
    ends = np.cumsum([write.shape[0] if write.ids is None else len(write.ids) for write, _ in relative])
    if not len(ends) or not ends[-1]:
        return
    places = np.random.default_rng(abs(seed)).integers(ends[-1], size=_RUNS)
    runs = dict[int, set[int]]()
    for place, number in zip(
        places.tolist(), np.searchsorted(ends, places, side="right").tolist(), strict=True
    ):
        place -= int(ends[number - 1]) if number else 0
        runs.setdefault(number, set()).add(place // _RUN_ROWS * _RUN_ROWS)
    catalog = Catalog(backend)
    for number, begins in runs.items():
        write, codes = relative[number]
        wrong = _wrong_parents(catalog, write, codes, begins)
        if wrong:
            log.warning("%s: %s. Its rows are written absolute in this save", write.path, wrong)
            codes.forget_parents()


def _wrong_parents(catalog: Catalog, write: RowsWrite, codes: RowCodes, begins: Iterable[int]) -> str:
    """What is wrong with the parents known of runs of rows that begin there; "" for nothing."""
    assert write.base is not None
    try:
        reader = ArrayReader(catalog, catalog.record(write.base), write.path)
        with Transfer(READ_WORKERS, READ_WORKERS) as transfer:
            found = transfer.map(lambda begin: _differing(reader, write, codes, begin), begins)
            wrong = [row for rows in found for row in rows]
    except (BackendError, CheckpointError) as error:
        return f"what version {write.base}, which its delta is relative to, has can't be read back ({error})"
    if not wrong:
        return ""
    return (
        f"version {write.base} has other codes of {len(wrong)} rows, such as row {wrong[0]}, than this process knows, "
        "whose memory may be damaged"
    )


def _differing(reader: ArrayReader, write: RowsWrite, codes: RowCodes, begin: int) -> list[int]:
    """The rows of a run whose codes are not those known."""
    codec = relative_codec(keep_grid(write.codec, None, reader.links[0].move))
    assert codec is not None
    places, known = codes.known(begin, begin + _RUN_ROWS)
    ids = places if write.ids is None else write.ids[places]
    inside = ids < (ids[0] + _RUN_SPAN if len(ids) else 0)
    ids, known = ids[inside], known[inside]
    if not len(ids):
        return []
    need = np.zeros(int(ids[-1] - ids[0]) + 1, np.uint8)
    need[ids - ids[0]] = 1
    out = reader.new_rows(len(need))
    reader.read(int(ids[0]), out, need)
    found = codec.encode_over(
        *(out[ids - ids[0]], None, len(ids), known, np.zeros(len(ids), bool)), element=write.element
    )
    differing: list[int] = ids[~found.coded | (found.codes != known).any(axis=1)].tolist()
    return differing
