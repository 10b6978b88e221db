"""What first moments of optimizers still do to weights: values that do too little are stored as 0.

A first moment moves its weight at each step, also where no gradient follows, and decays. What it still does in all, the
*displacement to come*, is known of classes whose update is known. Where it is below a quarter of a step of the weights'
lattice, the value is dropped: the weight itself is rounded by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from cnr_codecs import LatticeRows, RowCodec
from cnr_store.format.layout import slot_path
from cnr_store.training.model.optimizer_state import row_slots
from cnr_store.training.model.row_arrays import Drop, RowArray, SlotNames, sampled_scale
from cnr_store.writing.row_codes import gridded_codec

_SHARE = 1 / 4
"""Of a step of the weights. With 1/2 restores cost a run with momentum twice the loss, with 1/16 a quarter of it."""
_LOW = 1 / 10
"""Of a run's largest rate. Below it, as where a schedule passes 0, moments do little now and may do more later."""
_LEAST, _MOST = 1e-30, 1e30
"""Of factors: float32 holds them."""

_ADAMS = (Adam, AdamW, NAdam, RAdam)
_MOMENTUM = (SGD, RMSprop)
_UNRECTIFIED = 5
"""RAdam divides by no second moment while its average is no longer than so many steps."""

Factors: TypeAlias = list[Any]
"""Of a first moment: the path of what its steps are divided by the root of, if there is one; numbers as in `Drop`."""


class _Rule(NamedTuple):
    """What a first moment still displaces at a rate of 1: `gain` times it, over the root times `root`, plus `floor`."""

    slots: Sequence[str]  # its key, and that of what its steps are divided by the root of, if there is one
    gain: float
    root: float = 0.0
    floor: float = 1.0


class Moments:
    """Judges the first moments of optimizers, one save at a time.

    `names`: the optimizers, and what the store calls their state.
    """

    def __init__(self, names: SlotNames) -> None:
        self._names = names
        self._rates: dict[tuple[int, int], float] = {}  # the largest at a save, by optimizer and group

    def judge(
        self,
        arrays: Sequence[RowArray],
        wanted: Collection[str],
        codec_of: Callable[[RowArray], RowCodec],
    ) -> dict[str, Factors | None]:
        """By path, which values of those `wanted` of the arrays are to be dropped; None where that is not known.

        `codec_of`: gives the codec of a weight, with the step of its lattice as far as that is known.
        """
        found: dict[str, Factors | None] = {
            array.path: None for array in arrays if array.path in wanted and array.table.local_rows
        }
        weights = {id(array.table.parameter): array for array in arrays if array.is_weight}
        for optimizer, group, rate in self._groups():
            for parameter in group["params"] if rate else ():
                weight = weights.get(id(parameter))
                slots = row_slots(optimizer, parameter) if weight else {}
                rule = _rule(type(optimizer), group, optimizer.state[parameter]) if slots else None
                if weight is None or rule is None or not {*rule.slots} <= slots.keys():
                    continue
                name = weight.table.name
                paths = [slot_path(name, self._names.name(name, optimizer, key)) for key in rule.slots]
                if paths[0] not in found or len({slots[key].shape for key in rule.slots}) > 1:
                    continue
                scale = rate * rule.gain / (_SHARE * (_step(weight, codec_of(weight)) or math.inf))
                if _LEAST < scale < _MOST:
                    found[paths[0]] = [*paths[1:], scale, rule.root, rule.floor]
        return found

    def _groups(self) -> Iterator[tuple[Optimizer, Mapping[str, Any], float]]:
        """The groups of optimizers, and the rate that each is judged at: 0 if at none."""
        for place, optimizer in enumerate(self._names.optimizers):
            if optimizer in self._names.kept_whole:
                continue
            for position, group in enumerate(optimizer.param_groups):
                now, first = (_number(group.get(key, 0)) for key in ("lr", "initial_lr"))
                most = max(now, first, self._rates.get((place, position), 0.0))
                self._rates[place, position] = most
                yield optimizer, group, most if now > 0 and now >= _LOW * most else 0.0


def merge(said: Sequence[Mapping[str, Factors | None]]) -> dict[str, Factors | None]:
    """What all ranks go by, of what `Moments.judge` gave each: what the first of those with rows found, if all did."""
    found = {path: factors for each in reversed(said) for path, factors in each.items()}
    return {path: own if all(each.get(path, own) for each in said) else None for path, own in found.items()}


def dropping(arrays: Sequence[RowArray], factors: Mapping[str, Factors | None]) -> list[RowArray]:
    """The arrays, with what first moments are to be stored without, as `Moments.judge` found."""
    by_path = {array.path: array for array in arrays}

    def judged(array: RowArray) -> RowArray:
        found = factors.get(array.path)
        if found is None:
            return array
        *second, scale, root, floor = found
        return replace(array, drop=Drop(by_path[second[0]] if second else None, scale, root, floor))

    return [judged(array) for array in arrays]


def _rule(kind: type, group: Mapping[str, Any], state: Mapping[str, Any]) -> _Rule | None:
    """What a class does with its first moment, by its present settings; None if it is not known."""
    if kind in _MOMENTUM:
        momentum = _number(group.get("momentum"))
        return _Rule(["momentum_buffer"], momentum / (1 - momentum)) if 0 < momentum < 1 else None
    if kind not in _ADAMS:
        return None
    first, second = map(_number, group["betas"])
    count, eps = _number(state.get("step")), _number(group["eps"])
    # The root decays, too, and slower, or what a moment displaces has no end.
    if not (0 <= first < math.sqrt(second) < 1 and count >= 1 and 0 <= eps < _MOST):
        return None
    unbiased = 1 - second**count
    if kind is RAdam and 2 / (1 - second) - 1 - 2 * count * second**count / unbiased <= _UNRECTIFIED:
        return None
    gain = 1 / (1 - first / math.sqrt(second)) / (1 - first**count)
    divisor = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    return _Rule(["exp_avg", divisor], gain, 1 / math.sqrt(unbiased), eps)


def _step(weight: RowArray, codec: RowCodec) -> float | None:
    """The step of a table's lattice; None without one. Before its first version it is found by some of the rows."""
    lattice = gridded_codec(codec)
    if not isinstance(lattice, LatticeRows):
        return None
    if lattice.step is not None:
        return lattice.step
    scale = sampled_scale(weight, step=0.0)
    return lattice.step_of(scale) if scale else None


def _number(value: Any) -> float:
    """A setting, which may be a tensor; 0 if it is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return 0.0
    return number if math.isfinite(number) else 0.0
