"""What exists in a store: committed versions, their records, manifests and states."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from zarr.abc.store import Store

from cnr_backends import Backend, ObjectNotFoundError, Transfer, open_backend
from cnr_store.catalog.objects import list_ids, list_tags, prove_parts, read_object, read_tag
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.errors import CorruptionError, EmptyStoreError, FormatError, VersionNotFoundError
from cnr_store.format import layout
from cnr_store.format.manifest import Manifest, decode_manifest
from cnr_store.format.record import Record
from cnr_store.format.record_document import decode_record
from cnr_store.format.state import loads
from cnr_store.format.validate import check_format, member

log = logging.getLogger("cnr_store")
_ZARR_2_NODES = frozenset({".zgroup", ".zarray", ".zmetadata"})


Url = str | os.PathLike[str] | Store | Backend
"""Where a store is: what `cnr_backends.open_backend` opens."""

Version = str | int | VersionInfo
READ_WORKERS = 16
"""Records that are read at once."""
_MAX_LISTINGS = 50
_MOST_LEARNT = 256
_SHOWN = 5


def _nearest(steps: set[int], step: int) -> str:
    """The steps before and after one."""
    before = max((each for each in steps if each < step), default=None)
    after = min((each for each in steps if each > step), default=None)
    return " and ".join(str(each) for each in (before, after) if each is not None)


class Catalog:
    """The versions of one store. Thread-safe.

    Records and manifests never change, so they are kept once read.

    `backend`: where the store is.

    `shared`: where several ranks read together, the records, manifests and states that were read and proven, by key;
    else None.
    `decoding`: bounds the threads that decode rows at once.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.shared: dict[str, bytes] | None = None
        # Of threads that decode. Each takes turns with the others at the interpreter many times a chunk: more of them
        # would spend their time on turns. Those beyond fetch meanwhile.
        self.decoding = threading.BoundedSemaphore(min(os.cpu_count() or 1, 4))
        # By prefix and version. One operation on a dict is atomic, so these need no lock.
        self._records: dict[tuple[str, str], Record | None] = {}
        self._manifests: dict[tuple[str, str], Manifest] = {}
        self._folded: frozenset[str] | None = None

    def learn(self, other: Catalog, newest: str) -> None:
        """Take over what another catalog of the same store has read up to a version, unless that is many records.

        Later versions are looked up again: what it has read of them may have been removed.
        """
        if other.backend.url == self.backend.url and len(other._records) <= _MOST_LEARNT:
            self._records.update(
                {key: record for key, record in other._records.copy().items() if key[1] <= newest}
            )
            self._manifests.update(
                {key: read for key, read in other._manifests.copy().items() if key[1] <= newest}
            )

    def check_format(self) -> bool:
        """Whether the backend holds a store; False if it holds nothing."""
        number = self.find_format()
        if number is not None:
            check_format(number, self.backend.url)
        return number is not None

    def find_format(self) -> object:
        """The format that the root of a store names, whichever it is; None if the backend holds nothing."""
        backend = self.backend
        try:
            doc = loads(backend.get(layout.ROOT_KEY), f"{backend.url}/{layout.ROOT_KEY}")
        except ObjectNotFoundError:
            _refuse_older_zarr(backend)
            return None
        except FormatError as error:
            raise FormatError(f"{error}; restore that object, or choose another URL") from error
        cnr = member(member(doc, "attributes"), "cnr")
        number = member(cnr, "format")
        if number is None:
            raise FormatError(
                f"{backend.url} holds a Zarr hierarchy that is not a checkpoint store ({layout.ROOT_KEY} has "
                "no attributes.cnr); choose another URL"
            )
        if "id" in cnr:
            raise FormatError(f"{backend.url} is one version of a store; give the URL of the store above it")
        return number

    def ids(self) -> list[str]:
        """Ids of all attempts, newest first. Not all of them were committed."""
        return sorted(list_ids(self.backend, layout.VERSIONS), reverse=True)

    def ids_from_newest(self) -> list[str]:
        """Ids of attempts, newest first, from the newest committed version on; none if nothing was committed.

        A version is removed once a newer one is committed. So one that is removed between its listing and its read
        tells of a newer one, which may be missing in the listing. Where ids without a record are listed before the
        newest version, they are read once more, the smallest first. If still none has a record, and no greater id has
        come, that version was the newest when the first of them was read.
        """
        ids = self.ids()
        for _ in range(_MAX_LISTINGS):
            committed = (number for number, version in enumerate(ids) if self.may_be_committed(version))
            number = next(committed, len(ids))
            if number == 0 or not ids:
                return ids
            came = any(map(self.may_be_committed, reversed(ids[:number])))
            before, ids = ids, self.ids()
            if not came and ids[:1] == before[:1]:
                return before[number:]
        raise VersionNotFoundError(
            f"the versions of {self.backend.url} are removed faster than they can be read; try again, or pin the one "
            "to be read"
        )

    def may_be_committed(self, version: str) -> bool:
        """Whether a version was committed; True if its record is damaged."""
        try:
            return self.find_record(version) is not None
        except (CorruptionError, FormatError):
            return True

    def find_record(self, version: str) -> Record | None:
        """The record of a version, or None if that id was never committed."""
        return self._find(version, layout.VERSIONS)

    def _find(self, version: str, prefix: str) -> Record | None:
        with suppress(KeyError):
            return self._records[prefix, version]
        key = layout.record_key(version, prefix)
        try:
            data = self._read(key, self.backend.get)
        except ObjectNotFoundError:
            return None  # not remembered: it may still be committed
        record = decode_record(data, version, prefix)
        self._note(key, data)
        self._records[prefix, version] = record
        return record

    def _read(self, key: str, read: Callable[[str], bytes]) -> bytes:
        found = None if self.shared is None else self.shared.get(key)
        return read(key) if found is None else found

    def _note(self, key: str, data: bytes) -> None:
        """Share an object, once it is proven: what is not may be read again."""
        if self.shared is not None:
            self.shared[key] = data

    def find_fold(self, version: str) -> Record | None:
        """The record of a version's fold, or None if it has none. Folds are listed once: see `look_for_folds`."""
        if self._folded is None:
            self.look_for_folds()
        return self._find(version, layout.FOLDS) if version in (self._folded or ()) else None

    def look_for_folds(self) -> None:
        """List the folds again: versions may have been folded since, and what they depended on removed."""
        self._folded = list_ids(self.backend, layout.FOLDS)
        # One that was removed and made again has other objects, under the same id.
        for key in list(self._records):
            if key[0] == layout.FOLDS:
                self._records.pop(key, None)

    def refresh(self) -> None:
        """Forget what was read: versions may have been folded or removed since."""
        self._records.clear()
        self._manifests.clear()
        self._folded = None
        if self.shared is not None:
            self.shared = {}

    def pack(self, record: Record) -> bytes:
        """What was read here that the other ranks, too, need of a version."""
        assert self.shared is not None
        versions = {record.id, *record.needs}
        chosen = {key: data for key, data in self.shared.items() if key.split("/")[1] in versions}
        if record.key(layout.state_part(1)) not in chosen:  # each rank reads its own
            chosen.pop(record.key(layout.state_part(0)), None)
        folded = None if self._folded is None else sorted(versions.intersection(self._folded))
        head = json.dumps(
            {"folded": folded, "sizes": {key: len(data) for key, data in chosen.items()}}
        ).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *chosen.values()])

    def unpack(self, data: bytes) -> None:
        """Go by what another rank has packed; what it lacks is read."""
        self.refresh()
        begin = 8 + int.from_bytes(data[:8], "little")
        head, self.shared = json.loads(data[8:begin]), {}
        for key, size in head["sizes"].items():
            self.shared[key] = data[begin : begin + size]
            begin += size
        self._folded = None if head["folded"] is None else frozenset(head["folded"])

    def record(self, version: str) -> Record:
        """The record of a version that must exist. `VersionNotFoundError` if it was never committed."""
        record = self.find_record(version)
        if record is None:
            raise VersionNotFoundError(
                f"{self.backend.url} has no committed version {version}; `cnr_store.versions` and `cnr ls` "
                "list the versions"
            )
        return record

    @contextmanager
    def reading(self, record: Record) -> Iterator[None]:
        """A context for reads of a version: an object that is lost may belong to a version removed meanwhile."""
        try:
            yield
        except CorruptionError as error:
            if not self.is_gone(record.id):
                raise
            raise VersionNotFoundError(
                f"version {record.id} of {self.backend.url} was removed while it was read; read another one, and pin "
                "what must stay"
            ) from error

    def is_gone(self, version: str) -> bool:
        """Whether storage has no record of a version, or a void one, whatever is remembered here."""
        try:
            return Catalog(self.backend).find_record(version) is None
        except (CorruptionError, FormatError):
            return False

    def newest_first(self) -> Iterator[Record]:
        """Committed versions, newest first, read as they are asked for."""
        self.check_format()
        for version in self.ids_from_newest():
            record = self.find_record(version)
            if record is not None:
                yield record

    def oldest_first(self) -> list[Record]:
        """Committed versions, oldest first, several read at once."""
        self.check_format()
        ids = self.ids_from_newest()
        with Transfer(READ_WORKERS, 4 * READ_WORKERS) as transfer:
            return [record for record in transfer.map(self.find_record, reversed(ids)) if record is not None]

    def resolve(self, version: Version) -> str | int:
        """The id that a `VersionInfo` or a tag stands for; an id, a step and ``latest`` as they are."""
        if isinstance(version, VersionInfo):
            return version.id
        if not isinstance(version, str) or version == "latest" or layout.is_version(version):
            return version
        return read_tag(self.backend, version) or version

    def find(self, version: Version = "latest") -> Record:
        """The record of a version.

        `version`: an id, a `VersionInfo`, a step (which means the newest version of that step), a tag or ``latest``.
        """
        version = self.resolve(version)
        if isinstance(version, str) and layout.VersionId.parse(version):
            return self.record(version)
        is_step = isinstance(version, int | np.integer) and not isinstance(version, bool)
        if version != "latest" and not is_step:
            tags = ", ".join(list_tags(self.backend)[:_SHOWN])
            step = f"; a step is a number, without quotes: {version}" if str(version).isdecimal() else ""
            raise VersionNotFoundError(
                f"{version!r} is not a version of {self.backend.url}: give an id as `versions` lists them, a "
                f"step, a tag{f' ({tags})' if tags else ''}, or 'latest'{step}"
            )
        steps = set[int]()
        for record in self.newest_first():
            if version in ("latest", record.step):
                return record
            steps.add(record.step)
        if not steps:
            raise EmptyStoreError(
                f"{self.backend.url} holds no committed version: check the URL, or save one first"
            )
        raise VersionNotFoundError(
            f"{self.backend.url} has no version of step {version} (nearest: {_nearest(steps, int(version))}); "
            "`cnr_store.versions` and `cnr ls` list the versions"
        )

    def manifest(self, record: Record) -> Manifest:
        """The manifest that a record's digest names, of arrays by their plain paths."""
        with suppress(KeyError):
            return self._manifests[record.prefix, record.id]
        data = self.proven(record, "manifest", record.manifest_sha256)
        plain = {stored: path for path, stored in record.moved.items()}
        manifest = decode_manifest(data, record.id).renamed(plain)
        self._manifests[record.prefix, record.id] = manifest
        return manifest

    def state(self, record: Record) -> Any:
        """The state document of a version, as tagged JSON."""
        with self.reading(record):
            data = self.proven(record, "state/main.json", record.state_sha256)
        state = loads(data, f"state of version {record.id}")
        prove_parts(record, state)
        return state

    def proven(self, record: Record, name: str, sha256: str) -> bytes:
        """An object of a version that has this digest. `CorruptionError` if it is lost, or has another."""
        key = record.key(name)
        data = self._read(key, lambda key: read_object(self.backend, key, record.home))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptionError(f"{record.home}: {key} is not what was committed (its digest differs)")
        self._note(key, data)
        return data


def open_record(url: Url, version: Version, /, **storage_options: Any) -> tuple[Catalog, Record]:
    """The catalog of a store, and the record of a version as `Catalog.find` finds it."""
    catalog = Catalog(open_backend(url, **storage_options))
    return catalog, catalog.find(version)


def open_to_change(url: Url, version: Version, /, **storage_options: Any) -> tuple[Catalog, Record]:
    """As `open_record`, for who writes: a version that its id finds may be one of a store of another format."""
    catalog = Catalog(open_backend(url, **storage_options))
    catalog.check_format()
    return catalog, catalog.find(version)


def count_parts(state: Any) -> int:
    """By how many ranks a version was saved; 0 if by one process, which keeps all of its state in one place.

    `state`: from `Catalog.state`, which has proven the digests of the parts.
    """
    return len(state["ranks"]) if isinstance(state, dict) and "ranks" in state else 0


def read_state_part(catalog: Catalog, record: Record, state: Any, rank: int) -> Any:
    """What one rank alone has of the state, as tagged JSON.

    `state`: from `Catalog.state`.
    """
    with catalog.reading(record):
        data = catalog.proven(record, layout.state_part(rank), state["ranks"][rank])
    return loads(data, f"state of rank {rank} in version {record.id}")


def tell_of_no_store(url: str) -> None:
    """Say in the log that a place holds nothing, to whom got an empty answer for it."""
    log.warning("%s holds no store: check the URL, if something was saved there", url)


def _refuse_older_zarr(backend: Backend) -> None:
    # A hierarchy of Zarr version 2 has no object that version 3 looks for, so it would seem empty.
    nodes = sorted(_ZARR_2_NODES.intersection(backend.list_names("")))
    if nodes:
        raise FormatError(
            f"{backend.url} holds a Zarr hierarchy of version 2 ({', '.join(nodes)}), not a checkpoint "
            "store; choose another URL"
        )
