"""Loads the version asked for while retention removes versions; or the newest sound one, if that is damaged.

No version is verified before it is loaded: a load proves whatever it reads, so verifying would read everything twice.
A load that fails half way has overwritten a part of the model, and the next one overwrites all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from cnr_store.catalog.catalog import Catalog, Version
from cnr_store.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    ModelMismatchError,
    VersionNotFoundError,
    listed,
)
from cnr_store.format.layout import VersionId
from cnr_store.format.record import Record
from cnr_store.training.loading.load_result import Restored

log = logging.getLogger("cnr_store")
_MAX_LISTINGS = 5
Load = Callable[[Record], Restored]
Look = Callable[[], None]


def load_newest_sound(catalog: Catalog, version: Version, load: Load, look: Look) -> Restored:
    """Load a version, or the newest one before it that is not damaged, and log what was skipped.

    `load`: loads a whole version, whatever an earlier call has left in the model.
    `look`: called right before each listing that chooses what is loaded.
    """
    return _retry_removed(catalog, version, lambda: _load_first_sound(catalog, version, load), look)


def load_found(catalog: Catalog, version: Version, load: Load, look: Look) -> Restored:
    """Load the version asked for, and no other. `look` as for `load_newest_sound`."""
    return _retry_removed(catalog, version, lambda: load(catalog.find(version)), look)


def _retry_removed(catalog: Catalog, version: Version, load: Callable[[], Restored], look: Look) -> Restored:
    for _ in range(_MAX_LISTINGS - 1):
        look()
        try:
            return load()
        except VersionNotFoundError:
            if version != "latest":
                raise
            # Retention removes a version only once there are newer ones: list again, and do not go back.
            catalog.refresh()
    look()
    return load()


def _load_first_sound(catalog: Catalog, version: Version, load: Load) -> Restored:
    url = catalog.backend.url
    skipped: list[tuple[str, CheckpointError]] = []
    causes: dict[str, list[str]] = {}
    wanted = catalog.resolve(version)
    for name, record in _newest_first(catalog, wanted):
        try:
            restored = _load_version(catalog, name, record, load)
        except (CorruptionError, FormatError, ModelMismatchError) as error:
            mismatch = isinstance(error, ModelMismatchError)
            # After a skipped version a mismatch is no longer raised: its message would promise an unchanged model,
            # which the load of that version may have overwritten.
            if mismatch and not skipped:
                raise
            reason = "does not fit" if mismatch else "is damaged"
            told = causes.setdefault(str(error), [])
            what = f"the same as {told[0]}" if told else error
            log.error("version %s of %s %s and was skipped: %s", name, url, reason, what)
            skipped.append((name, error))
            told.append(name)
        else:
            if skipped:
                log.error(
                    "version %s of %s, step %d, was loaded instead of %s, and training continues from there. To keep "
                    "what was trained after it, stop now, and run `cnr repair`, or call resume(salvage=True)",
                    *(name, url, restored.step, skipped[0][0]),
                )
            return replace(restored, skipped=tuple((name, str(error)) for name, error in skipped))
    if not skipped:
        return load(catalog.find(version))  # raises the error that says what is missing
    damage = "\n".join(
        f"{cause} (version{'s' * (len(names) > 1)} {listed(names, 8)})" for cause, names in causes.items()
    )
    raise CorruptionError(
        f"{url}: nothing could be loaded: {wanted!r} and all versions before it are damaged or do not fit the model, "
        f"which may be partly overwritten now. `cnr verify {url}` shows what can be restored:\n{damage}"
    ) from skipped[0][1]


def _load_version(catalog: Catalog, name: str, record: Record | CheckpointError, load: Load) -> Restored:
    """Load one version; once more if it seems damaged, since a fold may have replaced its chain meanwhile."""
    try:
        if isinstance(record, CheckpointError):
            raise record
        return load(record)
    except (CorruptionError, FormatError) as error:
        catalog.refresh()
        reread = catalog.find_record(name)
        if reread is None:
            raise VersionNotFoundError(
                f"version {name} of {catalog.backend.url} was removed while it was read"
            ) from error
        return load(reread)


def _newest_first(catalog: Catalog, wanted: str | int) -> Iterator[tuple[str, Record | CheckpointError]]:
    """The version asked for and those before it; of one whose record is damaged, the error.

    A damaged record does not tell its step: where a step is asked for, each such version may be the one.
    """
    catalog.check_format()
    names = catalog.ids_from_newest() if wanted == "latest" else catalog.ids()
    if isinstance(wanted, str) and wanted != "latest":
        if VersionId.parse(wanted) is None or wanted not in names:
            return
        names = names[names.index(wanted) :]
    reached = isinstance(wanted, str)
    for name in names:
        try:
            record = catalog.find_record(name)
        except (CorruptionError, FormatError) as error:
            yield name, error
            continue
        if record is None and name == wanted:
            return  # an attempt that never became a version
        reached = reached or (record is not None and record.step == wanted)
        if reached and record is not None:
            yield name, record
