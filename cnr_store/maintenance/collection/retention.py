"""Retention: which versions are kept, and the removal of all others and of what crashed attempts left.

`docs/design-notes/retention.md` has the argument why nothing that anybody needs goes, whoever is stopped or killed
wherever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from cnr_backends import Backend, Transfer, open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import EmptyStoreError, OptionError
from cnr_store.format import layout
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.maintenance.collection.deletion import Deletion, collectable, freeable
from cnr_store.maintenance.collection.survey import WORKERS, Look, Survey, objects
from cnr_store.reading.opening import Url

GRACE_SECONDS = 3600.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rules:
    """Which versions are asked for. With neither rule all are.

    Attributes
    ----------
    keep_last
        So many of the newest, as `versions` lists them.
    keep_every
        One of every so many steps: the newest at or before each multiple of it.

    Raises
    ------
    OptionError
        One is not a positive integer.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        _check_count("keep_last", self.keep_last)
        _check_count("keep_every", self.keep_every)

    @property
    def remove_nothing(self) -> bool:
        return self.keep_last is None and self.keep_every is None

    def asked_for(self, look: Look) -> Iterator[tuple[str, str]]:
        """(id, reason) of each version asked for. Doomed ones are not counted: they may vanish at any moment."""
        there = [known for name, known in look.versions.items() if name not in look.doomed]
        if self.remove_nothing:
            yield from ((known.id, "no rule") for known in there)
        if self.keep_last is not None:
            yield from ((known.id, f"keep_last={self.keep_last}") for known in there[-self.keep_last :])
        if self.keep_every is not None:
            newest = {-(-known.step // self.keep_every): known.id for known in there}
            yield from ((version, f"keep_every={self.keep_every}") for version in newest.values())


@dataclass(frozen=True)
class GcReport:
    """What retention did, or with `dry_run` would do now.

    Attributes
    ----------
    kept
        By id of each version kept, oldest first, the reason.
    removed
        Ids of the versions removed, oldest first.
    leftovers
        Ids of crashed or failed attempts whose objects were removed.
    freed_bytes
        Bytes of all objects removed.
    stopped
        Why nothing was done, or None.
    dry_run
        Whether this is only what would have been done.
    """

    kept: Mapping[str, str]
    removed: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    freed_bytes: int = 0
    stopped: str | None = None
    dry_run: bool = False


def gc(
    url: Url,
    keep_last: int | None = None,
    keep_every: int | None = None,
    *,
    dry_run: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    progress: Progress | None = None,
    **storage_options: Any,
) -> GcReport:
    """Remove the versions that no rule asks for, and what crashed attempts left.

    Always kept are the newest version, pinned ones, what the newest writer goes on from, and everything that a kept
    version leans on. Without a rule only leftovers go. It may run beside training, beside others like it, and
    after one that was killed, which it finishes.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    keep_last
        Keep so many of the newest versions.
    keep_every
        Keep one version of every so many steps: the newest at or before each multiple of it.
    dry_run
        Change nothing; say what would be removed.
    grace_seconds
        How long ago an attempt must have been given up before its objects are removed.
    progress
        Called with (done, all) ids whose objects are to be removed.
    storage_options
        For the filesystem, as in fsspec.

    Raises
    ------
    OptionError
    EmptyStoreError
        There is no store.
    CorruptionError, FormatError
        A record or the newest claim can't be read, so that nobody knows what is needed. Nothing was removed.
    cnr_backends.BackendError
        The storage failed. Every visible version is whole; the next call finishes what this one began.
    """
    rules, grace = Rules(keep_last, keep_every), _seconds(grace_seconds)
    backend = open_backend(url, **storage_options)
    if not Catalog(backend).check_format():
        raise EmptyStoreError(f"{backend.url} holds no store, so there is nothing to remove: check the URL")
    return Retention(backend, rules, grace).run(dry_run=dry_run, progress=progress)


class Retention:
    """Applies rules to one store, once or again and again.

    Parameters
    ----------
    own
        Whose retention it is: it stops if another claim is the newest. None acts for whoever has the newest.
    """

    def __init__(
        self,
        backend: Backend,
        rules: Rules,
        grace_seconds: float = GRACE_SECONDS,
        own: ClaimId | None = None,
    ) -> None:
        self._backend = backend
        self._rules = rules
        self._grace_seconds = grace_seconds
        self._own = own
        self._survey = Survey(backend, own)
        self._emptied: set[str] = set()

    def run(self, *, dry_run: bool = False, progress: Progress | None = None) -> GcReport:
        """Look, doom, look again, and remove. See `gc` for what it raises."""
        with Transfer(WORKERS, 2 * WORKERS) as transfer:
            look = self._survey.look(transfer, void=not dry_run)
            if stopped := self._stopped(look):
                return GcReport({}, stopped=stopped, dry_run=dry_run)
            kept = choose(look, self._rules)
            victims = [version for version in look.versions if version not in kept]
            if dry_run:
                return self._foretell(look, kept, victims)
            deletion = Deletion(self._backend, transfer, str(self._own or "gc"))
            if victims:
                deletion.doom(victims)
                look = self._survey.look(transfer, void=True)
                stopped = self._stopped(look)
                kept = choose(look, self._rules, staying=look.versions.keys() - victims)
                spared = [version for version in victims if stopped or version in kept]
                deletion.spare(spared)
                if stopped:
                    return GcReport({}, stopped=stopped)
                victims = [version for version in victims if version not in kept and version in look.versions]
                look = self._bury(victims, look, deletion)
            emptied = self._empty(victims, look, deletion, progress)
            leftovers = tuple(version for version in emptied if version not in victims)
            return GcReport(kept, tuple(victims), leftovers, deletion.freed_bytes)

    def _bury(self, victims: Sequence[str], look: Look, deletion: Deletion) -> Look:
        """Make the victims invisible; what there is then."""
        burnt = deletion.bury(victims, look)
        versions = {name: known for name, known in look.versions.items() if name not in burnt}
        return replace(
            look, versions=versions, voided={**look.voided, **burnt}, doomed=look.doomed | burnt.keys()
        )

    def _empty(
        self, victims: Sequence[str], look: Look, deletion: Deletion, progress: Progress | None
    ) -> list[str]:
        """Remove the objects of all burnt ids whose time has come; those that had any."""
        now = time.time()
        due = collectable(look, now, self._grace_seconds)
        full = [version for version in due if version not in self._emptied]
        emptied = []
        for done, version in enumerate(full, 1):
            if deletion.empty(version):
                emptied.append(version)
            self._emptied.add(version)
            if progress is not None:
                progress(done, len(full))
        deletion.free(freeable(look, due, now, self._grace_seconds))
        deletion.tidy(look)
        return emptied

    def _stopped(self, look: Look) -> str | None:
        if self._own is None or self._own == look.newest:
            return None
        return f"writer {self._own} was superseded by {look.newest}; only the newest removes versions"

    def _foretell(self, look: Look, kept: Mapping[str, str], victims: Sequence[str]) -> GcReport:
        due = collectable(look, time.time(), self._grace_seconds)
        nbytes = {
            version: sum(
                nbytes
                for prefix in (layout.VERSIONS, layout.FOLDS)
                for key, nbytes in objects(self._backend, layout.version_key(version, prefix=prefix))
                if version in victims or key != layout.record_key(version)
            )
            for version in (*victims, *due)
        }
        leftovers = tuple(version for version in due if nbytes[version])
        return GcReport(kept, tuple(victims), leftovers, sum(nbytes.values()), dry_run=True)


def choose(look: Look, rules: Rules, staying: Iterable[str] = ()) -> dict[str, str]:
    """The versions to keep, oldest first, each with the reason; those `staying` are there, whatever the rules say."""
    kept: dict[str, str] = {}
    _keep(look, kept, [(version, "the newest") for version in list(look.versions)[-1:]])
    _keep(look, kept, [(version, "pinned") for version in sorted(look.pinned)])
    _keep(look, kept, rules.asked_for(look))
    _keep(look, kept, _leant_on(look))
    _keep(look, kept, [(version, "came meanwhile") for version in sorted(staying)])
    return dict(sorted(kept.items()))


def _keep(look: Look, kept: dict[str, str], wanted: Iterable[tuple[str, str]]) -> None:
    """Add versions, as far as they are there, and everything that they lean on."""
    wanted = [(version, reason) for version, reason in wanted if version in look.versions]
    kept |= {version: reason for version, reason in wanted if version not in kept}
    todo = [version for version, _ in wanted]
    while todo:
        above = todo.pop()
        for version in look.leans_on(above) - kept.keys():
            kept[version] = f"needed by {above}"
            todo.append(version)


def _leant_on(look: Look) -> Iterator[tuple[str, str]]:
    """(id, reason) of what the newest writer may lean on in its next version."""
    if look.newest is None:
        return
    head = max((name for name in look.versions if _claim(name) == look.newest), default=look.base)
    if head is not None:
        reason = f"writer {look.newest} goes on from it"
        yield head, reason
        # Also beneath a fold that its writer has not heard of yet.
        yield from ((need, reason) for need in (look.versions[head].needs if head in look.versions else ()))


def _claim(version: str) -> ClaimId | None:
    attempt = VersionId.parse(version)
    return None if attempt is None else attempt.claim


def _check_count(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise OptionError(f"{name}={value!r}: give an integer of at least 1, or None to keep all")


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise OptionError(f"grace_seconds={value!r}: give a number of seconds, 0 or more")
    return float(value)
