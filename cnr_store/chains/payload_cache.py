"""Proven payloads that are kept for the next reader, within a number of bytes."""

from __future__ import annotations

from cnr_codecs import Payload
from cnr_store.chains.bounded_cache import BoundedCache

Place = tuple[str, int]
"""The key of a shard, and a payload's slot in it."""


class PayloadCache(BoundedCache[Place, Payload]):
    """The payloads used last. Thread-safe.

    Parameters
    ----------
    max_bytes
        What all of them may take. Larger ones are not kept at all.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, _nbytes)


def _nbytes(payload: Payload) -> int:
    # Parameters count twice: decoding keeps them widened to float32, too.
    return sum(
        each.codes.nbytes
        + each.row_set.nbytes
        + each.parameters.nbytes
        + each.parameters.size * 4
        + (0 if each.books is None else each.books.nbytes)
        + (0 if each.coded is None else each.coded.lines.nbytes)
        for each in payload.segments
    )
