"""How many rows versions have relative to their base."""

from __future__ import annotations

import numpy as np

from cnr_backends import Backend, open_backend
from cnr_codecs import Scheme
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.written_link import WrittenLink, open_link


def count_relative(place: str | Backend, version: str) -> int:
    """The relative rows of all arrays that a version wrote."""
    catalog = Catalog(open_backend(place) if isinstance(place, str) else place)
    record, found = catalog.record(version), 0
    for path, entry in record.arrays.items():
        link = open_link(catalog, record, path) if entry.kind == "delta" else None
        if isinstance(link, WrittenLink):
            every = np.ones(entry.shape[0], np.uint8)
            payloads = (
                payload
                for shard, chunks in link._wanted(0, every).items()
                for _, payload in link._proven(shard, chunks)
            )
            segments = (each for payload in payloads for each in payload.segments)
            found += sum(each.row_set.count for each in segments if each.scheme is Scheme.RELATIVE)
    return found
