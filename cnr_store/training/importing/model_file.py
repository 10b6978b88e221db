"""What a file that holds a model holds, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store.errors import FormatError
from cnr_store.format.state_arrays import ArrayLeaf

Array = np.ndarray[Any, Any]
_TABLE_ELEMENTS = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    Attributes
    ----------
    element
        Torch's name of its type.
    values
        Mapped, not read. Unsigned integers with its bits where numpy lacks the type.
    """

    element: str
    values: Array

    @property
    def may_be_table(self) -> bool:
        return self.values.ndim == 2 and self.values.size > 0 and self.element in _TABLE_ELEMENTS


@dataclass(frozen=True)
class ModelFile:
    """What a file holds: tensors by name, further names of the same tensors, and modules' extra state
    with what recognises tensors in it."""

    tensors: Mapping[str, FileTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    as_leaf: Callable[[object], ArrayLeaf | None] = lambda _: None


def clean_names(keys: Iterable[str], what: str = "the file") -> dict[str, str]:
    """The names of a state dict's keys without the prefixes of wrappers.

    Raises
    ------
    FormatError
        Two keys have one name.
    """
    kept = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    while kept and all(name.startswith("module.") for name in kept.values()):
        kept = {key: name.removeprefix("module.") for key, name in kept.items()}
    if len(set(kept.values())) < len(kept):
        raise FormatError(f"{what} has two tensors of one name, once prefixes of wrappers are left out")
    return kept
