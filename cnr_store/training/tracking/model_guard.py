"""Checks that a model's tables still are what and where they were when its checkpointer was made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cnr_store.errors import ModelMismatchError, listed
from cnr_store.training.distributed.pieces import is_dtensor
from cnr_store.training.distributed.sharded import ShardedModule
from cnr_store.training.distributed.torchrec_door import torchrec
from cnr_store.training.model.names import named_modules
from cnr_store.training.model.patterns import NOTHING, Exclusion
from cnr_store.training.model.tables import check_weight, table_weights

_Layout = dict[str, tuple[int, set[str], bool]]


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
        self._sharded = [(each, torchrec().memory_of(each)) for each in sharded]  # kept, as the modules are

    def check(self) -> None:
        """Look through the model again."""
        layout, known = _layout(self._model, self._excluded), self._layout
        if differing := sorted(name for name in {*layout, *known} if layout.get(name) != known.get(name)):
            raise ModelMismatchError(
                f"table parameters of the model are not what and where they were when this checkpointer was made: "
                f"{listed(differing)}. Each came or went, is in another module, shares its parameter with others, or "
                "is a DTensor only now or only then; make a new checkpointer"
            )
        for sharded, memory in self._sharded:
            if torchrec().memory_of(sharded) != memory:
                raise ModelMismatchError(
                    f"the tables of {sharded.path or 'the model'!r} lie in other memory than when this checkpointer "
                    "was made, as after DistributedModelParallel.reshard; make a new checkpointer"
                )


def _layout(model: nn.Module, excluded: Exclusion) -> _Layout:
    """By stored name of each parameter that is a table: its module's id, all its names, whether it is a DTensor."""
    modules = list(named_modules(model, remove_duplicate=False))
    names: dict[int, set[str]] = {}
    for path, _, _, weight in table_weights(model, excluded, remove_duplicate=False):
        check_weight(path, weight)
        names[id(weight)] = set()
    layout: _Layout = {}
    for path, module in modules:
        for attribute, parameter in module._parameters.items():
            if id(parameter) in names:
                name = f"{path}.{attribute}" if path else attribute
                names[id(parameter)].add(name)
                layout[name] = id(module), names[id(parameter)], is_dtensor(parameter)
    return layout
