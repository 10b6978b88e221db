"""A view of given objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zarr.abc.store import Store

from cnr_store.reading.overlay import Overlay


class FilledStore(Overlay):
    """Objects under any keys, put there by a test. Everything that reads them is the product's."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        Store.__init__(self, read_only=True)
        self.objects = objects
        self._arrays, self._documents = {}, {}

    __repr__ = __str__ = Store.__repr__

    def __reduce__(self) -> Any:
        return object.__reduce__(self)

    def nbytes(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def read(self, key: str, start: int, stop: int) -> bytes:
        return self.objects[key][start:stop]

    def names(self, folder: str) -> Iterable[str]:
        below = f"{folder}/" if folder else ""
        return sorted({key[len(below) :].split("/")[0] for key in self.objects if key.startswith(below)})
