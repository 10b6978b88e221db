"""What has been put of a version so far: what its record and its manifest will say."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, add_node, dense_document, dense_grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry
from cnr_store.writing.plan import DenseWrite, RowsWrite

_NUMBER = np.dtype("<u4")


@dataclass
class Staged:
    """What has been put so far, and the seconds that all threads have spent on encoding it.

    Attributes
    ----------
    rows
        The arrays of rows of the plan, those on a lattice with the step that was found for them.
    own
        Of many ranks: the dense arrays that only this one knows of.
    state_sha256
        By rank, the digest of its part of the state.
    ranks
        By rank, the bytes that it put, and the seconds that it took for them.
    """

    rows: Sequence[RowsWrite] = ()
    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    nodes: dict[str, Doc] = field(default_factory=dict)
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    nbytes: int = 0
    encoding_seconds: float = 0.0
    own: list[list[Any]] = field(default_factory=list)
    state_sha256: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, tuple[int, float]] = field(default_factory=dict)

    def to_vote(self) -> dict[str, Any]:
        """What this rank put, for the rank that commits."""
        parts = {
            path: _packed([(index, part.nbytes, part.tail) for index, part in sorted(parts.items())])
            for path, parts in self.parts.items()
        }
        return {
            "parts": parts,
            "nbytes": self.nbytes,
            "own": [[*own, self.arrays[own[0]].stored] for own in self.own],
            "state": [*self.state_sha256.items()],
            "ranks": [[rank, *wrote] for rank, wrote in self.ranks.items()],
        }

    def add(self, vote: Mapping[str, Any]) -> None:
        """Add what another rank put.

        Raises
        ------
        SaveError
            Both put the same object.
        """
        for path, parts in vote["parts"].items():
            own = self.parts.setdefault(path, {})
            for index, nbytes, tail in _unpacked(parts):
                if index in own:
                    raise SaveError(f"{path}: two ranks have written object {index}")
                own[index] = Part(nbytes, tail)
        self.nbytes += vote["nbytes"]
        self.state_sha256.update(vote["state"])
        self.ranks.update({rank: (nbytes, seconds) for rank, nbytes, seconds in vote["ranks"]})
        for path, shape, dtype, torch_dtype, stored in vote["own"]:
            self.note_dense(DenseWrite(path, _shaped(shape, dtype), torch_dtype))
            self.arrays[path] = replace(self.arrays[path], stored=stored)

    def note_dense(self, dense: DenseWrite) -> Doc:
        """Note a dense array; its document."""
        grid = dense_grid(dense.values.shape, dense.values.dtype)
        doc = dense_document(grid, layout.decode_name(dense.path.rsplit("/", 1)[-1]), dense.torch_dtype)
        add_node(self.nodes, dense.path, doc)
        self.arrays[dense.path] = ArrayEntry(
            "dense", dense.values.shape, grid.dtype.name, aliases=dense.aliases
        )
        return doc


def _packed(parts: list[tuple[int, int, int]]) -> str:
    """Objects as text of 16 bytes each: rank 0 gets those of all ranks."""
    return base64.b64encode(np.array(parts, _NUMBER).tobytes()).decode()


def _unpacked(text: str) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(base64.b64decode(text), _NUMBER).reshape(-1, 3).tolist()
    return found


def _shaped(shape: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
    """An array of that shape and type without memory of its own."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
