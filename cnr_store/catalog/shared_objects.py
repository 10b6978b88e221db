"""Metadata of a store that one rank has read, as bytes for the other ranks of its job."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from cnr_store.format import layout
from cnr_store.format.record import Record


@dataclass
class SharedObjects:
    """Records, manifests and states that were read and proven.

    Attributes
    ----------
    objects
        By key.
    """

    objects: dict[str, bytes] = field(default_factory=dict)

    def pack(self, record: Record, folded: Collection[str] | None) -> bytes:
        """What other ranks need of a version.

        Parameters
        ----------
        folded
            The versions that have folds, None if these were not listed.
        """
        versions = {record.id, *record.needs}
        chosen = {key: data for key, data in self.objects.items() if key.split("/")[1] in versions}
        if record.key(layout.state_part(1)) not in chosen:  # each rank reads its own
            chosen.pop(record.key(layout.state_part(0)), None)
        sizes = {key: len(data) for key, data in chosen.items()}
        head = json.dumps(
            {"folded": None if folded is None else sorted(versions.intersection(folded)), "sizes": sizes}
        ).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *chosen.values()])

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Self, frozenset[str] | None]:
        """The objects that `pack` packed, and the versions that have folds."""
        begin = 8 + int.from_bytes(data[:8], "little")
        head, objects = json.loads(data[8:begin]), {}
        for key, size in head["sizes"].items():
            objects[key] = data[begin : begin + size]
            begin += size
        return cls(objects), None if head["folded"] is None else frozenset(head["folded"])
