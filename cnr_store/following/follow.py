"""Following a store: the rows that each newly committed version changes, for those who serve what is trained.

    tables = {}
    for update in cnr_store.follow(url):
        for name, rows, values in update.blocks(): ...

After an update a follower holds the update's version, bit for bit, whatever happened between: see
`cnr_store.reading.changed_rows` for the rule and its proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cnr_backends import Transfer, open_backend
from cnr_codecs import array_dtype
from cnr_store.catalog.catalog import Catalog, Url, Version, tell_of_no_store
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.array_reader import READ_WORKERS
from cnr_store.chains.dense import read_dense
from cnr_store.chains.seen_codes import SeenCodes
from cnr_store.errors import CorruptionError, EmptyStoreError, OptionError, VersionNotFoundError
from cnr_store.format.arrays import parse_dense_document
from cnr_store.format.layout import VersionId
from cnr_store.format.record import Record
from cnr_store.reading.blocks import ArrayInfo, Block
from cnr_store.reading.changed_rows import ChangedRows, Unshared, all_rows, changed_rows, find_unshared
from cnr_store.reading.opening import model_arrays


class Update:
    """The rows that bring a follower to one version.

    They suffice for a follower that holds the version of the update before (or `since`), completely or in part.

    Attributes
    ----------
    version
        The version that the follower then holds.
    arrays
        Its tables and dense tensors by name.
    """

    def __init__(
        self, catalog: Catalog, record: Record, before: _Held, seen: SeenCodes, names: Names
    ) -> None:
        self._catalog, self._seen = catalog, seen
        self._record, self._tables = record, names
        self._paths = model_arrays(record, names)
        self._before: _Held = before
        self._taken = False
        self.version = VersionInfo.from_record(record)
        self.arrays: Mapping[str, ArrayInfo] = {
            name: _info(record, path) for name, path in self._paths.items()
        }

    def __repr__(self) -> str:
        return f"Update({self.version.id}, step {self.version.step})"

    @property
    def whole(self) -> frozenset[str]:
        """Names of the arrays that come whole.

        Arrays that are new, or have another shape or type, are among them; a follower replaces what it holds.
        """
        plan = self._plan()
        return frozenset(name for name in self.arrays if plan.get(name) is None)

    @property
    def removed(self) -> frozenset[str]:
        """Names that the follower may hold and this version no longer has.

        Empty if it is unknown what the follower holds (`since` is None or was deleted): drop what is not in `arrays`.
        """
        held = self._records_held() or () if self._tables is None else ()  # each version has those asked for
        return frozenset(name for record in held for name in model_arrays(record)) - self.arrays.keys()

    def blocks(self) -> Iterator[Block]:
        """Every row whose value at the follower may differ, and every dense tensor, in bounded blocks.

        A block of a table has at most 8 MiB of values (or one row). A row may come twice; writing a block again
        changes nothing. The bytes read are in proportion to the rows that changed.

        Raises
        ------
        VersionNotFoundError
            The version was deleted meanwhile. The next update replaces the blocks that came.
        CorruptionError
            The version is damaged.
        """
        plan = self._plan()
        with self._deleted_or_damaged(), Transfer(READ_WORKERS, READ_WORKERS) as transfer:
            for name, path in self._paths.items():
                if self.arrays[name].is_table:
                    yield from self._rows(name, path, plan.get(name), transfer)
                else:
                    yield Block(name, None, read_dense(self._catalog, self._record, path)[0])
        self._taken, self._before = True, self._held()

    def apply(self, model: Any) -> None:
        """Write the blocks into a torch module, in place.

        Its tables, dense tensors and extra state then equal those of a model that has loaded the version.

        Raises
        ------
        ModelMismatchError
            The model does not fit the version; it is unchanged.
        VersionNotFoundError, CorruptionError
            As from `blocks`. The model is then partly overwritten.
        OptionError
            The update has some tables alone.
        ImportError
            There is no torch.
        """
        if self._tables is not None:
            raise OptionError(f"{self!r} has tables={[*self._tables]} alone: take its blocks()")
        try:
            from cnr_store.following.apply import block_writer
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "Update.apply needs torch: pip install 'cnr-store[torch]'; Update.blocks works without it",
                name="torch",
            ) from error
        with self._deleted_or_damaged():
            write = block_writer(self._catalog, self._record, model)
        write(self.blocks())

    def _rows(self, name: str, path: str, unshared: Unshared | None, transfer: Transfer) -> Iterator[Block]:
        if unshared is not None:
            try:
                for rows, values in self._changed(path, unshared, transfer):
                    yield Block(name, rows, values)
            except (CorruptionError, VersionNotFoundError):
                # Since the plan was made, a version that tells which rows differ may have been removed, or this one's
                # chain folded. All rows are right in any case; damage of this version is raised below.
                self._catalog.refresh()
            else:
                return
        seen = self._seen.blank(path, self._record.arrays[path], self.version.id)
        for rows, values in all_rows(self._catalog, self._record, path, transfer):
            if seen is not None:
                seen.put(rows, values)
            yield Block(name, rows, values)
        if seen is not None:
            self._seen.keep(path, seen)

    def _changed(self, path: str, unshared: Unshared, transfer: Transfer) -> Iterator[ChangedRows]:
        base = unshared.own[-1].arrays[path].base if unshared.own else None
        seen = None if base is None else self._seen.beneath(path, self._record.arrays[path], base)
        changed = list[ChangedRows]()
        for rows, values in changed_rows(self._catalog, self._record, path, unshared, transfer, seen):
            if seen is not None:
                changed.append((rows, seen.codes_of(values)))
            yield rows, values
        if seen is not None:
            seen.put_later(self.version.id, changed)

    def _plan(self) -> dict[str, Unshared]:
        """By table that need not come whole, the versions that tell its changed rows."""
        held = self._records_held()
        if held is None:
            return {}
        plans = {
            name: find_unshared(self._catalog, self._record, path, held)
            for name, path in self._paths.items()
            if self.arrays[name].is_table
        }
        return {name: unshared for name, unshared in plans.items() if unshared is not None}

    def _held(self) -> tuple[str, ...] | None:
        """Ids of the versions that the follower's rows may stem from; None if it may hold anything."""
        before, ids = self._before, set()
        while isinstance(before, Update):
            ids.add(before.version.id)
            # An update that was taken completely left nothing of what was held before.
            before = () if before._taken else before._before
        return None if before is None else tuple(sorted(ids.union(before)))

    def _records_held(self) -> list[Record] | None:
        """Records of the versions held; None if one was deleted, or it is unknown what is held."""
        records = [self._catalog.find_record(version) for version in self._held() or ()]
        held = [record for record in records if record is not None]
        return held if held and len(held) == len(records) else None

    @contextmanager
    def _deleted_or_damaged(self) -> Iterator[None]:
        """Turns the error of a damaged version into another if the version was deleted meanwhile."""
        try:
            yield
        except (CorruptionError, VersionNotFoundError) as error:
            self._catalog.refresh()
            if self._catalog.find_record(self.version.id) is not None:
                raise
            raise VersionNotFoundError(
                f"version {self.version.id} of {self._catalog.backend.url} was deleted while it was read: go on with "
                f"the next update; after a restart, follow with since=[what you held, {self.version.id!r}]"
            ) from error


_Held = Update | tuple[str, ...] | None
Since = Version | Update | Sequence[Version] | None
Names = Sequence[str] | None


def follow(
    url: Url, since: Since = None, *, tables: Names = None, **storage_options: Any
) -> Iterator[Update]:
    """Updates to all versions committed after `since`, oldest first; ends when there is no newer one.

    Where there is no store at all, the log says so.

    Take the updates in this order. One may be skipped or left half taken: the next update includes its rows. To
    continue later, call again with the last version taken completely.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    since
        The version that the follower holds: an id, a `VersionInfo`, or the step of a stored version. If an update
        to another version was cut off, both: ``[held, other]``; if several in a row were, all of them. If None, or if
        one of them was deleted, or the store was put back from a copy, the first update brings everything. In the same
        process, the last `Update` itself, however much of it was taken: it keeps what was read of the store, and the
        codes of rows that later ones may be relative to.
    tables
        Names of tables, which each version must have: all else, also what is dense, is left out and not read.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    VersionNotFoundError
        `since` names no version that is or was in the store.
    EmptyStoreError
        The store that had `since`, or an update before, has no versions any more. It may come while updates are taken.
    OptionError
        `since` is empty, or an `Update` without some of `tables`; or, as they are taken, a version has no such table.
    FormatError, cnr_backends.OpenError
    """
    catalog = Catalog(open_backend(url, **storage_options))
    if not catalog.check_format() and since is None:
        tell_of_no_store(catalog.backend.url)
    if since is None:
        return _updates(catalog, None, "", SeenCodes(), tables)
    if isinstance(since, Update):
        if since._tables is not None and (tables is None or {*tables} - {*since._tables}):
            raise OptionError(f"{since!r} has tables={[*since._tables]} alone: give no others")
        catalog.learn(since._catalog, since.version.id)
        return _updates(catalog, since, since.version.id, since._seen, tables)
    versions = list(since) if isinstance(since, Iterable) and not isinstance(since, str) else [since]
    if not versions:
        raise OptionError("since=[]: give the version held, or None if there is none")
    held = tuple(_id(catalog, version) for version in versions)
    # From the oldest on, so that the update that was cut off comes again if its version still exists.
    return _updates(catalog, held, min(held), SeenCodes(), tables)


def _id(catalog: Catalog, version: Version) -> str:
    if isinstance(version, VersionInfo):
        return version.id
    if isinstance(version, str) and VersionId.parse(version):
        return version
    return catalog.find(version).id


def _updates(catalog: Catalog, before: _Held, newest: str, seen: SeenCodes, names: Names) -> Iterator[Update]:
    while True:
        listed_after, ids = newest, catalog.ids()
        for version in reversed(ids):
            record = catalog.find_record(version) if version > newest else None
            # None if it was seen already, never committed, not yet, or deleted since it was listed.
            if record is not None:
                newest = version
                before = update = Update(catalog, record, before, seen, names)
                yield update
        if newest != listed_after:
            continue
        if newest and not ids:
            raise EmptyStoreError(
                f"{catalog.backend.url} holds no version any more, though {newest} was there: see that the place is "
                "still mounted; to follow a store that begins anew there, call without since"
            )
        if newest in ids or not newest:
            return
        # Retention never removes the newest version: the store was put back from a copy, or made anew.
        before, newest, seen = None, "", SeenCodes()


def _info(record: Record, path: str) -> ArrayInfo:
    entry = record.arrays[path]
    if entry.kind != "dense":
        return ArrayInfo(entry.shape, array_dtype(entry.element), entry.element, True, entry.aliases)
    grid = parse_dense_document(record.nodes.get(path, {}), f"version {record.id}, {path}")
    return ArrayInfo(grid.shape, grid.dtype, grid.torch_dtype or grid.dtype.name, False, entry.aliases)
