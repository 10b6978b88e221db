"""Which optimizers move neither rows without a gradient nor the state that they keep for these."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from cnr_store.errors import OptionError
from cnr_store.training.model.names import class_name
from cnr_store.training.model.optimizer_state import row_slots

_ROWWISE_ADAGRAD = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
"""torchrec's class, which is recognized without torchrec installed."""
_WRITTEN: dict[type, Collection[str]] = {SGD: (), Adagrad: ["sum"], SparseAdam: ["exp_avg", "exp_avg_sq"]}
"""The classes whose update is known, as SGD's without momentum, with the slots that their steps change."""

Classes = Collection[type[Optimizer]]


def trusted_classes(classes: object) -> frozenset[type[Optimizer]]:
    """The classes that a caller trusts, without those known here, which are judged by their settings all the same."""
    if not isinstance(classes, Collection):
        raise OptionError(f"tracking.trusted_optimizers={classes!r}: give a list of classes")
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            is_class = isinstance(kind, type)
            raise OptionError(
                f"tracking.trusted_optimizers holds {'the class' if is_class else 'an object of type'} "
                f"{(kind if is_class else type(kind)).__qualname__}: give subclasses of torch.optim.Optimizer"
            )
    return frozenset(kind for kind in classes if _written(kind) is None)


def may_move_untouched_rows(
    optimizer: Optimizer, position: int, dtype: torch.dtype, trusted: Classes = ()
) -> str | None:
    """Why a step may change other rows of `dtype` than hooks know, in the parameter group at `position`.

    None if it can't. Only exact classes are believed: those whose update is known, with their present settings, and
    the caller's `trusted` ones with any settings. The sign of a zero is not looked at.
    """
    group, kind = optimizer.param_groups[position], type(optimizer)
    where = f"{kind.__name__}, parameter group {position}"
    if kind is SparseAdam or kind in trusted:
        return None
    if _written(kind) is None:
        return f"{where}: a step of this class may move every row{_advice(kind)}"
    if group.get("fused"):
        return f"{where}: torch counts no change that a fused step makes"
    limits = torch.finfo(dtype)
    moves = {
        "momentum": group.get("momentum", 0) != 0,
        "weight_decay": group.get("weight_decay", 0) != 0,
        "maximize": bool(group.get("maximize")),
        "lr": not 0 <= group["lr"] <= limits.max,  # times a gradient of zero it is NaN
        "lr_decay": not 0 <= group.get("lr_decay", 0) < math.inf,
        # A row never touched is updated by 0 / (sqrt(0) + eps), computed in the precision of the table.
        "eps": not limits.tiny <= group.get("eps", 1) < math.inf,
    }
    setting = next((setting for setting, moves_rows in moves.items() if moves_rows), None)
    return setting and f"{where}: {setting}={float(group[setting])} moves rows without a gradient"


def unclear_state(optimizer: Optimizer, parameter: torch.Tensor, trusted: Classes) -> str | None:
    """Why it is not known what a trusted class keeps for the rows of `parameter`; None if it is.

    Of a square one, state of another shape than its own may as well be kept for columns.
    """
    if type(optimizer) not in trusted or parameter.shape[0] != parameter.shape[-1]:
        return None
    for slot, value in row_slots(optimizer, parameter).items():
        if value.shape != parameter.shape:
            return (
                f"it has as many rows as columns, and {type(optimizer).__name__} may keep {slot!r} for either"
            )
    return None


def _written(kind: type) -> Collection[str] | None:
    """The slots that steps of a class change whose update is known; None of any other class."""
    return ("sum",) if class_name(kind) == _ROWWISE_ADAGRAD else _WRITTEN.get(kind)


def _advice(kind: type) -> str:
    """What to do about a class that is not trusted. All of torch's own that are not known here move every row."""
    if kind.__module__.startswith("torch.optim."):
        return ""
    return (
        "; if it never moves rows without a gradient, name it in the Checkpointer's option "
        "tracking=cnr_store.Tracking(trusted_optimizers=[...])"
    )


def written_slots(optimizer: Optimizer, trusted: Classes = ()) -> Collection[str] | None:
    """The slots that steps of a believed optimizer change, once each: more was changed by someone else.

    None for the caller's `trusted` classes, which may change all.
    """
    kind = type(optimizer)
    return None if kind in trusted else _written(kind) or ()


def most_changes(optimizer: Optimizer, gradient: torch.Tensor, trusted: Classes = ()) -> float:
    """How often, at most, a step with this gradient raises the version counters of a parameter and of each slot.

    More is someone else's change, such as a step hook's. The caller's `trusted` classes have no limit.
    """
    if type(optimizer) in trusted:
        return math.inf
    return 0 if type(optimizer) is SparseAdam and not gradient._nnz() else 1
