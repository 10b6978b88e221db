"""Nodes of Zarr groups by their kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr


def array_of(group: zarr.Group, path: str) -> zarr.Array[Any]:
    """The array at a path of a group."""
    found = group[path]
    assert isinstance(found, zarr.Array)
    return found


def group_of(group: zarr.Group, path: str) -> zarr.Group:
    """The group at a path of a group."""
    found = group[path]
    assert isinstance(found, zarr.Group)
    return found


def values_of(group: zarr.Group, path: str) -> np.ndarray[Any, Any]:
    """All values of the array at a path."""
    return np.asarray(array_of(group, path)[...])
