"""Checks that a model's tables still are what and where they were when its checkpointer was made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.training.distributed.dtensors import is_dtensor
from cnr_store.training.distributed.torchrec import ShardedModule
from cnr_store.training.distributed.torchrec_lookups import memory_of
from cnr_store.training.model.names import clean_name, wrapper_paths
from cnr_store.training.model.patterns import NOTHING, Exclusion
from cnr_store.training.model.tables import Lookup, check_weight, table_weights

_Layout = dict[str, tuple[int, set[str]]]


class ModelStructure:
    """Which modules of a model have its tables' parameters, and under which names.

    A table that is put in another one's place has no hooks, and what was saved of that one is not its own. Another
    parameter in the same modules is no change here: the tracker follows it.

    `model`: has the tables.
    `sharded`: TorchRec's modules in it. The memory of their tables was noted when they were found, and is to stay.
    `excluded`: tables that are passed over.
    """

    def __init__(
        self, model: nn.Module, sharded: Sequence[ShardedModule] = (), excluded: Exclusion = NOTHING
    ) -> None:
        self._model, self._excluded = model, excluded
        self._modules = list(model.modules())  # kept, or a new module might get the id of an old one
        self._layout = _layout(model, excluded)
        self._spread = _spread(model)
        self._sharded = [(each, memory_of(each.module)) for each in sharded]  # kept, as the modules are

    def check(self) -> None:
        """Look through the model again."""
        layout = _layout(self._model, self._excluded)
        if layout != self._layout:
            raise ModelMismatchError(f"{_difference(self._layout, layout)}; make a new checkpointer")
        for sharded, memory in self._sharded:
            if memory_of(sharded.module) != memory:
                raise ModelMismatchError(
                    f"the tables of {sharded.path or 'the model'!r} lie in other memory than when this checkpointer "
                    "was made, as after DistributedModelParallel.reshard; make a new checkpointer"
                )
        for path in sorted(self._spread ^ (spread := _spread(self._model))):
            now = "a DTensor, spread over ranks," if path in spread else "no DTensor"
            raise UnsupportedModelError(
                f"table {path or 'weight'!r} is {now} and was not so when this checkpointer was made; make a new one"
            )


def _spread(model: nn.Module) -> set[str]:
    """Paths of the modules whose weight is a DTensor."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, Lookup) and is_dtensor(module._parameters.get("weight"))
    }


def _layout(model: nn.Module, excluded: Exclusion) -> _Layout:
    """By stored name of each parameter that is a table: the id of its module, and all names of that parameter."""
    wrappers = wrapper_paths(model)
    modules = list(model.named_modules(remove_duplicate=False))
    names: dict[int, set[str]] = {}
    for path, _, _, weight in table_weights(model, excluded, remove_duplicate=False):
        check_weight(path, weight)
        names[id(weight)] = set()
    layout: _Layout = {}
    for path, module in modules:
        for attribute, parameter in module._parameters.items():
            if id(parameter) in names:
                name = clean_name(f"{path}.{attribute}" if path else attribute, wrappers)
                names[id(parameter)].add(name)
                layout[name] = id(module), names[id(parameter)]
    return layout


def _difference(before: _Layout, now: _Layout) -> str:
    if gone := sorted({*before} - {*now}):
        return f"the model no longer has the table parameter {gone[0]!r} that this checkpointer was made for"
    if new := sorted({*now} - {*before}):
        return (
            f"the model has the table parameter {new[0]!r}, which it had not when this checkpointer was made"
        )
    name = next(name for name in before if before[name] != now[name])
    if before[name][0] != now[name][0]:
        return f"{name!r} of the model is in another module than when this checkpointer was made"
    return f"{name!r} of the model no longer shares one parameter with the same modules"
