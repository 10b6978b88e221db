"""Saves or loads a model once, without a checkpointer to keep."""

from __future__ import annotations

from typing import Any

from torch import nn

from cnr_store.catalog.catalog import Url, Version, VersionInfo
from cnr_store.training.checkpointer import Checkpointer
from cnr_store.training.loading.load_result import Restored
from cnr_store.training.loading.selection import Selection

_SAVE_OPTIONS = ("reader", "metadata", "full")
_LOAD_OPTIONS = ("tables", "tensors", "rows", "strict")


def save(url: Url, model: nn.Module, optimizer: Any = None, step: int = 0, **options: Any) -> VersionInfo:
    """Save a model once and wait for the commit.

    Parameters
    ----------
    url, model, optimizer, step
        As in `Checkpointer` and its `save`.
    options
        Further options of `Checkpointer` and of its `save`.

    Returns
    -------
    The committed version.

    Raises
    ------
    SaveError
        The save failed. `Checkpointer` and its `save` list further errors.
    """
    of_save = {name: options.pop(name) for name in _SAVE_OPTIONS if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer.save(step, **of_save).result()


def load(
    url: Url,
    model: nn.Module,
    optimizer: Any = None,
    version: Version = "latest",
    fallback: bool = False,
    **options: Any,
) -> Restored:
    """Load a model once, in place.

    Without an optimizer, weights alone are loaded, and what else the version holds is not logged: nothing is saved
    that could drop it.

    Parameters
    ----------
    url, model, optimizer, version, fallback
        As in `Checkpointer` and its `load`.
    options
        Further options of `Checkpointer` and of its `load`.

    Returns
    -------
    The version's step, reader state and metadata, and what was left out.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError, ModelMismatchError, CorruptionError
        As for `Checkpointer.load`. `Checkpointer` lists further errors.
    """
    of_load = {name: options.pop(name) for name in _LOAD_OPTIONS if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        return checkpointer._load_version(version, fallback, Selection.from_options(**of_load))
