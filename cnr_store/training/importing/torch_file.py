"""Reads the state dict in a file of `torch.save`, mapped into memory, without running code in it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cnr_store.errors import FormatError, OptionError, UnsupportedModelError, option
from cnr_store.training.importing.model_file import FileTensor, ModelFile, clean_names
from cnr_store.training.model.object_state import tensor_leaf
from cnr_store.training.model.tensors import check_has_values, dtype_name, numpy_view

_EXTRA_STATE = "_extra_state"
_STEPS = ("step", "global_step", "iteration")
"""What the entry of a checkpoint that holds its step may be called."""


def read_torch_file(path: Path, key: str | None) -> ModelFile:
    """The state dict in a file, or the one that the file holds under `key`."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, KeyError, OSError, EOFError, pickle.UnpicklingError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # a class or function
        reason = f"it holds a {found[1]}" if found else str(error).partition("\n")[0]
        raise FormatError(
            f"{path} can't be read as tensors alone: {reason}; save `model.state_dict()` by torch.save"
        ) from error
    step = None
    if key is not None:
        for name in [key] if isinstance(content, Mapping) and key in content else key.split("."):
            if not isinstance(content, Mapping) or name not in content:
                raise OptionError(
                    f"{path} has nothing under {option('key', key)}; it holds {_shown(content)}"
                )
            counts = (_count(content.get(each)) for each in _STEPS)
            step = next((count for count in counts if count is not None), step)
            content = content[name]
    if parts := list(islice(_parts(content, "" if key is None else f"{key}."), 10)):
        choices = " or ".join(option("key", part) for part in parts)
        raise FormatError(f"{path} holds more than a state dict: give the part to import, {choices}")
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise FormatError(f"{path} holds {_shown(content)}, not tensors by name; save `model.state_dict()`")
    names = clean_names(content, str(path))
    return replace(_model_file(content, names, path), step=step, module_versions=_versions(content, names))


def _versions(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int] | None:
    """What torch notes in a state dict of the versions of modules' state, as `StoredState.module_versions`."""
    if not isinstance(noted := getattr(state, "_metadata", None), Mapping):
        return None
    found: dict[str, int] = {}
    for path, told in noted.items():
        version = told.get("version") if isinstance(told, Mapping) else None
        prefix = f"{path}." if path else ""
        key = next((each for each in names if each.startswith(prefix)), None)
        if key is not None and type(version) is int and version != 1:
            below = ".".join(part for part in key[len(prefix) :].split(".") if part != "_orig_mod")
            found[names[key].removesuffix(below).removesuffix(".")] = version
    return found


def _count(value: Any) -> int | None:
    """A step, as a number or a tensor of one element."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return int(number) if type(number) in (int, float) and number >= 0 and number % 1 == 0 else None


def _parts(content: object, prefix: str, levels: int = 3) -> Iterator[str]:
    """Keys of the entries within that may be state dicts."""
    for name, value in content.items() if isinstance(content, Mapping) and levels else ():
        if not isinstance(value, Mapping) or not isinstance(name, str) or name.endswith(_EXTRA_STATE):
            continue
        if any(isinstance(each, torch.Tensor) for each in value.values()):
            yield prefix + name
        else:
            yield from _parts(value, f"{prefix}{name}.", levels - 1)


def _model_file(state: Mapping[str, Any], names: Mapping[str, str], path: Path) -> ModelFile:
    tensors: dict[str, FileTensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    owners: dict[object, str] = {}
    for key, value in state.items():
        name = names[key]
        if name.rpartition(".")[2] == _EXTRA_STATE:
            extra[name] = value
            continue
        _check(key, value, path)
        # A tied tensor was saved once, and is loaded as several tensors over the same memory.
        bits = value.dtype, value.is_conj(), value.is_neg()
        same = (value.data_ptr(), bits, value.shape, value.stride()) if value.numel() else name
        if owners.setdefault(same, name) != name:
            aliases[name] = owners[same]
        else:
            plain = value.detach().resolve_conj().resolve_neg()
            values = numpy_view(plain if plain.ndim else plain.reshape(1)).reshape(tuple(plain.shape))
            tensors[name] = FileTensor(dtype_name(value.dtype), values)
    return ModelFile(tensors, aliases, extra, tensor_leaf)


def _check(key: str, value: object, path: Path) -> None:
    if not isinstance(value, torch.Tensor):
        raise FormatError(
            f"{path}: {key!r} is of type {type(value).__name__}, not a tensor; save `model.state_dict()`"
        )
    try:
        check_has_values(value)
    except UnsupportedModelError as error:
        raise FormatError(f"{path}: {key!r} is {error} before it is saved") from error


def _shown(content: object) -> str:
    if isinstance(content, Mapping):
        return ", ".join(repr(key) for key in list(content)[:10]) or "nothing"
    return f"an object of type {type(content).__name__}"
