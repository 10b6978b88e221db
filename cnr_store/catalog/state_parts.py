"""The parts of a version's state that each of many ranks saved for itself."""

from __future__ import annotations

from typing import Any

from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CorruptionError
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.format.state import loads
from cnr_store.format.validate import texts


def state_digests(record: Record, state: Any) -> tuple[str, ...]:
    """The digests of the parts, by rank; none if one process saved the version.

    Parameters
    ----------
    state
        From `Catalog.state`.

    Raises
    ------
    CorruptionError
        They are malformed.
    """
    try:
        return tuple(texts(state["ranks"], "ranks")) if "ranks" in state else ()
    except (TypeError, ValueError) as error:
        raise CorruptionError(f"state of version {record.id}: {error}") from error


def read_state_part(catalog: Catalog, record: Record, state: Any, rank: int) -> Any:
    """What one rank alone has of the state, as tagged JSON.

    Parameters
    ----------
    state
        From `Catalog.state`.

    Raises
    ------
    CorruptionError, VersionNotFoundError
        It is lost, altered or another one; the version was removed meanwhile.
    """
    digest = state_digests(record, state)[rank]
    with catalog.reading(record):
        data = catalog.proven(record, layout.state_part(rank), digest)
    return loads(data, f"state of rank {rank} in version {record.id}")
