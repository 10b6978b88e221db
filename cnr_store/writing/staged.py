"""What has been put of a version so far: what its record and its manifest will say."""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np

from cnr_backends import Backend, build_shard
from cnr_codecs.lattice.segments import RowCounts
from cnr_store.errors import SaveError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, add_node, dense_document, dense_grid
from cnr_store.format.manifest import Part
from cnr_store.format.record import ArrayEntry
from cnr_store.ranks.fragments import BytesLike
from cnr_store.writing.plan import DenseWrite, RowsWrite

_NUMBER = np.dtype("<u4")
_MOST_BEGINNING = 0.3
"""Of the time that encoding takes: how long the thread that encodes may write, at most."""


@dataclass
class Staged:
    """What has been put so far, and the seconds that all threads have spent on encoding it."""

    # The arrays of rows of the plan, those on a lattice with the step that was found for them
    rows: Sequence[RowsWrite] = ()
    arrays: dict[str, ArrayEntry] = field(default_factory=dict)
    nodes: dict[str, Doc] = field(default_factory=dict)
    parts: dict[str, dict[int, Part]] = field(default_factory=dict)
    nbytes: int = 0
    encoding_seconds: float = 0.0
    # Of many ranks: the dense arrays that only this one knows of
    own: list[list[Any]] = field(default_factory=list)
    state_sha256: dict[int, str] = field(default_factory=dict)  # by rank, the digest of its part of the state
    # By rank, the bytes that it put, and the seconds that it took for them
    ranks: dict[int, tuple[int, float]] = field(default_factory=dict)
    # By path of an array on a grid, how many rows are stored otherwise than on it, where any are
    counts: dict[str, RowCounts] = field(default_factory=dict)

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
            "counts": self.counts,
        }

    def add(self, vote: Mapping[str, Any]) -> None:
        """Add what another rank put. `SaveError` if both put the same object."""
        for path, parts in vote["parts"].items():
            own = self.parts.setdefault(path, {})
            for index, nbytes, tail in _unpacked(parts):
                if index in own:
                    raise SaveError(f"{path}: two ranks have written object {index}")
                own[index] = Part(nbytes, tail)
        self.nbytes += vote["nbytes"]
        self.state_sha256.update(vote["state"])
        self.ranks.update({rank: (nbytes, seconds) for rank, nbytes, seconds in vote["ranks"]})
        for path, counts in vote["counts"].items():
            self.count(path, [counts])
        for path, shape, dtype, torch_dtype, stored in vote["own"]:
            shaped = np.broadcast_to(np.zeros((), dtype), tuple(shape))  # which takes no memory
            self.note_dense(DenseWrite(path, shaped, torch_dtype))
            self.arrays[path] = replace(self.arrays[path], stored=stored)

    def count(self, path: str, counted: Iterable[Sequence[int]]) -> None:
        """Add how rows of an array are stored."""
        total = RowCounts(*map(sum, zip(self.counts.get(path, RowCounts()), *counted, strict=True)))
        if any(total):
            self.counts[path] = total

    def note_dense(self, dense: DenseWrite) -> Doc:
        """Note a dense array; its document."""
        grid = dense_grid(dense.values.shape, dense.values.dtype)
        doc = dense_document(grid, layout.decode_name(dense.path.rsplit("/", 1)[-1]), dense.torch_dtype)
        add_node(self.nodes, dense.path, doc)
        self.arrays[dense.path] = ArrayEntry(
            "dense", dense.values.shape, grid.dtype.name, aliases=dense.aliases
        )
        return doc


@dataclass(eq=False)
class Object:
    """An object to put. `path` is None for metadata. Its put may be begun by one thread and be finished by another."""

    key: str
    # A shard's chunks, or bytes that are the object. None: only its place is made ready, as it takes time to encode.
    data: bytes | Sequence[BytesLike | None] | None
    path: str | None = None
    index: int = 0
    _begun: Generator[None, None, None] | None = None

    def nbytes(self) -> int:
        """Bytes of memory."""
        return (
            len(self.data) if isinstance(self.data, bytes) else sum(map(len, filter(None, self.data or ())))
        )

    def begin(self, backend: Backend) -> None:
        """Begin the put."""
        self._begun = backend.begin_put(self.key, self._pieces)

    def finish(self, backend: Backend) -> Part | None:
        """Put what is not put yet. Returns what the manifest says of it."""
        if self.data is None:
            backend.prepare(self.key)
            return None
        if self._begun is None:
            backend.put(self.key, self._pieces)
        else:
            deque(self._begun, maxlen=0)
        return Part(sum(map(len, self._pieces)), int.from_bytes(bytes(self._pieces[-1])[-4:], "little"))

    def close(self) -> None:
        """Leave nothing of a put that was begun. No thread may be at it."""
        if self._begun is not None:
            self._begun.close()

    @cached_property
    def _pieces(self) -> Sequence[BytesLike]:
        return [self.data] if isinstance(self.data, bytes) else build_shard(self.data or ())


class Beginnings:
    """Puts that the thread which encodes begins, as it is alone and training goes on beside it.

    One more thread that copies bytes to the page cache would be a third one, and training would wait for it on two
    cores. It does so only while that takes little beside encoding: where writing waits for the storage, a save must not
    take as long as both.
    """

    def __init__(self, backend: Backend, staged: Staged) -> None:
        self._backend, self._staged = backend, staged
        self._begun = WeakSet[Object]()
        self._seconds = 0.0

    def begin(self, objects: Iterable[Object]) -> Generator[Object, None, None]:
        """The objects, to be finished by other threads."""
        for made in objects:
            if made.data is not None and self._seconds <= _MOST_BEGINNING * self._staged.encoding_seconds:
                began = time.perf_counter()
                made.begin(self._backend)
                self._begun.add(made)
                self._seconds += time.perf_counter() - began
            yield made

    def close(self) -> None:
        """Leave nothing of those that were begun and not finished."""
        for made in self._begun:
            made.close()


def _packed(parts: list[tuple[int, int, int]]) -> str:
    """Objects as text of 16 bytes each: rank 0 gets those of all ranks."""
    return base64.b64encode(np.array(parts, _NUMBER).tobytes()).decode()


def _unpacked(text: str) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(base64.b64decode(text), _NUMBER).reshape(-1, 3).tolist()
    return found
