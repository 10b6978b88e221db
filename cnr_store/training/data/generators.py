"""Random number generators of a data loader's own: found, saved and set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from cnr_store.errors import OptionError
from cnr_store.training.model.rng_state import check_numpy, check_python, check_torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
# What numpy's bit generators take at their word: places in a buffer, and what a number is kept in.
_BELOW = {
    "pos": 625,
    "buffer_pos": 5,
    "has_uint32": 2,
    "uinteger": 1 << 32,
    "state": 1 << 128,
    "inc": 1 << 128,
}


def find_generators(loader: object) -> dict[str, Generator]:
    """Generators that a loader, its samplers and its dataset hold as attributes, by path."""
    found: dict[str, Generator] = {}
    for path, part in _parts(loader, "loader", []):
        for name, value in getattr(part, "__dict__", {}).items():
            if _is_generator(value) and not any(value is known for known in found.values()):
                found[f"{path}.{name}"] = value
    return found


def _parts(part: object, path: str, seen: list[object]) -> Iterator[tuple[str, object]]:
    if part is None or any(part is one for one in seen):
        return
    seen.append(part)
    yield path, part
    for name in _PARTS:
        yield from _parts(getattr(part, "__dict__", {}).get(name), f"{path}.{name}", seen)


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def check_generators(generators: Mapping[str, Any]) -> dict[str, Generator]:
    """Generators that a caller gives by name.

    Raises
    ------
    OptionError
        Something else is among them.
    """
    for name, value in generators.items():
        if not _is_generator(value):
            raise OptionError(
                f"generator {name!r} is of type {type(value).__name__}; give a torch.Generator of the CPU, a "
                "numpy.random.Generator or RandomState, or a random.Random"
            )
    return dict(generators)


def generator_states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Their states, by name, as plain values."""
    return {name: _state(generator) for name, generator in generators.items()}


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def check_generator_states(generators: Mapping[str, Generator], states: Any) -> None:
    """Prove that `set_generators` can take these states.

    Raises
    ------
    ValueError, TypeError, KeyError, RuntimeError
        What is wrong with them.
    """
    if not isinstance(states, Mapping) or states.keys() != generators.keys():
        held = sorted(states) if isinstance(states, Mapping) else states
        raise ValueError(f"it has the generators {held!r:.200}, and the loader {sorted(generators)!r:.200}")
    for name, generator in generators.items():
        state = states[name]
        if isinstance(generator, torch.Generator):
            check_torch(state)
        elif isinstance(generator, np.random.Generator):
            _check_like(state, generator.bit_generator.state, name)
        elif isinstance(generator, np.random.RandomState):
            check_numpy(*state)
        else:
            check_python(*state)


def _check_like(state: Any, like: Any, name: str) -> None:
    """A bit generator's state has the parts of its present one, and no number that leads out of it."""
    if type(state) is not type(like):
        raise ValueError(f"{name} of a numpy generator is of type {type(state).__name__}")
    if isinstance(like, dict):
        if state.keys() != like.keys():
            raise ValueError(f"{name} of a numpy generator has {sorted(state)!r:.200}")
        for key in like:
            _check_like(state[key], like[key], key)
    elif isinstance(like, np.ndarray):
        if (state.dtype, state.shape) != (like.dtype, like.shape):
            raise ValueError(f"{name} of a numpy generator is {state.dtype} {state.shape}")
    elif isinstance(like, str):
        if state != like:
            raise ValueError(f"a numpy generator is {like}, not {state!r:.200}")
    elif not 0 <= state < _BELOW.get(name, 1 << 64):
        raise ValueError(f"{name} of a numpy generator is out of range")


def set_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Give generators the states that `check_generator_states` has proven."""
    for name, generator in generators.items():
        state = states[name]
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(state)
