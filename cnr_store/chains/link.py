"""One link of a chain of which a version wrote no row: what all links have in common."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cnr_codecs import Pending, Segment
from cnr_store.chains.allocation import Array
from cnr_store.errors import CorruptionError
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry, Record

PENDING = 2
"""Of `need`: the row is relative in a newer link, and waits for its codes."""


class CompositionError(CorruptionError):
    """Rows that are relative do not fit what lies beneath them."""


class Link:
    """A version, or its fold, in the chain of an array of which it wrote no row.

    `version`, `record`, `path`, `entry`: whose rows they are.
    `parts`: the objects that hold them, `manifest.Part` by linear index of the shard.
    `most_rows`: rows that these have room for.
    `chunk_rows`: rows of a chunk.
    """

    most_rows = 0
    chunk_rows = 1

    def __init__(self, record: Record, path: str, parts: Mapping[int, Part]) -> None:
        self.version, self.record, self.path = record.id, record, path
        self.entry: ArrayEntry = record.arrays[path]
        self.parts = parts

    def fill(self, first_row: int, out: Array, need: Array, pending: Pending | None = None) -> None:
        """Decode into `out` the rows that are needed and written here, and clear their `need`.

        `out`: (n, columns): rows first_row ... first_row + n - 1, in the array's dtype.
        `need`: (n,) uint8, 1 where the row is still to be found; relative rows become `PENDING`, and stay until their
        codes are found.
        `pending`: adds up the n rows that are relative. None where no row may be.
        """

    def take(self, first_row: int, need: Array, pending: Pending | None = None) -> list[Segment]:
        """The rows that are needed and written here, as they are stored; clears their `need`.

        `need`, `pending`: as for `fill`.

        Returns: Segments of a chunk of those n rows.
        """
        return []

    def fill_sound(self, first_row: int, out: Array, need: Array, pending: Pending | None = None) -> Array:
        """As `fill`, but passes over what is damaged or lost.

        Returns: (n,) bool: the rows needed that may be written here and can't be read; they stay needed. Just those
        that are written here where their payloads still prove which these are, else all rows of a chunk. What is
        pending of them is undefined.
        """
        return np.zeros(len(need), bool)

    def take_sound(
        self, first_row: int, need: Array, pending: Pending | None = None
    ) -> tuple[list[Segment], Array]:
        """As `take`, but passes over what is damaged or lost, and returns it as `fill_sound` does."""
        return [], np.zeros(len(need), bool)
