"""A version's metadata, as readers without torch see it, and the figures in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cnr_store.errors import FormatError
from cnr_store.format.state import Json, decode_state


def decode_metadata(doc: Json) -> Any:
    """The metadata that stands in a record. Tensors become numpy arrays. `FormatError` if it can't be decoded."""
    return decode_state(doc, read=_no_array)


def find_figures(doc: Json) -> dict[str, float]:
    """The finite numbers of the metadata that stands in a record, by name.

    A number is one of Python or of numpy, or an array or a tensor that holds just one.

    Raises
    ------
    FormatError
        The metadata can't be decoded.
    """
    metadata = decode_metadata(doc)
    if not isinstance(metadata, dict):
        return {}
    figures = {name: as_figure(value) for name, value in metadata.items() if isinstance(name, str)}
    return {name: figure for name, figure in figures.items() if figure is not None}


def as_figure(value: object) -> float | None:
    """The finite number that a value of the metadata is, None for all else."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the largest float, which has its place in no order of floats
        return None


def _no_array(path: str) -> np.ndarray[Any, Any]:
    raise FormatError(f"metadata refers to an array ({path}); only small values may stand there")
