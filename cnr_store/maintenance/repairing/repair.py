"""Repairs a version: commits another one with everything of it that can be read, and older values for lost rows.

Rows are moved as they are stored, as a fold moves them. The new version is whole and depends on no other. Nothing is
deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cnr_backends import Transfer
from cnr_store.catalog import claims
from cnr_store.catalog.catalog import Catalog, Url, Version, count_parts, open_to_change, read_state_part
from cnr_store.chains.dense import read_dense
from cnr_store.chains.salvage import SalvagedRows, SalvageReader, salvaged_by_label
from cnr_store.errors import CorruptionError
from cnr_store.format.record import Record
from cnr_store.maintenance.collection.retention import room_advice
from cnr_store.maintenance.folding.folded_array import FoldedArray
from cnr_store.maintenance.objects import Progress, no_progress
from cnr_store.policies.checks import integer
from cnr_store.policies.policy import Decision
from cnr_store.writing.plan import DenseWrite, Plan
from cnr_store.writing.writer import Writer


@dataclass(frozen=True)
class RepairReport:
    """The result of `repair`.

    Attributes
    ----------
    version
        Id of the version that was looked at.
    outcome
        ``sound``: nothing of it is damaged, and nothing was written. ``repairable``: it is damaged, and nothing was
        written as yet. ``repaired``.
    damaged
        The arrays of rows that are damaged: tables, and ``TABLE/SLOT`` for optimizer state. An array of which no row
        has another value is damaged where its values lie in more than one place.
    salvaged
        By damaged array, the rows that were lost, and the versions whose values they have instead.
    repaired
        Id of the version that was committed; None if none was.
    bytes
        What was written for it.
    """

    version: str
    outcome: str
    damaged: tuple[str, ...] = ()
    salvaged: Mapping[str, SalvagedRows] = field(default_factory=dict)
    repaired: str | None = None
    bytes: int = 0


def repair(
    url: Url,
    version: Version = "latest",
    *,
    dry_run: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
    **storage_options: Any,
) -> RepairReport:
    """Commit a sound version in place of a damaged one. Nothing is deleted.

    Every byte that a load of the version reads is read. If some of it is damaged, a new version is written. Rows that
    can't be read have the newest older value in it, and all others are bit for bit the same. It is whole, has the same
    step, and is the newest version from then on.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, or ``latest``.
    dry_run
        Whether to write nothing, and only report what would be lost.
    workers
        Threads that read and write.
    progress
        Called with (rows read, rows in all), on the caller's thread.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it was removed meanwhile.
    CorruptionError
        Something else than rows is damaged, or rows of which no older value can be read. Nothing was written.
    SupersededError
        A writer may be live. Nothing was committed.
    SaveError
        The storage failed. Nothing was committed.
    OptionError
        `workers` is not a positive integer.
    """
    found = Repair(
        url, version, workers, progress or no_progress, is_for_writing=not dry_run, **storage_options
    )
    return found.report if dry_run else found.commit()


class Repair:
    """What is damaged of a version, and the version that repairs it: made by reading it whole.

    `is_for_writing`: whether `commit` is to be called.

    `report`: what was found.
    """

    def __init__(
        self,
        url: Url,
        version: Version,
        workers: int,
        progress: Progress,
        *,
        is_for_writing: bool,
        **storage_options: Any,
    ) -> None:
        workers = integer("workers", workers, minimum=1)
        catalog, self._record = open_to_change(url, version, **storage_options)
        self._writer: Writer | None = None
        if is_for_writing:
            # Before the check: a job that begins after it wins.
            self._writer = Writer(catalog.backend, workers, room_advice=room_advice)
            claims.check_no_live_writer(catalog.backend)
        self._catalog, self._state = catalog, catalog.state(self._record)
        ranks = range(count_parts(self._state))
        self._parts = {rank: read_state_part(catalog, self._record, self._state, rank) for rank in ranks}
        entries = self._record.arrays.items()
        self._dense = [
            _dense(catalog, self._record, path) for path, entry in entries if entry.kind == "dense"
        ]
        self._readers = [
            SalvageReader(catalog, self._record, path) for path, entry in entries if entry.kind != "dense"
        ]
        with Transfer(workers, 2 * workers) as transfer:
            self._read(transfer, progress)
        damaged = [reader for reader in self._readers if reader.damage is not None]
        salvaged = salvaged_by_label(damaged)
        self.report = RepairReport(
            self._record.id,
            "repairable" if damaged else "sound",
            tuple(salvaged),
            {name: rows for name, rows in salvaged.items() if rows is not None},
        )

    def _read(self, transfer: Transfer, progress: Progress) -> None:
        def read(piece: tuple[SalvageReader, tuple[int, int]]) -> int:
            reader, (first_row, rows) = piece
            reader.read(first_row, np.empty((rows, reader.columns), reader.dtype))
            return rows

        done, known = 0, sum(reader.shape[0] for reader in self._readers)
        pieces = ((reader, region) for reader in self._readers for region in reader.regions())
        for rows in transfer.map(read, pieces):
            done += rows
            progress(done, known)

    def commit(self) -> RepairReport:
        """Write the sound version, if something is damaged. Raises as `repair` does."""
        if self._writer is None or self.report.outcome == "sound":
            return self.report
        record = self._record
        self._writer.renew(record.id)
        try:
            written = self._writer.write(self._plan())
        finally:
            self._writer.close()
        return RepairReport(
            record.id,
            "repaired",
            self.report.damaged,
            self.report.salvaged,
            repaired=written.id,
            bytes=written.nbytes,
        )

    def _plan(self) -> Plan:
        record = self._record
        decision = Decision(
            full=True,
            since="baseline",
            policy=str(record.policy.get("policy", "full")),
            past=None,
            reason=f"repaired from {record.id}",
        )
        return Plan(
            step=record.step,
            previous=record.id,
            rows=(),
            dense=self._dense,
            state=self._state,
            state_parts=self._parts,
            policy=asdict(decision) | ({"ranks": {"world": len(self._parts)}} if self._parts else {}),
            restores=record.restores,
            spent=record.spent,
            metadata=record.metadata,
            parent_paths=record.stored_paths,
            moved=[_ShownRows.of(reader, record) for reader in self._readers],
        )


@dataclass(frozen=True)
class _ShownRows(FoldedArray):
    """An array as its reader reads it, if no more of it is lost than was shown."""

    reader: SalvageReader
    shown: int = 0  # how many rows were lost when it was read

    @classmethod
    def of(cls, reader: SalvageReader, record: Record) -> _ShownRows:
        return replace(cls.from_reader(reader, record.arrays[reader.path]), shown=_lost(reader))

    def chunks(self, shard: int, seal: Callable[[int], int]) -> list[bytes | None]:
        chunks = super().chunks(shard, seal)
        if _lost(self.reader) != self.shown:
            raise CorruptionError(
                f"version {self.reader.version}, {self.path}: more rows are lost than were reported; look again"
            )
        return chunks


def _lost(reader: SalvageReader) -> int:
    salvaged = reader.salvaged()
    return 0 if salvaged is None else len(salvaged.rows)


def _dense(catalog: Catalog, record: Record, path: str) -> DenseWrite:
    values, torch_dtype = read_dense(catalog, record, path)
    return DenseWrite(path, values, torch_dtype, record.arrays[path].aliases)
