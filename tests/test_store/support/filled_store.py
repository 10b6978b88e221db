"""A virtual store of given objects."""

from __future__ import annotations

from collections.abc import Iterable

from cnr_store.reading.virtual_store import VirtualStore


class FilledStore(VirtualStore):
    """Objects under any keys, put there by a test. Everything that reads them is the product's."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects

    def nbytes(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def read(self, key: str, start: int, stop: int) -> bytes:
        return self.objects[key][start:stop]

    def names(self, folder: str) -> Iterable[str]:
        below = f"{folder}/" if folder else ""
        return sorted({key[len(below) :].split("/")[0] for key in self.objects if key.startswith(below)})
