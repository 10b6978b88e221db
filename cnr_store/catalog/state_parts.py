"""The parts of a version's state that each of many ranks saved for itself."""

from __future__ import annotations

from typing import Any

from cnr_store.catalog.catalog import Catalog
from cnr_store.format import layout
from cnr_store.format.record import Record
from cnr_store.format.state import loads


def count_parts(state: Any) -> int:
    """By how many ranks a version was saved; 0 if by one process, which keeps all of its state in one place.

    Parameters
    ----------
    state
        From `Catalog.state`, which has proven the digests of the parts.
    """
    return len(state["ranks"]) if isinstance(state, dict) and "ranks" in state else 0


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
    with catalog.reading(record):
        data = catalog.proven(record, layout.state_part(rank), state["ranks"][rank])
    return loads(data, f"state of rank {rank} in version {record.id}")
