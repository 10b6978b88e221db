"""Loading what was asked for, while retention removes versions; and the newest sound one where that is damaged.

Each version is loaded rather than verified first: a load proves whatever it reads, so checking before would read
everything twice to learn the same. A load that fails half way has overwritten a part of the model, and the next one
overwrites all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from cnr_store.catalog.catalog import Catalog, Version, VersionInfo
from cnr_store.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    ModelMismatchError,
    VersionNotFoundError,
)
from cnr_store.format.layout import VersionId
from cnr_store.format.record import Record
from cnr_store.training.loading.restored import Restored

log = logging.getLogger("cnr_store")
_LISTINGS = 5


def load_newest_sound(catalog: Catalog, version: Version, load: Callable[[Record], Restored]) -> Restored:
    """Load a version, or the newest one before it that is not damaged, and say so.

    Parameters
    ----------
    load
        Brings a version back whole, whatever an earlier call of it has left behind.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it is removed while it is read.
    ModelMismatchError
        The version asked for does not fit. The model is unchanged.
    CorruptionError
        All are damaged, or don't fit though the first one may have. The model may be partly overwritten.
    cnr_backends.BackendError
        The storage does not answer, which is no damage.
    """
    return _unless_overtaken(catalog, version, lambda: _from_listing(catalog, version, load))


def load_found(catalog: Catalog, version: Version, load: Callable[[Record], Restored]) -> Restored:
    """Load the version that is asked for, and no other.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError
        There is no such version, or it is removed while it is read.
    """
    return _unless_overtaken(catalog, version, lambda: load(catalog.find(version)))


def _unless_overtaken(catalog: Catalog, version: Version, load: Callable[[], Restored]) -> Restored:
    for _ in range(_LISTINGS - 1):
        try:
            return load()
        except VersionNotFoundError:
            if version != "latest":
                raise
            # Removed while it was read, so there are newer ones: no damage, and no reason to go back.
            catalog.refresh()
    return load()


def _from_listing(catalog: Catalog, version: Version, load: Callable[[Record], Restored]) -> Restored:
    skipped: list[tuple[str, CheckpointError]] = []
    for name, found in _newest_first(catalog, version):
        try:
            restored = _load(catalog, name, found, load)
        except (CorruptionError, FormatError) as error:
            log.error("version %s of %s is damaged and was skipped: %s", name, catalog.backend.url, error)
            skipped.append((name, error))
            continue
        except ModelMismatchError as error:
            if not skipped:
                raise
            # Its own word would be that the model is unchanged, which the one skipped before may have overwritten.
            log.error("version %s of %s does not fit and was skipped: %s", name, catalog.backend.url, error)
            skipped.append((name, error))
            continue
        if skipped:
            log.error(
                "version %s of %s, step %d, was loaded instead of %s: what was trained after it is lost",
                *(name, catalog.backend.url, restored.step, skipped[0][0]),
            )
        return replace(restored, skipped=tuple((name, str(error)) for name, error in skipped))
    if not skipped:
        return load(catalog.find(version))  # says what is missing
    wanted = version.id if isinstance(version, VersionInfo) else version
    damage = "\n".join(f"{name}: {error}" for name, error in skipped)
    raise CorruptionError(
        f"{catalog.backend.url}: neither {wanted!r} nor anything before it is sound and fits; the model may be "
        f"partly overwritten:\n{damage}"
    ) from skipped[0][1]


def _load(
    catalog: Catalog, name: str, found: Record | CheckpointError, load: Callable[[Record], Restored]
) -> Restored:
    """Load one version; twice, if it seems damaged: it may have been folded, and what it leant on removed, since."""
    try:
        return load(_sound(found))
    except (CorruptionError, FormatError) as error:
        catalog.refresh()
        again = catalog.find_record(name)
        if again is None:
            raise VersionNotFoundError(
                f"version {name} of {catalog.backend.url} was removed while it was read"
            ) from error
        return load(again)


def _sound(found: Record | CheckpointError) -> Record:
    if isinstance(found, CheckpointError):
        raise found
    return found


def _newest_first(catalog: Catalog, version: Version) -> Iterator[tuple[str, Record | CheckpointError]]:
    """The version asked for and those before it; of one whose record is damaged, the error.

    Of a damaged record nobody knows the step, so where a step is asked for each may be the one.
    """
    catalog.check_format()
    wanted = version.id if isinstance(version, VersionInfo) else version
    begun, by_id = wanted == "latest", isinstance(wanted, str) and VersionId.parse(wanted) is not None
    if isinstance(wanted, str) and not (begun or by_id):
        return  # what was asked for is no version
    for name in catalog.ids():
        if by_id and not begun and name != wanted:
            continue
        try:
            record = catalog.find_record(name)
        except (CorruptionError, FormatError) as error:
            begun = begun or by_id
            yield name, error
            continue
        if record is None:
            if by_id and not begun:
                return  # what was asked for does not exist
            continue
        begun = begun or by_id or record.step == wanted
        if begun:
            yield name, record
