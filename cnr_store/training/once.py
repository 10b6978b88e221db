"""Saves or loads a model once, without a checkpointer to keep."""

from __future__ import annotations

from typing import Any

from torch import nn

from cnr_store.catalog.catalog import Url, Version
from cnr_store.catalog.fencing import Seen
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.errors import OptionError
from cnr_store.format.layout import VersionId
from cnr_store.options import own_keywords
from cnr_store.training.checkpointer import Checkpointer
from cnr_store.training.loading.load_result import Restored
from cnr_store.training.loading.match import Selection
from cnr_store.writing.lineage import Lineage

_SAVE_OPTIONS = ("reader", "metadata", "full")
_LOAD_OPTIONS = ("tables", "tensors", "rows", "strict")


@own_keywords(Checkpointer, _SAVE_OPTIONS)
def save(
    url: Url,
    model: nn.Module,
    optimizer: Any = None,
    step: int = 0,
    *,
    after: str | VersionInfo | None = None,
    **options: Any,
) -> VersionInfo:
    """Save a model once and wait for the commit.

    The save is refused if another process claimed the store, or saved there, since this process last loaded from that
    URL or saved there. A process that did neither goes on from whatever is there.

    Parameters
    ----------
    url, model, optimizer, step
        As in `Checkpointer` and its `save`.
    after
        The version that this one continues: an id or a `VersionInfo`. The save is refused if another process claimed
        the store, or saved there, since that version. Retention may remove that version and those before it.
    options
        Further options of `Checkpointer` and of its `save`.

    Returns
    -------
    The committed version.

    Raises
    ------
    SaveError
        The save failed. `Checkpointer` and its `save` list further errors.
    SupersededError
        Another process went on from what this one continues. Nothing was made.
    OptionError, VersionNotFoundError
        `after` is no id, or there is no such version.
    """
    of_save = {name: options.pop(name) for name in _SAVE_OPTIONS if name in options}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        if after is None:
            checkpointer._saves.writer.resume_last()
        else:
            _continue(checkpointer, after)
        return checkpointer.save(step, **of_save).result()


def _continue(checkpointer: Checkpointer, after: object) -> None:
    """Let the first save continue a version that was not loaded: it is whole, and names that one as the previous."""
    if not isinstance(after, VersionInfo) and not (isinstance(after, str) and VersionId.parse(after)):
        raise OptionError(
            f"after={after!r}: give the id or the VersionInfo of the version that this one continues"
        )
    record = checkpointer._catalog.find(after)
    checkpointer._saves.writer.restart(record.id, Seen())
    lineage = Lineage(record.id, restores=record.restores, spent=record.spent)
    checkpointer._saves.planner.continue_from(lineage, {})


@own_keywords(Checkpointer, _LOAD_OPTIONS)
def load(
    url: Url,
    model: nn.Module,
    optimizer: Any = None,
    version: Version = "latest",
    fallback: bool = False,
    *,
    salvage: bool = False,
    **options: Any,
) -> Restored:
    """Load a model once, in place.

    Without an optimizer, weights alone are loaded, and what else the version holds is not logged: nothing is saved
    that could drop it.

    Parameters
    ----------
    url, model, optimizer, version, fallback, salvage
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
        selection = Selection.from_options(**of_load)
        return checkpointer._load(version, fallback, selection, salvage, goes_on=False)
