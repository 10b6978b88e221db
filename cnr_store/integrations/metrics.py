"""Figures of saves, for whatever draws curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cnr_store.errors import OptionError
from cnr_store.training.saving.pending_save import PendingSave

_FIGURES = {
    "bytes": "bytes",
    "rows": "rows",
    "share_of_full": "ratio",
    "fold_bytes": "fold_bytes",
    "seconds_stalled": "seconds_stalled",
    "seconds_writing": "seconds_writing",
}
"""Attributes of `SaveStats`, by the names that figures have."""


def log_to(writer: Any, prefix: str = "checkpoint/") -> Callable[[PendingSave], None]:
    """What hands the figures of each save to `writer`, on the thread that writes: for `on_done=` of `Checkpointer`.

    Parameters
    ----------
    writer
        TensorBoard's `SummaryWriter`, a run of Weights & Biases, MLflow (the module), Lightning's loggers, or anything
        else with ``add_scalar(name, value, step)``, ``log(figures, step=)`` or ``log_metrics(figures, step=)``.
    prefix
        Begins each figure's name.

    Raises
    ------
    OptionError
        `writer` has none of these.

    Examples
    --------
    >>> Checkpointer(url, model, optimizer, on_done=log_to(SummaryWriter("runs/7")))  # doctest: +SKIP
    """
    add_scalar = getattr(writer, "add_scalar", None)
    if callable(add_scalar):

        def log(pending: PendingSave) -> None:
            for name, value in figures(pending, prefix).items():
                add_scalar(name, value, pending.step)

        return log
    # Lightning's logger of MLflow has both.
    log_all = getattr(writer, "log_metrics", None) or getattr(writer, "log", None)
    if not callable(log_all):
        raise OptionError(
            f"a {type(writer).__name__} has none of add_scalar, log and log_metrics: give TensorBoard's SummaryWriter, "
            "or something with log(figures, step=)"
        )
    return lambda pending: log_all(figures(pending, prefix), step=pending.step)


def figures(pending: PendingSave, prefix: str = "checkpoint/") -> dict[str, float]:
    """The figures of a save that has ended, by name.

    `failed` is 1 for one that failed, which has no others. `seconds_stalled` counts until now while `save` has not
    returned.
    """
    stats = pending.stats
    if stats is None:
        return {f"{prefix}failed": 1.0}
    found = {name: float(getattr(stats, attribute)) for name, attribute in _FIGURES.items()}
    return {f"{prefix}{name}": value for name, value in (found | {"failed": 0.0}).items()}
