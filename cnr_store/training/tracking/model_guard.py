"""Proves that a model's tables still are what they were, where they were, when its checkpointer was made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cnr_store.errors import ModelMismatchError
from cnr_store.training.model.names import clean_name, wrapper_paths
from cnr_store.training.model.tables import Lookup, check_weight

_Place = tuple[str, int, int]
_Named = dict[str, tuple[int, frozenset[str]]]


class ModelStructure:
    """Where the tables of a model are: which modules have their parameters, under which names.

    A table that is put in another's place has no hooks, and what was saved of that one is not its own. Other
    parameters in the same modules are not meant: those a tracker follows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())  # kept, or another one might get an id of theirs
        self._places = _places(model)
        self._named = _by_name(model, self._places)

    def check(self) -> None:
        """Look through the model again.

        Raises
        ------
        UnsupportedModelError
            A table can't be stored as it is now: its element type, shape, layout or device.
        ModelMismatchError
            A table was added, removed, put elsewhere or is another module's, or modules share parameters otherwise.
        """
        for path, module in self._model.named_modules():
            if isinstance(module, Lookup) and (weight := module._parameters.get("weight")) is not None:
                check_weight(path, weight)
        now = _places(self._model)
        if now == self._places:
            return
        named = _by_name(self._model, now)
        if named != self._named:  # but for wrappers, which change no names
            raise ModelMismatchError(f"{_difference(self._named, named)}; make a new checkpointer")
        self._places, self._modules = now, list(self._model.modules())


def _places(model: nn.Module) -> list[_Place]:
    """Key, id of the module, and number of each parameter that is a table's; a number stands for a parameter."""
    modules = list(model.named_modules(remove_duplicate=False))
    lookups = (module for _, module in modules if isinstance(module, Lookup))
    weights = (module._parameters.get("weight") for module in lookups)
    numbers: dict[int, int] = {}
    for weight in weights:
        if weight is not None:
            numbers.setdefault(id(weight), len(numbers))
    return [
        (f"{path}.{attribute}" if path else attribute, id(module), numbers[id(parameter)])
        for path, module in modules
        for attribute, parameter in module._parameters.items()
        if id(parameter) in numbers
    ]


def _by_name(model: nn.Module, places: Sequence[_Place]) -> _Named:
    """By name without wrappers, the id of the module, and the names that have the same parameter."""
    wrappers = wrapper_paths(model)
    named = [(clean_name(key, wrappers), module, number) for key, module, number in places]
    sharing: dict[int, set[str]] = {}
    for name, _, number in named:
        sharing.setdefault(number, set()).add(name)
    return {name: (module, frozenset(sharing[number])) for name, module, number in named}


def _difference(before: _Named, now: _Named) -> str:
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
