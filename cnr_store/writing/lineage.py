"""What a writer knows of the versions it continues: each array's chain, and the sizes a policy sees."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cnr_codecs import LatticeRows
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.chains.written_link import WrittenLink
from cnr_store.format.record import Record
from cnr_store.policies.past import Past, Since, past_after
from cnr_store.writing.steps import lattice_of


@dataclass(frozen=True)
class ArrayLine:
    """The chain of one array: the versions that hold its rows, newest first; the last of them is whole.

    Rows that were stored last on a lattice have its codec, whose step the next ones keep.
    """

    links: tuple[str, ...]
    shape: tuple[int, ...]
    element: str
    lattice: LatticeRows | None = None

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
    """The committed version that the next one continues. Empty before the first.

    Attributes
    ----------
    version
        Its id.
    lines
        By array path.
    past
        The last full version and the deltas since, as policies see them; None where there is none to build on.
    restores
        Loads that training has been through.
    paths
        Paths that the arrays of `version` lie under, by their plain ones.
    """

    version: str | None = None
    lines: Mapping[str, ArrayLine] = field(default_factory=dict)
    past: Past | None = None
    restores: int = 0
    paths: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """What tells it from another lineage: ranks must go on from the same one."""
        text = repr((self.version, self.restores, self.past, sorted(self.lines.items())))
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
            lines[path] = ArrayLine(links, entry.shape, entry.element, lattice_of(entry.codec))
        return Lineage(record.id, lines, _past(record), self.restores, record.stored_paths)

    def steps_of(self, record: Record) -> dict[str, float | None]:
        """By path of each array of which `record`, the last one, wrote rows: their step, None without one of all."""
        return {
            path: None if line.lattice is None else line.lattice.step
            for path, line in self.lines.items()
            if record.arrays[path].rows
        }

    @classmethod
    def from_record(cls, catalog: Catalog, record: Record) -> Lineage:
        """The lineage of a run that has just loaded `record`."""
        lines = {
            path: ArrayLine(
                _written_versions(catalog, record, path),
                entry.shape,
                entry.element,
                lattice_of(entry.codec),
            )
            for path, entry in record.arrays.items()
            if entry.kind != "dense"
        }
        past, fold = _past(record), catalog.find_fold(record.id)
        if fold is not None:
            past = past.with_fold(fold.nbytes, newest=True)
        return cls(record.id, lines, past, record.restores + 1, record.stored_paths)

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
        links = {version for line in self.lines.values() for version in line.links}
        return self.alone() if links & set(to_delete) else self

    def alone(self) -> Lineage:
        """This lineage without chains: the next version is whole and depends on no other."""
        return Lineage(self.version, restores=self.restores, paths=self.paths)

    def needs(self, bases: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Every version that deltas of these (path, base) pairs need, newest first."""
        return tuple(
            sorted({version for path, base in bases for version in self.lines[path].over(base)}, reverse=True)
        )


def _written_versions(catalog: Catalog, record: Record, path: str) -> tuple[str, ...]:
    links = ArrayReader(catalog, record, path).links
    return tuple(link.version for link in links if isinstance(link, WrittenLink))


def _past(record: Record) -> Past:
    # A version that depends on no other is full, also where no policy asked for it.
    if record.kind == "baseline":
        return Past.of([record.shared_bytes])
    return past_after(record.policy, record.shared_bytes)
