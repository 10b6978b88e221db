"""Gives modules what was loaded as torch's ``load_state_dict`` does: through their hooks and loaders of their own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from cnr_store.errors import ModelMismatchError
from cnr_store.training.distributed.pieces import is_dtensor, local_of
from cnr_store.training.loading.match import Match
from cnr_store.training.loading.validate_state import PARTLY, accepted
from cnr_store.training.model.dense_state import EXTRA_STATE, Loaders, is_overridden, state_root, users_hooks
from cnr_store.training.model.names import clean_name, state_names, wrapper_paths
from cnr_store.training.model.tables import Table
from cnr_store.training.tracking.table_tracker import VersionCounter


class ModuleLoad:
    """One load of a state dict in which what is in place already stands for itself, so that nothing of it is copied.

    `match`: how the model and the version differ. The state dict is to be without what is `absent`.
    `values`: what is not in place, by stored name: tensors, and extra state. All else is, and the tables are filled.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], match: Match, values: Mapping[str, Any]
    ) -> None:
        absent, self._strict = match.absent, match.selection.whole
        self._model, self._where = model, match.where
        self._loaders = loaders = match.loaders or Loaders(model)
        self._tables = {id(table.parameter): table for table in tables}
        self._state = model.state_dict(keep_vars=True)  # kept, so that no other tensor gets one's id
        self._metadata: dict[str, Any] = {**getattr(self._state, "_metadata", {})}
        if match.versions is not None:
            wrappers = wrapper_paths(model)
            for key, own in self._metadata.items():  # a hook of state_dict may have put more there
                self._metadata[key] = {**own, "version": match.versions.get(clean_name(key, wrappers), 1)}
        given: dict[str, Any] = {}
        stands: dict[int, Any] = {}  # by id of what the model has, which may have several names: its entry
        self._in_place: dict[int, Any] = {}  # of these, what is the model's own memory
        names = state_names(model, self._state)
        told = {*values, *absent}
        self._wanted = {key for key in names if key.rpartition(".")[2] != EXTRA_STATE or names[key] in told}
        for key, present in self._state.items():
            if key in self._wanted and names[key] not in absent:
                if id(present) not in stands:
                    stands[id(present)] = _entry(present, values.get(names[key], present))
                    if names[key] not in values:
                        self._in_place[id(present)] = stands[id(present)]
                given[key] = stands[id(present)]
        self._kept = {id(value) for value in self._in_place.values()}
        self._watched: dict[int, Any] = {}
        self._of_tables = {local_of(table.parameter).untyped_storage().data_ptr() for table in tables}
        self._counters = [VersionCounter(local_of(table.parameter)) for table in self._tables.values()]
        self._copies = Counter[int]()  # by id of a table's parameter: how often it is copied to itself
        keys = {name: key for key, name in names.items()}
        self._loaded = {keys.get(name) or loaders.key(name): value for name, value in values.items()}
        state: Any = OrderedDict({**self._loaded, **given})
        state._metadata = self._metadata
        self._given: dict[str, Any] = state
        self._told: tuple[list[str], list[str]] = [], []  # missing, unexpected
        self._errors: list[str] = []

    def run(self, kept: Collection[str]) -> None:
        """Run it. In a whole load each entry has to be taken, and none may be missing; tables named `kept` stay.

        `ModelMismatchError` if not, or if a module or a hook failed or moved a table's entry: the model is then partly
        overwritten.
        """
        root = state_root(self._model)
        watched: list[Any] = [
            module
            for module in self._model.modules()
            if any(id(one) in self._tables for one in module._parameters.values())
        ]
        self._watched = {
            id(one): one.register_load_state_dict_pre_hook(self._check_tables) for one in watched
        }
        try:
            if is_overridden(root.load_state_dict):
                with accepted(self._where, f"load_state_dict of {type(root).__name__}"):
                    root.load_state_dict(self._given, strict=self._strict)
            else:
                self._load(root, self._given, "")
                self._check_told()
        finally:
            for handle in self._watched.values():
                handle.remove()
        for table, counter in zip(self._tables.values(), self._counters, strict=True):
            if table.name not in kept or counter.storage is None:  # torch counts no changes of it
                continue
            if counter.count_changes(local_of(table.parameter)) > self._copies[id(table.parameter)]:
                raise ModelMismatchError(
                    f"{self._where}: a hook or loader of a module changed rows of table {table.name!r} that are not "
                    f"loaded; load the whole version into this model; {PARTLY}"
                )

    def _check_told(self) -> None:
        missing, unexpected = self._told
        problems = list(self._errors)
        if self._strict:
            problems += [
                f"no module took {key!r}"
                for key in unexpected
                if key in self._loaded or key not in self._state
            ]
            problems += [f"a module lacks {key!r}" for key in missing if key in self._wanted]
        if problems:
            raise ModelMismatchError(
                f"{self._where} does not fit what modules load for themselves: {'; '.join(problems)}; load it in the "
                f"module's _load_from_state_dict, keep it in a buffer, or return it from get_extra_state; {PARTLY}"
            )

    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """What ``load_state_dict`` does for a module, and for those in it."""
        taker = f"load_state_dict of module {prefix[:-1] or 'the model'!r} ({type(module).__name__})"
        if self._has_to_load(module, state, prefix):
            own = [*module._parameters.values(), *module._buffers.values()]
            was_inference = any(one is not None and one.is_inference() for one in own)
            with accepted(self._where, taker), torch.inference_mode(was_inference):
                metadata = self._metadata.get(prefix[:-1], {})
                module._load_from_state_dict(state, prefix, metadata, True, *self._told, self._errors)
        by_part: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            if key.startswith(prefix):
                part = key[len(prefix) :].partition(".")[0]
                by_part.setdefault(f"{prefix}{part}.", {})[key] = value
        for below, child in self._loaders.children(prefix, module):
            self._load(child, by_part.get(below, {}), below)
        for hook in users_hooks(module._load_state_dict_post_hooks):
            with accepted(self._where, taker):
                if hook(module, _IncompatibleKeys(*self._told)) is not None:
                    raise AssertionError("a hook after load_state_dict returned a value")

    def _has_to_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
        """Whether a module has something to load or lacks it, or code of its own that may do more than to copy."""
        rests = {key: key[len(prefix) :].partition(".") for key in state if key.startswith(prefix)}
        own = [key for key, (part, dot, _) in rests.items() if not dot or part not in module._modules]
        is_in_place = all(id(state[key]) in self._kept for key in own)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            is_in_place &= self._in_place.get(id(tensor)) is state.get(prefix + name) is not None
        hooks = len(module._load_state_dict_pre_hooks) > (id(module) in self._watched)
        acts = hooks or is_overridden(module._load_from_state_dict)
        return acts or not is_in_place or prefix + EXTRA_STATE in state

    def _check_tables(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """A hook behind all others of a module: whether the entries of its tables are what they stand for."""
        for name, tensor in module._parameters.items():
            table, found = self._tables.get(id(tensor)), state.get(prefix + name)
            if table is None or (found is None and id(tensor) not in self._in_place):
                continue
            memory = local_of(found) if isinstance(found, torch.Tensor) else None
            is_own = memory is not None and memory.data_ptr() == local_of(table.parameter).data_ptr()
            self._copies[id(tensor)] += is_own
            if not is_own and (memory is None or memory.untyped_storage().data_ptr() in self._of_tables):
                raise ModelMismatchError(
                    f"{self._where}: a hook or a _load_from_state_dict gave the entry of table {table.name!r}, "
                    f"{table.key!r}, another key in the state dict, but rows of tables are loaded by their stored "
                    "names alone; leave the keys of tables as they are, or call its module by the stored name; "
                    f"{PARTLY}"
                )


def _entry(present: Any, value: Any) -> Any:
    """What stands for an entry: its own memory, to be written to; or the value loaded, on the same device."""
    if value is not present:
        both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
        return value.to(present.device) if both else value
    return value.detach() if type(value) in (torch.Tensor, nn.Parameter) or is_dtensor(value) else value
