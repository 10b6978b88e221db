"""The contents of a file that holds a model, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store.errors import FormatError
from cnr_store.format.state_arrays import NUMBER_TYPES, Leaf

Array = np.ndarray[Any, Any]
NUMPY_ELEMENTS = frozenset(dtype.name for dtype in NUMBER_TYPES.values())
"""Element types that numpy and Zarr have, too."""

_TABLE_ELEMENTS = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    Attributes
    ----------
    element
        Torch's name of its element type.
    values
        Mapped, not read. Where numpy lacks the type, unsigned integers with the same bits.
    """

    element: str
    values: Array

    @property
    def may_be_table(self) -> bool:
        return self.values.ndim == 2 and self.values.size > 0 and self.element in _TABLE_ELEMENTS


@dataclass(frozen=True)
class ModelFile:
    """The contents of a file.

    Attributes
    ----------
    tensors
        By name; tied ones once.
    aliases
        Further names of tied tensors, and the name that each stands for.
    extra_state
        What modules returned from ``get_extra_state``, by name.
    as_leaf
        Recognises the tensors within `extra_state`.
    step
        The step that the file gives beside the state dict.
    """

    tensors: Mapping[str, FileTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    as_leaf: Callable[[object], Leaf | None] = lambda _: None
    step: int | None = None


def clean_names(keys: Iterable[str], what: str = "the file") -> dict[str, str]:
    """By key of a state dict, its name without the prefixes of wrappers.

    Raises
    ------
    FormatError
        Two keys have the same name.
    """
    names = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) < len(names):
        raise FormatError(f"{what} has two tensors of one name, once prefixes of wrappers are left out")
    return names
