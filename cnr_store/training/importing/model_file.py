"""The contents of a file that holds a model, whatever wrote it; those of a safetensors file are read here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store.errors import FormatError
from cnr_store.format.safetensors import LENGTH, MAX_HEADER_BYTES, decode_header
from cnr_store.format.state_arrays import NUMBER_TYPES, Array, Leaf

NUMPY_ELEMENTS = frozenset(dtype.name for dtype in NUMBER_TYPES.values())
"""Element types that numpy and Zarr have, too."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    element: str  # Torch's name of its element type
    values: Array  # mapped, not read. Where numpy lacks the type, unsigned integers with the same bits.


@dataclass(frozen=True)
class ModelFile:
    """The contents of a file."""

    tensors: Mapping[str, FileTensor]  # by name; tied ones once
    # Further names of tied tensors, and the name that each stands for
    aliases: Mapping[str, str] = field(default_factory=dict)
    # What modules returned from ``get_extra_state``, by name
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    as_leaf: Callable[[object], Leaf | None] = lambda _: None  # recognises the tensors within `extra_state`
    step: int | None = None  # the step that the file gives beside the state dict
    module_versions: Mapping[str, int] | None = None  # as `StoredState.module_versions`


def clean_names(keys: Iterable[str], what: str = "the file") -> dict[str, str]:
    """By key of a state dict, its name without the prefixes of wrappers."""
    names = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) < len(names):
        raise FormatError(f"{what} has two tensors of one name, once prefixes of wrappers are left out")
    return names


_COMPARED_BYTES = 8 << 20


def read_safetensors_file(file: int, path: str) -> ModelFile:
    """The tensors of the open file descriptor `file`; errors name `path`."""
    nbytes = os.fstat(file).st_size
    length = LENGTH.unpack(os.pread(file, LENGTH.size, 0))[0] if nbytes >= LENGTH.size else 0
    start = LENGTH.size + length
    if not 2 <= length <= MAX_HEADER_BYTES or start > nbytes:
        raise FormatError(f"{path} is neither a safetensors file nor one of torch.save (since torch 1.6)")
    header = decode_header(os.pread(file, length, LENGTH.size), nbytes - start, path)
    data = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    # A file that was exported from a store has the stored names already.
    names = {key: key for key in header.tensors} if header.is_ours else clean_names(header.tensors)
    tensors, aliases = {}, {}
    for key, place in header.tensors.items():
        dtype = np.dtype(place.element if place.element in NUMPY_ELEMENTS else f"u{place.itemsize}")
        values: Array = np.ndarray(place.shape, dtype.newbyteorder("<"), data, start + place.begin)
        tensors[names[key]] = FileTensor(place.element, values)
    for alias, key in header.aliases.items():
        # Compared, because a tool that changed one of the tensors may have kept the note that they are tied.
        if _same_bytes(tensors[names[alias]].values, tensors[names[key]].values):
            aliases[names[alias]] = names[key]
    return ModelFile({name: each for name, each in tensors.items() if name not in aliases}, aliases)


def _same_bytes(one: Array, other: Array) -> bool:
    """Whether two mapped tensors of one type and shape hold the same bits, compared piece by piece."""
    left, right = (values.reshape(-1).view(np.uint8) for values in (one, other))
    pieces = (slice(first, first + _COMPARED_BYTES) for first in range(0, len(left), _COMPARED_BYTES))
    return all(np.array_equal(left[piece], right[piece]) for piece in pieces)
