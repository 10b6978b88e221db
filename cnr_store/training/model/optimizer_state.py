"""The state of optimizers as a tree: by rows where it follows a table's rows, else by parameter name."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from cnr_store.errors import ModelMismatchError, StateError, UnsupportedModelError, listed
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.names import unwrap_optimizer
from cnr_store.training.model.object_state import is_wrapper
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import SLOT_DTYPES, laid_out_as

Group = dict[str, Any]
Tree = dict[str, Any]
FUSED = "torchrec.fused"
"""What the class of TorchRec's optimizers is called in the store, whatever TorchRec calls it."""
_STRAY = (
    "; so does that of an optimizer which keeps state of a parameter that is in none of its groups: where another "
    "parameter took its place, move the state to that one, with rows for those that are new, or remove it: "
    "optimizer.state.pop(old)"
)


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """None, one optimizer, or several, as a list, without known wrappers."""
    if optimizer is None:
        return []
    given: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [unwrap_optimizer(each) for each in given]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise StateError(
                f"optimizer is of type {type(each).__name__}; give a torch.optim.Optimizer or several"
            )
    return optimizers


def row_slots(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer's own state tensors that follow the rows of `parameter`, by the optimizer's key.

    They are ``(rows,)``, ``(rows, k)`` or of the parameter's shape.
    """
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if follows_rows(key, value, parameter)}


def follows_rows(key: object, value: object, parameter: torch.Tensor) -> bool:
    """Whether an entry of an optimizer's state for `parameter` is one of its `row_slots`."""
    if not isinstance(key, str) or key == "step" or not isinstance(value, torch.Tensor):
        return False
    if value.layout is not torch.strided or value.dtype not in SLOT_DTYPES or is_wrapper(value):
        return False
    # One number is no row state, even for a table of one row, unless the parameter is one number, too.
    if value.shape == parameter.shape:
        return True
    return value.ndim in (1, 2) and value.shape[0] == parameter.shape[0] and value.numel() > 1


def named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of each group's parameters; `UnsupportedModelError` if one is not in the model."""
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UnsupportedModelError(
                    f"{type(optimizer).__name__}, parameter group {position}: a parameter of shape "
                    f"{tuple(parameter.shape)} is not in the model, so it has no name; give the whole model, "
                    "an optimizer of its parameters, or this one in `state=` instead, which stores its state_dict whole"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def is_kept_whole(optimizer: Optimizer) -> bool:
    """Whether the ``state_dict`` is in another form than torch's. `StateError` if it is no mapping."""
    try:
        state = _state_dict_of(optimizer)
    except StateError:  # if it is to be consolidated before each save, say
        return False
    return not _is_numbered(optimizer, state)


def _is_numbered(optimizer: Optimizer, state: object) -> bool:
    """Whether a ``state_dict`` has state, and groups in which parameters are counted through, as torch's has."""
    if not isinstance(state, Mapping):
        kind = f"{type(optimizer).__name__} returned a {type(state).__name__}"
        raise StateError(f"the state_dict of {kind}; let it return a dictionary")
    numbers = itertools.count()
    expected = [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]
    try:
        groups = [[n if type(n) is int else None for n in group["params"]] for group in state["param_groups"]]
        return groups == expected and isinstance(state["state"], Mapping)
    except (KeyError, TypeError, IndexError):  # a group has none, or is no mapping
        return False


def _state_dict_of(optimizer: Optimizer) -> dict[str, Any]:
    try:
        return optimizer.state_dict()
    except Exception as error:  # of one that is spread over ranks, say, and was not consolidated
        stray = _STRAY if isinstance(error, KeyError) else ""
        raise StateError(f"the state_dict of {type(optimizer).__name__} failed: {error!r}{stray}") from error


def _check_keys(optimizer: Optimizer, unnamed: Mapping[str, Any]) -> None:
    """Refuse state by the addresses of parameters, which are others in each process."""
    addresses = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(isinstance(part, Mapping) and not addresses.isdisjoint(part) for part in parts_of(unnamed)):
        raise StateError(
            f"the state_dict of {type(optimizer).__name__} has the address of a parameter as a key, which another "
            "process can't load: let it number parameters, as torch's does"
        )


def parts_of(state: object) -> Iterator[object]:
    """A state, and all values in it, each container once: one may contain itself."""
    # Those seen are kept, so that no other one gets the id of one of them.
    left, seen = [state], dict[int, object]()
    while left:
        yield (part := left.pop())
        if isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen[id(part)] = part
            left += part.values() if isinstance(part, Mapping) else part


def optimizer_tree(optimizer: Optimizer, names: Mapping[int, str], tables: Sequence[Table]) -> Tree:
    """The optimizer's state by parameter name, without the slots of tables.

    `names`: from `parameter_names`.
    `tables`: their `row_slots` are not in the result, only the slots' names are.

    Returns: ``{"class", "param_groups": [{"params": [name], ...}], "state": {name: {key: value}}, "slots":
    {table name: [slot]}, "other": {key: value}}``, and, where its ``state_dict`` has further members,
    ``"more": {key: value}``; where one tensor is state of several parameters, ``"shared": [[name, key, name before, key
    there]]``. One in another form than torch's is ``"whole"``, and ``"state"``, ``"slots"`` and ``"other"`` are empty.
    Tensors in it are the optimizer's own.
    """
    groups = named_groups(optimizer, names)
    slots = {table.parameter_name: row_slots(optimizer, table.parameter) for table in tables}
    state = _state_dict_of(optimizer)
    if not _is_numbered(optimizer, state):
        if any(slots.values()):
            raise StateError(
                f"the state_dict of {type(optimizer).__name__} is no more in torch's form; make a new checkpointer"
            )
        _check_keys(optimizer, state)
        kept: Tree = {"state": {}, "slots": {}, "other": {}, "whole": dict(state)}
        kept["param_groups"] = [{"params": params} for params in groups]
        return {"class": type(optimizer).__name__, **kept}
    name_of = dict(enumerate(itertools.chain(*groups)))
    told = {name_of[number]: values for number, values in state["state"].items() if number in name_of}
    _check_told(optimizer, told, slots)
    by_name = {
        name: {key: kept for key, kept in values.items() if key not in slots.get(name, {})}
        for name, values in told.items()
    }
    other = {number: values for number, values in state["state"].items() if number not in name_of}
    more = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    _check_keys(optimizer, more)
    by_table = {table.name: slots[table.parameter_name] for table in tables}
    return {
        "class": type(optimizer).__name__,
        "param_groups": [
            {**group, "params": params} for group, params in zip(state["param_groups"], groups, strict=True)
        ],
        "state": by_name,
        "slots": {name: sorted(own) for name, own in by_table.items() if own},
        "other": other,
    } | {name: kept for name, kept in (("more", more), ("shared", _shared(by_name))) if kept}


def _shared(state: Mapping[str, Mapping[Any, Any]]) -> list[list[str]]:
    """Name and key of each tensor that stands at another place of the state before, and those of that place."""
    first: dict[int, list[str]] = {}
    places = [(name, key, one) for name, values in state.items() for key, one in values.items()]
    tensors = [
        (name, key, one) for name, key, one in places if type(key) is str and type(one) is torch.Tensor
    ]
    told = [[name, key, *first.setdefault(id(one), [name, key])] for name, key, one in tensors]
    return [each for each in told if each[:2] != each[2:]]


def _share_state(tree: Tree) -> Tree:
    """The tree, with one tensor at places that shared one, where these have the same values."""
    state = {name: dict(values) for name, values in tree["state"].items()}
    for name, key, owner, owners_key in tree.get("shared", ()):
        values, first = state.get(name, {}), state.get(owner, {}).get(owners_key)
        if _is_equal(values.get(key), first):
            values[key] = first
    return {**tree, "state": state}


def has_unnamed(tree: Tree) -> bool:
    """Whether some state may count parameters or rows, and does not name them. Single values do not."""
    more = tree.get("more", {}).values()
    return "whole" in tree or any(type(value) not in (bool, int, float, str, type(None)) for value in more)


def _check_told(
    optimizer: Optimizer,
    told: Mapping[str, Mapping[str, Any]],
    slots: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Refuse slots that a ``state_dict`` changes: they are stored as they are, but load through ``load_state_dict``."""
    for name, kept in slots.items():
        values = told.get(name, {})
        for key, slot in kept.items():
            value = values.get(key, slot)
            if value is slot or _is_equal(value, slot):
                continue
            raise StateError(
                f"the state_dict of {type(optimizer).__name__} returns other values of {key!r} of {name!r} than the "
                "optimizer holds, so a load would restore other values: remove the hook or the method that changes them"
            )


def _is_equal(value: object, slot: object) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(slot, torch.Tensor)):
        return False
    if (value.dtype, value.shape) != (slot.dtype, slot.shape):
        return False
    value = value.detach().to(slot.device)
    return bool(((value == slot) | (value.isnan() & slot.isnan())).all())


def load_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tables: Sequence[Table],
    tree: Tree,
    slots: Mapping[str, Mapping[str, torch.Tensor]],
    converted: Collection[str] = (),
) -> None:
    """Load the state that `optimizer_tree` took, through the optimizer's own ``load_state_dict``.

    `names`: from `parameter_names`.
    `tables`: the tables whose slots are in `slots`.
    `tree`: from `optimizer_tree`.
    `slots`: ``{table name: {slot: tensor}}``. A tensor on the parameter's device becomes the optimizer's own without a
    copy. An optimizer without state gets it.
    `converted`: names of parameters of another element type than the tree's: see `_load_uncast`.
    """
    if tree["class"] != type(optimizer).__name__:
        raise ModelMismatchError(
            f"the checkpoint's optimizer is {tree['class']}, this one {type(optimizer).__name__}; give one "
            "of the same class"
        )
    if "whole" in tree:
        optimizer.load_state_dict(tree["whole"])
        return
    groups, tree = named_groups(optimizer, names), _share_state(tree)
    numbered = dict(enumerate(name for params in groups for name in params))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_table = {table.parameter_name: _slots_of(table, tree, slots) for table in tables}
    numbers = itertools.count()  # torch's, in the order of the optimizer's groups
    matched = zip(optimizer.param_groups, _match_groups(tree["param_groups"], groups), strict=True)
    saved_groups = [
        {**_with_names_of(own, group), "params": [next(numbers) for _ in group["params"]]}
        for own, group in matched
    ]
    is_fused = [group.get("fused") for group in saved_groups for _ in group["params"]]
    state = {
        number: {
            **{
                key: laid_out_as(value, parameters[number]) if is_fused[number] else value
                for key, value in tree["state"].get(name, {}).items()
            },
            **by_table.get(name, {}),
        }
        for number, name in numbered.items()
        if name in tree["state"] or by_table.get(name)
    }
    _share_tensors(optimizer.param_groups, saved_groups)
    _load_uncast(
        optimizer,
        {"state": {**state, **tree["other"]}, "param_groups": saved_groups, **tree.get("more", {})},
        {number for number, name in numbered.items() if name in converted},
    )


def _load_uncast(optimizer: Optimizer, state_dict: dict[str, Any], converted: Collection[int]) -> None:
    """Do what ``optimizer.load_state_dict`` does, without the cast.

    torch casts the state of floating-point parameters to the parameters' type while it loads it, on the assumption that
    the types match. But the moments of a bfloat16 table may be float32, and counts integers. It makes all else that has
    items anew from a generator of them: queues lose their length by it, and arrays can't be made so.

    A class with a ``load_state_dict`` of its own decides about types itself.

    `state_dict`: as torch takes it, with parameters' numbers as keys.
    `converted`: numbers of parameters of another type than the one that was saved. Their state is cast as they were,
    except for tensors that are the optimizer's own already.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)
        return
    kept = (values for values in optimizer.state.values() if isinstance(values, Mapping))
    own = {id(value) for values in kept for value in values.values()}
    given: dict[int, Mapping[Any, Any]] = {}

    def take(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        numbers = {number for group in loaded["param_groups"] for number in group["params"]}
        given.update({number: values for number, values in loaded["state"].items() if number in numbers})
        rest = {key: value for key, value in loaded["state"].items() if key not in numbers}
        return {**loaded, "state": rest}

    def put(_: Optimizer) -> None:
        trained = [(one, group) for group in optimizer.param_groups for one in group["params"]]
        for number, values in given.items():
            parameter, group = trained[number]
            cast = parameter.dtype if number in converted else None
            optimizer.state[parameter] = {
                key: _moved(value, key, parameter.device, group, None if id(value) in own else cast)
                for key, value in values.items()
            }
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    # Within the hooks of others, which see what was stored, and what is loaded.
    hooks = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(put, prepend=True),
    ]
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def _moved(
    value: Any, key: Any, device: torch.device, group: Mapping[str, Any], cast: torch.dtype | None
) -> Any:
    """State with its tensors on a device, and floating-point ones cast; but steps only as kernels need them."""
    if isinstance(value, torch.Tensor):
        if key == "step":
            if not (group.get("capturable") or group.get("fused")):
                return value
            cast = torch.float32 if group.get("fused") else None
        return value.to(device, cast if value.is_floating_point() else None)
    if isinstance(value, dict):
        return type(value)({name: _moved(one, name, device, group, cast) for name, one in value.items()})
    if isinstance(value, list | tuple | deque):
        items = [_moved(one, None, device, group, cast) for one in value]
        kind = type(value)
        return deque(items, value.maxlen) if isinstance(value, deque) else getattr(kind, "_make", kind)(items)
    return value


def _with_names_of(own: Group, saved: Group) -> Group:
    """A saved group with the names that torch keeps of this optimizer's parameters, which may be in another order."""
    names = {"param_names": own["param_names"]} if "param_names" in own else {}
    return {**{key: value for key, value in saved.items() if key != "param_names"}, **names}


def _share_tensors(own: Sequence[Group], saved: Sequence[Group]) -> None:
    """Let groups share a tensor where the optimizer's own do, as a rate that it was made with, and the values agree."""
    first: dict[tuple[str, int], torch.Tensor] = {}
    for present, group in zip(own, saved, strict=True):
        for name, value in present.items():
            stored = group.get(name)
            if isinstance(value, torch.Tensor) and isinstance(stored, torch.Tensor):
                shared = first.setdefault((name, id(value)), stored)
                if shared.dtype == stored.dtype and torch.equal(shared, stored):
                    group[name] = shared


def check_groups(optimizer: Optimizer, names: Mapping[int, str], tree: Tree) -> list[Group]:
    """Check that the tree has each parameter group of the optimizer, and no other; the tree's, in its order."""
    return _match_groups(tree["param_groups"], named_groups(optimizer, names))


def _slots_of(
    table: Table, tree: Tree, slots: Mapping[str, Mapping[str, torch.Tensor]]
) -> Mapping[str, torch.Tensor]:
    given, wanted = slots.get(table.name, {}), tree["slots"].get(table.name, [])
    if set(given) != set(wanted):
        raise ModelMismatchError(
            f"table {table.name!r}: the checkpoint's optimizer has the state {sorted(wanted)}, but "
            f"{sorted(given)} was read; the checkpoint is not complete"
        )
    for slot, tensor in given.items():
        if tensor.ndim == 0 or tensor.shape[0] != table.rows:
            raise ModelMismatchError(
                f"table {table.name!r}, slot {slot!r}: shape {tuple(tensor.shape)} does not fit the model's "
                f"{table.rows} rows"
            )
    return given


def _match_groups(saved: Sequence[Group], groups: Sequence[Sequence[str]]) -> list[Group]:
    """For each group of names, a copy of the saved group with the same names in any order."""
    unmatched = list(saved)
    matched = []
    for position, params in enumerate(groups):
        match = next((group for group in unmatched if set(group["params"]) == set(params)), None)
        if match is None:
            raise ModelMismatchError(_group_difference(position, params, saved))
        # By identity: groups hold tensors, and the comparison of two has no truth value.
        unmatched = [group for group in unmatched if group is not match]
        matched.append({**match, "params": list(params)})
    if unmatched:
        raise ModelMismatchError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(groups)}; it "
            f"lacks a group of {_listed(unmatched[0]['params'])}; give the groups that were saved, or {IGNORE} all "
            "but settings"
        )
    return matched


def _group_difference(position: int, params: Sequence[str], saved: Sequence[Group]) -> str:
    held = [list[str](group["params"]) for group in saved]
    nearest = max(held, key=lambda names: len({*names} & {*params}), default=[])
    return (
        f"the optimizer's parameter group {position} is in no group of the checkpoint; against the most "
        f"similar one, it adds {_listed([name for name in params if name not in nearest])} and lacks "
        f"{_listed([name for name in nearest if name not in params])}; give the groups that were saved, or "
        f"{IGNORE} all but settings"
    )


def _listed(names: Sequence[str]) -> str:
    return listed(map(repr, names), 3) or "nothing"
