"""What a load brought back beside the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cnr_store.catalog.version_info import VersionInfo, html_facts
from cnr_store.chains.salvage import SalvagedRows
from cnr_store.errors import OptionError

log = logging.getLogger("cnr_store")


@dataclass(frozen=True)
class Restored:
    """What a load brought back beside the model.

    Attributes
    ----------
    version, step
        The version loaded, and its step.
    reader, metadata
        What `save` was given (of a reader object: its `state_dict()`).
    skipped
        Newer versions that were damaged, newest first: id and damage. Empty without ``fallback=True``.
    missing, unexpected
        What was chosen and only the model has, and only the version: names of tables and tensors, and ``state of
        optimizer 0`` or ``state of 'name'`` for what `optimizer` and `state` were not given for, ``state of 'parameter'
        in optimizer 0`` for what an optimizer keeps of one that the saved one did not train. With ``strict="raise"``
        only the latter are possible; all below are empty, too.
    grown
        By table with more rows than are stored: how many were loaded, and how many the model has.
    cast
        By table or tensor of another element type: that of the version, and that of the model.
    salvaged
        With ``salvage=True``, the rows that were damaged or lost, and the versions that their values are from: by
        table, and by ``TABLE/SLOT`` for optimizer state. Where nothing proves which rows a damaged chunk held, all
        that it may have held.
    readers
        Of a version that another number of ranks saved, what each of them gave `save` as reader, by rank. `reader` is
        None then. Empty where the number is that of now.
    """

    version: VersionInfo
    step: int
    reader: Any
    metadata: Any
    skipped: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    salvaged: Mapping[str, SalvagedRows] = field(default_factory=dict)
    readers: tuple[Any, ...] = ()

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return html_facts(own | {"version": self.version.id})


def warn_left_out(restored: Restored, url: str) -> None:
    """Log what a whole load left out, since the next save would drop it in silence."""
    if restored.unexpected:
        log.warning(
            "version %s of %s also holds the %s, which the next save will not have: give Checkpointer the optimizer "
            "and the state={...} that it was saved with, or load with cnr_store.load if only weights are wanted",
            *(restored.version.id, url, ", ".join(restored.unexpected)),
        )


def warn_salvaged(restored: Restored, url: str) -> None:
    """Log which rows have older values than the version's."""
    for name, rows in restored.salvaged.items():
        log.warning(
            "version %s of %s: of %s, %s were damaged or lost and have older values now; the next save is whole",
            *(restored.version.id, url, name, rows),
        )


def warn_readers(restored: Restored, url: str, world: int) -> None:
    """Log that another number of ranks saved readers, since `Restored.reader` is None then."""
    if any(each is not None for each in restored.readers):
        log.warning(
            "version %s of %s: another number of ranks saved readers (%d, and there are %d now), so `reader` of the "
            "result is None: give resume() your reader, or set its position yourself from `readers`, which has the "
            "state of each rank that saved",
            *(restored.version.id, url, len(restored.readers), world),
        )


def restore_reader(restored: Restored, reader: Any, rank: int, world: int) -> None:
    """Give a reader its state back; if other ranks than those of now saved readers, its share of what these had left.

    `rank`, `world`: this process's number, and how many ranks there are.
    """
    where = f"version {restored.version.id}, step {restored.step},"
    others = len(restored.readers) if any(each is not None for each in restored.readers) else 0
    if reader is None:
        if rank == 0 and (others or restored.reader is not None):
            log.warning(
                "%s holds %s, but resume() got no reader: the data continues from your reader's own position",
                *(
                    where,
                    f"readers of another number of ranks ({others})" if others else "the state of a reader",
                ),
            )
        return
    if not others:
        if restored.reader is None:
            raise OptionError(
                f"{where} was saved without a reader, so the position in the data is not known: call resume() without "
                "a reader, and set the reader's position yourself"
            )
        reader.load_state_dict(restored.reader)
        return
    if not callable(split := getattr(reader, "split_state", None)):
        raise OptionError(
            f"{where} holds readers of another number of ranks ({others}, and there are {world} now): "
            f"{type(reader).__name__} has no split_state(states, rank, world) that redistributes them. "
            "Add one, or call resume() without a reader, and set its position yourself"
        )
    reader.load_state_dict(split(list(restored.readers), rank, world))
