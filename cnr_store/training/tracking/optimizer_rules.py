"""Which optimizers move neither rows without a gradient nor the state that they keep for these."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from cnr_store.errors import OptionError
from cnr_store.training.distributed.dtensors import local_of
from cnr_store.training.model.optimizer_state import row_slots

_ROWWISE_ADAGRAD = ("torchrec.optim.rowwise_adagrad", "RowWiseAdagrad")
"""Module and qualified name of torchrec's class, which is recognized without torchrec installed."""

Classes = Collection[type[Optimizer]]


def trusted_classes(classes: object) -> frozenset[type[Optimizer]]:
    """The classes that a caller trusts, without those known here, which are judged by their settings all the same."""
    if not isinstance(classes, Collection):
        raise OptionError(f"trusted_optimizers={classes!r}: give a list of classes")
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            is_class = isinstance(kind, type)
            raise OptionError(
                f"trusted_optimizers holds {'the class' if is_class else 'an object of type'} "
                f"{(kind if is_class else type(kind)).__qualname__}: give subclasses of torch.optim.Optimizer"
            )
    known = (SGD, Adagrad, SparseAdam)
    return frozenset(kind for kind in classes if kind not in known and not _is_rowwise_adagrad(kind))


def may_move_untouched_rows(
    optimizer: Optimizer, position: int, dtype: torch.dtype, trusted: Classes = ()
) -> str | None:
    """Why a step may move rows of `dtype` without a gradient in the parameter group at `position`; None if it can't.

    Only exact classes are believed: those whose update is known, with their present settings, and the caller's
    `trusted` ones with any settings.
    """
    group, kind = optimizer.param_groups[position], type(optimizer)
    where = f"{kind.__name__}, parameter group {position}"
    adagrad = _is_adagrad(kind)
    if kind is SparseAdam:
        return None
    if kind is not SGD and not adagrad:
        return None if kind in trusted else f"{where}: a step of this class may move every row{_advice(kind)}"
    for setting in ("momentum", "weight_decay"):
        if group.get(setting, 0) != 0:
            return f"{where}: {setting}={float(group[setting])} moves rows without a gradient"
    # A step adds -lr * 0.0 to a row without a gradient. Only -0.0 leaves every value as it is: 0.0 turns -0.0 into 0.0,
    # and so does the integer 0, whose negative has no sign.
    rate = group["lr"] if isinstance(group["lr"], int) else float(group["lr"])
    if group.get("maximize") or math.copysign(1, -rate) > 0:
        return f"{where}: maximize or lr={rate} turns -0.0 in rows without a gradient into 0.0"
    if not abs(group["lr"]) <= torch.finfo(dtype).max:
        return f"{where}: lr={float(group['lr'])} times a zero gradient is NaN in {dtype}"
    return _adagrad_moves(group, where, dtype) if adagrad else None


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


def _adagrad_moves(group: dict[str, Any], where: str, dtype: torch.dtype) -> str | None:
    # A subnormal eps counts as zero after ``torch.set_flush_denormal(True)``.
    least = torch.finfo(dtype if dtype == torch.float64 else torch.float32).tiny
    eps, decay, first = (
        float(group.get(name, 0)) for name in ("eps", "lr_decay", "initial_accumulator_value")
    )
    # A row never touched is updated by 0 / (sqrt(0) + eps), computed in the precision of the table.
    if not least <= eps < math.inf or _vanishes(eps, dtype):
        return f"{where}: with eps={eps} in {dtype} rows without a gradient become NaN, or -0.0 in them 0.0"
    if not 0 <= decay < math.inf:
        return f"{where}: with lr_decay={decay} the rate may be negative or NaN, which moves any row"
    if math.copysign(1, first) < 0:
        return f"{where}: initial_accumulator_value={first} becomes 0.0 in rows without a gradient"
    return None


def unsound_sums(
    optimizer: Optimizer, parameter: torch.Tensor, rows: torch.Tensor | None = None
) -> str | None:
    """Why steps may move rows without a gradient by what Adagrad keeps for them; None if they can't.

    The root of a sum that is NaN or negative is NaN, and so becomes what it divides: the zero of a dense gradient, too.
    Steps never make a sum so without the value beside it, which others may have set to a number, or loaded.

    `rows`: those to look at, integers that count from the first row held; None for all.
    """
    kept = optimizer.state.get(parameter, {}).get("sum") if _is_adagrad(type(optimizer)) else None
    if not isinstance(kept, torch.Tensor) or not kept.is_floating_point() or kept.ndim == 0:
        return None
    sums, values = (
        each.reshape(len(each), math.prod(each.shape[1:]))  # a rank may hold no rows
        for each in (local_of(kept).detach(), local_of(parameter).detach())
    )
    if len(sums) != len(values) or sums.shape[1] not in (1, values.shape[1]):
        return None
    if rows is not None:
        at = rows.to(values.device).reshape(-1)
        sums, values = sums[at], values[at]
    # The least of values with a NaN is NaN. Nearly all tables need no more, and no memory for more.
    if not sums.numel() or sums.amin() >= 0:
        return None
    if not (~(sums >= 0) & ~values.isnan()).any():
        return None
    return (
        f"{type(optimizer).__name__} keeps a 'sum' that is NaN or negative for values that are numbers, which a step "
        "with a dense gradient turns into NaN without a gradient of theirs: set these sums to numbers, too"
    )


def _is_adagrad(kind: type) -> bool:
    return kind is Adagrad or _is_rowwise_adagrad(kind)


def _is_rowwise_adagrad(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) == _ROWWISE_ADAGRAD


def _advice(kind: type) -> str:
    """What to do about a class that is not trusted. All of torch's own that are not known here move every row."""
    if kind.__module__.startswith("torch.optim."):
        return ""
    return "; if it never moves rows without a gradient, name it in the Checkpointer's trusted_optimizers"


@functools.lru_cache(maxsize=256)
def _vanishes(eps: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(eps, dtype=dtype, device="cpu") == 0)


def max_version_bumps(optimizer: Optimizer, position: int, trusted: Classes = ()) -> float:
    """How often, at most, a step of a believed optimizer raises the version counter of a parameter in this group.

    The same holds for each of its `written_slots` that was there before the step. It is once, and never with fused
    kernels, which change tensors without counting. More is someone else's change, such as a step hook's. The caller's
    `trusted` classes have no limit.
    """
    if type(optimizer) in trusted:
        return math.inf
    return 0 if optimizer.param_groups[position].get("fused") else 1


def uncounted_groups(
    optimizer: Optimizer, trusted: Classes = (), has_closure: bool = False
) -> Collection[int]:
    """Positions of the groups whose parameters a step changes without torch's counting it.

    The caller's `trusted` classes may do so, too. Their rows are flagged before a step, but for gradients of a closure.
    """
    groups = range(len(optimizer.param_groups))
    if has_closure and type(optimizer) in trusted:
        return groups
    return {position for position in groups if not max_version_bumps(optimizer, position, trusted)}


def written_slots(optimizer: Optimizer, trusted: Classes = ()) -> Collection[str] | None:
    """The slots that steps of a believed optimizer change: another one was changed by someone else.

    None for the caller's `trusted` classes, which may change all.
    """
    kind = type(optimizer)
    if kind in trusted:
        return None
    if kind is SparseAdam:
        return ("exp_avg", "exp_avg_sq")
    return ("sum",) if _is_adagrad(kind) else ()  # SGD without momentum


def may_miss_its_rows(
    optimizer: Optimizer, position: int, parameter: torch.Tensor, gradient: torch.Tensor
) -> bool:
    """Whether a step may move other rows than those of this gradient: fused kernels walk raw memory, not rows."""
    if not optimizer.param_groups[position].get("fused"):
        return False
    return not all(
        each.layout is torch.strided and each.is_contiguous()
        for each in (parameter, gradient, *row_slots(optimizer, parameter).values())
    )


def is_noop_step(optimizer: Optimizer, gradient: torch.Tensor) -> bool:
    """Whether a step skips a parameter with this sparse gradient, because it holds no rows."""
    return type(optimizer) is SparseAdam and not gradient._nnz()
