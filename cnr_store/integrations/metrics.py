"""Figures of saves, for whatever draws curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cnr_store.errors import OptionError
from cnr_store.training.saving.pending_save import PendingSave

_COUNTED = {"bytes": "By", "rows": "{row}", "fold_bytes": "By", "failed": "{save}"}
"""Units of the figures that add up over saves."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_SPREAD: dict[str, tuple[str, Sequence[float]]] = {
    "share_of_full": ("1", (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1)),
    "seconds_stalled": ("s", _SECONDS),
    "seconds_writing": ("s", _SECONDS),
}
"""Units and bounds of the others, of which each save has one that matters by itself."""
_FIGURES = ("bytes", "rows", "share_of_full", "fold_bytes", "seconds_stalled", "seconds_writing")
_ATTRIBUTES = {"share_of_full": "ratio"}
"""What `SaveStats` calls figures, where the names differ."""


def log_to(writer: Any, prefix: str = "checkpoint/") -> Callable[[PendingSave], None]:
    """What hands the figures of each save to `writer`, on the thread that writes: for `on_done=` of `Checkpointer`.

    Parameters
    ----------
    writer
        TensorBoard's `SummaryWriter`, a run of Weights & Biases, MLflow (the module), Lightning's loggers, or anything
        else with ``add_scalar(name, value, step)``, ``log(figures, step=)`` or ``log_metrics(figures, step=)``. Or a
        meter of OpenTelemetry (extra ``otel``), which gets counters of bytes, rows and failures, and histograms of
        seconds and of the share of a full copy.
    prefix
        Begins each figure's name.

    Raises
    ------
    OptionError
        `writer` has none of these.

    Examples
    --------
    >>> Checkpointer(url, model, optimizer, on_done=log_to(SummaryWriter("runs/7")))  # doctest: +SKIP
    >>> Checkpointer(url, model, optimizer, on_done=log_to(metrics.get_meter("training")))  # doctest: +SKIP
    """
    add_scalar = getattr(writer, "add_scalar", None)
    if callable(add_scalar):

        def log(pending: PendingSave) -> None:
            for name, value in figures(pending, prefix).items():
                add_scalar(name, value, pending.step)

        return log
    if callable(getattr(writer, "create_histogram", None)):
        return _measure_by(writer, prefix)
    # Lightning's logger of MLflow has both.
    log_all = getattr(writer, "log_metrics", None) or getattr(writer, "log", None)
    if not callable(log_all):
        raise OptionError(
            f"a {type(writer).__name__} has none of add_scalar, log and log_metrics: give TensorBoard's SummaryWriter, "
            "something with log(figures, step=), or a meter of OpenTelemetry"
        )
    return lambda pending: log_all(figures(pending, prefix), step=pending.step)


def _measure_by(meter: Any, prefix: str) -> Callable[[PendingSave], None]:
    add = {name: meter.create_counter(prefix + name, unit=unit).add for name, unit in _COUNTED.items()}
    # By default the bounds are those of milliseconds.
    record = {
        name: meter.create_histogram(
            prefix + name, unit=unit, explicit_bucket_boundaries_advisory=bounds
        ).record
        for name, (unit, bounds) in _SPREAD.items()
    }
    measure = {f"{prefix}{name}": function for name, function in (add | record).items()}

    def log(pending: PendingSave) -> None:
        for name, value in figures(pending, prefix).items():
            measure[name](value)

    return log


def figures(pending: PendingSave, prefix: str = "checkpoint/") -> dict[str, float]:
    """The figures of a save that has ended, by name.

    `failed` is 1 for one that failed, which has no others. `seconds_stalled` counts until now while `save` has not
    returned.
    """
    stats = pending.stats
    if stats is None:
        return {f"{prefix}failed": 1.0}
    found = {name: float(getattr(stats, _ATTRIBUTES.get(name, name))) for name in _FIGURES}
    return {f"{prefix}{name}": value for name, value in (found | {"failed": 0.0}).items()}
