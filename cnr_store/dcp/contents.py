"""What a version holds of a state dict: where each tensor lies, and the values that are no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.dense import dense_layout
from cnr_store.errors import CorruptionError
from cnr_store.format import validate
from cnr_store.format.record import Record
from cnr_store.reading.opening import model_arrays
from cnr_store.training.model.tensors import dtype_name, dtype_named

_KEY = "dcp"
"""Of the state document, beside what a `Checkpointer` reads there."""


_TENSORS = list[tuple[str, str, validate.Sizes, str]]
_VALUES = list[tuple[str, Any]]
_PATHS = list[tuple[str, tuple[str | int, ...]]]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a state dict in a version."""

    # Of its array. One of rows has two dimensions there: a tensor of one is stored as a single column.
    path: str
    shape: tuple[int, ...]  # shape, dtype: as in the state dict
    dtype: torch.dtype


@dataclass(frozen=True)
class Contents:
    """A flat state dict in a version."""

    tensors: Mapping[str, StoredTensor]  # by their flat names
    values: Mapping[str, Any]  # everything else, as tagged JSON
    # Where flat names lie in the nested state dict, as planners flatten and nest it
    paths: Mapping[str, tuple[str | int, ...]]

    def to_state(self) -> Any:
        """The state document, as tagged JSON. To a `Checkpointer` it is a model's without optimizers."""
        doc = {
            # Pairs, because a name that begins with a dollar sign would be taken for a tag.
            "tensors": [
                [name, each.path, list(each.shape), dtype_name(each.dtype)]
                for name, each in self.tensors.items()
            ],
            "values": {"$dict": [[name, value] for name, value in self.values.items()]},
            "paths": [[name, list(path)] for name, path in self.paths.items()],
        }
        return {
            "reader": None,
            "objects": {},
            "optimizers": [],
            "extra_state": {},
            "rng": None,
            _KEY: doc,
        }

    @classmethod
    def read(cls, catalog: Catalog, record: Record) -> Contents:
        """What a version holds. Of one that a `Checkpointer` saved, the model's tensors."""
        doc = validate.member(catalog.state(record), _KEY)
        if doc is None:
            return cls(_model_tensors(catalog, record), {}, {})
        try:
            members = ((doc["tensors"], _TENSORS), (doc["values"]["$dict"], _VALUES), (doc["paths"], _PATHS))
            tensors, values, paths = (validate.proven(value, kind, _KEY) for value, kind in members)
            return cls(
                {name: _stored(record, name, *rest) for name, *rest in tensors}, dict(values), dict(paths)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"version {record.id}: what it says of its state dict is malformed: {error}"
            ) from error


def _stored(record: Record, name: str, path: str, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    entry = record.arrays.get(path)
    sizes = validate.sizes(shape, f"the shape of {validate.shown(name)}", 0, range(65))
    if entry is None or entry.shape != (sizes if entry.kind == "dense" or len(sizes) == 2 else (*sizes, 1)):
        raise ValueError(f"{validate.shown(name)} of shape {sizes} is not at {validate.shown(path)}")
    return StoredTensor(path, sizes, dtype_named(dtype))


def _model_tensors(catalog: Catalog, record: Record) -> dict[str, StoredTensor]:
    """The model's tensors of a `Checkpointer`'s version, tied ones by each of their names."""
    tensors = {}
    for name, path in model_arrays(record).items():
        entry = record.arrays[path]
        element = entry.element
        if entry.kind == "dense":
            element = dense_layout(catalog, record, path).torch_dtype or element
        for each in (name, *entry.aliases):
            tensors[each] = StoredTensor(path, entry.shape, dtype_named(element))
    return tensors
