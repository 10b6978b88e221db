"""What a golden store must give back: plain values, made without the store's own code.

Arrays are compared by their bits. All other state is turned into JSON that names every type, and is compared as such.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import urllib.parse
import zipfile
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

Array = np.ndarray[Any, Any]
STORES = Path(__file__).parent / "stores"
_SHOWN_BYTES = 96
"""Longer values stand in the tree by their SHA-256."""


@dataclass
class Job:
    """What is saved and loaded: a model, its optimizers, and objects with a state."""

    model: Any
    optimizers: list[Optimizer] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)


def described(value: Any) -> Any:
    """JSON that two values share if and only if they are alike in types and bits; plain dictionaries have no order."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return ["int", _shown(str(value).encode()) if value.bit_length() > 400 else str(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind is str:
        return ["str", value]
    if kind is bytes:
        return ["bytes", _shown(value)]
    if kind in (list, tuple):
        return _short([kind.__name__, [described(item) for item in value]])
    if kind in (dict, OrderedDict, Counter):
        pairs = [[described(key), described(item)] for key, item in value.items()]
        return [kind.__name__, pairs if kind is OrderedDict else sorted(pairs, key=json.dumps)]
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.newbyteorder("=").name, _shown(value.tobytes())]
    if kind is np.ndarray:
        native = value.astype(value.dtype.newbyteorder("<"))
        return ["array", native.dtype.name, list(native.shape), _shown(native.tobytes())]
    assert kind in (torch.Tensor, nn.Parameter), kind
    return ["tensor", str(value.dtype), list(value.shape), _shown(_bits(value).tobytes())]


def _short(doc: list[Any]) -> list[Any]:
    """A long list of plain numbers, such as a random generator's words, by its digest."""
    text = json.dumps(doc)
    if len(doc[1]) > 100:
        return [doc[0], len(doc[1]), hashlib.sha256(text.encode()).hexdigest()]
    return doc


def _shown(data: bytes) -> str:
    if len(data) > _SHOWN_BYTES:
        return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"
    return base64.b64encode(data).decode()


def _bits(tensor: torch.Tensor) -> Array:
    """The tensor's bytes, in C order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy()


def _numpy(tensor: torch.Tensor, widened: bool) -> Array:
    """As the store shows a tensor: bfloat16 rows widened; other types that numpy lacks as unsigned integers."""
    try:
        return tensor.detach().numpy().copy()
    except TypeError:
        found = _bits(tensor).view(f"<u{tensor.element_size()}").reshape(tuple(tensor.shape))
    if widened:
        assert tensor.dtype is torch.bfloat16
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found


def encoded(name: str) -> str:
    """A name as a segment of a path, as docs/format.md has it."""
    quoted = urllib.parse.quote(name, safe="-._").replace("~", "%7E")
    if quoted.startswith((".", "__")) or quoted == "zarr.json":
        return f"%{ord(quoted[0]):02X}{quoted[1:]}"
    return quoted


def table_name(key: str) -> str:
    """A table's name by its parameter's."""
    return key if set(key.split(".")) == {"weight"} else key.removesuffix(".weight")


def model_paths(model: nn.Module) -> dict[str, str]:
    """The path of the array that each tensor of the model's state dict is stored as; tied ones share it."""
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            table = f"tables/{encoded(table_name(key))}/weight"
            path = table if id(value) in tables else f"dense/model/{encoded(key)}"
            first.setdefault(id(value), path)
    return {
        key: first[id(value)] for key, value in model.state_dict(keep_vars=True).items() if id(value) in first
    }


def own_arrays(job: Job) -> dict[str, Array]:
    """By path, every array of rows and every tensor of the model, from the job's own tensors."""
    paths, state = model_paths(job.model), job.model.state_dict(keep_vars=True)
    found = {path: _numpy(state[key], path.startswith("tables/")) for key, path in paths.items()}
    for optimizer in job.optimizers:
        per_parameter: dict[Any, Any] = optimizer.state
        for parameter, values in per_parameter.items():
            if not isinstance(parameter, torch.Tensor):
                continue
            path = next(paths[key] for key, value in state.items() if value is parameter)
            for key in _slots(path, parameter, values):
                found[path.removesuffix("weight") + encoded(key)] = _numpy(values[key], True)
    return found


def _slots(path: str, parameter: torch.Tensor, values: dict[str, Any]) -> list[str]:
    """Keys of what an optimizer keeps for the rows of a table."""
    if not path.startswith("tables/"):
        return []
    rows = {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and value.ndim}
    return [key for key, value in rows.items() if len(value) == len(parameter) and value.numel() > 1]


def own_tree(job: Job, rng: bool) -> dict[str, Any]:
    """All other state of a job, described."""
    return {
        "optimizers": [_optimizer(job, each) for each in job.optimizers],
        "objects": {name: described(value.state_dict()) for name, value in job.objects.items()},
        "extra_state": {
            key: described(value)
            for key, value in job.model.state_dict(keep_vars=True).items()
            if key.endswith("_extra_state")
        },
        "rng": _rng() if rng else None,
    }


def _rng() -> Any:
    return [described(each) for each in (torch.get_rng_state(), np.random.get_state(), random.getstate())]


def _optimizer(job: Job, optimizer: Optimizer) -> Any:
    keys = {id(value): key for key, value in reversed(job.model.state_dict(keep_vars=True).items())}
    paths = model_paths(job.model)
    groups, state = [], {}
    per_parameter: dict[Any, Any] = optimizer.state
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append([[keys[id(each)] for each in group["params"]], described(settings)])
    for parameter, values in per_parameter.items():
        if not isinstance(parameter, torch.Tensor):  # a number of the optimizer's own
            state[f"beside {parameter}"] = described(values)
            continue
        name = keys[id(parameter)]
        slots = _slots(paths[name], parameter, values)
        state[name] = {
            str(key): ["rows", str(value.dtype), list(value.shape)] if key in slots else described(value)
            for key, value in values.items()
        }
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


class Golden:
    """A golden store, unpacked, and what is expected of it.

    `store.zip` is the store. `expected.json` describes its versions, and names the arrays of `expected.npz` that they
    hold.

    Parameters
    ----------
    name
        Of its folder.
    place
        An empty folder, to unpack it into.
    """

    def __init__(self, name: str, place: Path) -> None:
        self.name = name
        self.url = place / "store"
        self.doc: dict[str, Any] = json.loads((STORES / name / "expected.json").read_text())
        self.versions: list[dict[str, Any]] = self.doc["versions"]
        with np.load(STORES / name / "expected.npz", allow_pickle=False) as file:
            self._arrays = {key: file[key] for key in file.files}
        with zipfile.ZipFile(STORES / name / "store.zip") as packed:
            packed.extractall(self.url)

    def arrays(self, version: dict[str, Any]) -> dict[str, Array]:
        """By path, every array of a version."""
        return {path: self._arrays[key] for path, key in version["arrays"].items()}

    def loaded_arrays(self, version: dict[str, Any]) -> dict[str, Array]:
        """Those that a model and its optimizers hold."""
        beside = ("dense/optim/", "dense/state/")
        return {path: each for path, each in self.arrays(version).items() if not path.startswith(beside)}
