"""The state of training at one moment, as plain data that a writer can take its time with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from cnr_store.errors import StateError
from cnr_store.format.layout import dense_path
from cnr_store.format.state import dumps, encode_state
from cnr_store.format.state_arrays import ArrayLeaf
from cnr_store.training.model.dense_state import dense_items, extra_state
from cnr_store.training.model.names import parameter_names, state_names
from cnr_store.training.model.optimizer_state import optimizer_tree
from cnr_store.training.model.rng_state import rng_state
from cnr_store.training.model.row_arrays import RowArray
from cnr_store.training.model.state_leaves import state_of, tensor_leaf
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import array_dtype, dense_numpy, gather
from cnr_store.writing.plan import DenseWrite

Array = np.ndarray[Any, Any]
MAX_METADATA_BYTES = 64 << 10


class StagedRows:
    """Rows copied at the moment of the save."""

    def __init__(self, values: Array) -> None:
        # Not -1 columns: of no rows they can't be told.
        self._values = values.reshape(len(values), math.prod(values.shape[1:]))

    def values(self, begin: int, end: int) -> Array:
        return self._values[begin:end]


class LiveRows:
    """Rows still in the model: they must be taken before training goes on."""

    def __init__(self, tensor: torch.Tensor, ids: Array | None) -> None:
        self._tensor = tensor.detach()
        self._ids = ids

    def values(self, begin: int, end: int) -> Array:
        ids = np.arange(begin, end) if self._ids is None else self._ids[begin:end]
        return gather(self._tensor, ids).reshape(end - begin, -1)


class Staging:
    """Host memory for the rows of a snapshot, used again by the next: fresh memory costs several times a copy.

    At most `limit_bytes` are held; rows beyond that stay where they are (`LiveRows`).
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffers: dict[str, Array] = {}
        self._used_bytes = 0

    def begin(self) -> None:
        """Start a snapshot; the former one's rows may be overwritten."""
        self._used_bytes = 0

    def take(self, array: RowArray, ids: Array | None) -> StagedRows | LiveRows:
        """Copy the rows `ids` (None for all), or leave them where they are if there is no room."""
        rows = array.shape[0] if ids is None else len(ids)
        nbytes = rows * array.row_bytes
        if self._used_bytes + nbytes > self._limit_bytes:
            return LiveRows(array.tensor, ids)
        self._used_bytes += nbytes
        out = (
            self._buffer(array.path, nbytes)
            .view(array_dtype(array.tensor.dtype))
            .reshape(rows, *array.shape[1:])
        )
        if ids is None:
            torch.from_numpy(out).copy_(array.tensor.detach())
        else:
            gather(array.tensor, ids, out)
        return StagedRows(out)

    def _buffer(self, path: str, nbytes: int) -> Array:
        buffer = self._buffers.get(path)
        if buffer is None or len(buffer) < nbytes:
            self._buffers.pop(path, None)
            held = sum(len(other) for other in self._buffers.values())
            if held + nbytes > self._limit_bytes:
                self._buffers.clear()  # views of this snapshot keep what they use
            buffer = self._buffers[path] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


@dataclass
class DenseSnapshot:
    """Copies of all that is not stored by rows."""

    dense: list[DenseWrite] = field(default_factory=list)
    state: Any = None
    metadata: Any = None


def snapshot_dense(
    model: nn.Module,
    tables: Sequence[Table],
    optimizers: Sequence[Optimizer],
    objects: Mapping[str, Any],
    reader: Any,
    metadata: Any,
    rng: bool,
) -> DenseSnapshot:
    """Copy dense tensors, optimizer state, RNG, reader and the state of registered objects.

    Raises
    ------
    StateError
        A state holds something that can't be stored exactly, with its path.
    """
    taken = DenseSnapshot(metadata=encode_metadata(metadata))
    entries = list(dense_items(model, tables))
    tied = [(name, owner) for name, owner, _ in entries if name != owner]
    for name, owner, tensor in entries:
        if name == owner:
            values, torch_dtype = dense_numpy(tensor)
            others = tuple(other for other, of in tied if of == name)
            taken.dense.append(DenseWrite(dense_path("model", name), values, torch_dtype, others))
    names = parameter_names(model)
    tree = {
        "reader": state_of(reader),
        "objects": {name: state_of(value) for name, value in objects.items()},
        "optimizers": [optimizer_tree(optimizer, names, tables) for optimizer in optimizers],
        "extra_state": extra_state(model),
        "rng": rng_state() if rng else None,
    }
    used = {write.path for write in taken.dense}

    def beside(path: str, leaf: ArrayLeaf) -> str:
        parts = [part.strip("'\"") for part in path.strip("[]").split("][")]
        place = dense_path("optim" if parts[0] == "optimizers" else "state", ".".join(parts))
        while place in used:
            place += "~"  # no encoded name holds one
        used.add(place)
        taken.dense.append(DenseWrite(place, leaf.values, leaf.torch_dtype))
        return place

    taken.state = encode_state(tree, beside=beside, as_leaf=tensor_leaf)
    return taken


def encode_metadata(metadata: Any) -> Any:
    """The caller's metadata as tagged JSON; it stands in the commit record, so it must be small."""

    def too_large(path: str, _: ArrayLeaf) -> str:
        raise StateError(f"state{path}: an array of more than 8 KiB; give it through `state=` instead")

    # Under its name, so that errors tell it from the state.
    doc = encode_state({"metadata": metadata}, beside=too_large, as_leaf=tensor_leaf)["metadata"]
    if len(dumps(doc)) > MAX_METADATA_BYTES:
        raise StateError(
            f"metadata takes more than {MAX_METADATA_BYTES >> 10} KiB; give it through `state=` instead"
        )
    return doc


def table_aliases(model: nn.Module, tables: Sequence[Table]) -> dict[str, tuple[str, ...]]:
    """By table name, the other names of its parameter in the state dict."""
    names = state_names(model)
    owners = {id(table.parameter): table for table in tables}
    found: dict[str, tuple[str, ...]] = {table.name: () for table in tables}
    for key, value in model.state_dict(keep_vars=True).items():
        table = owners.get(id(value))
        if table is not None and key != table.key:
            found[table.name] += (names[key],)
    return found
