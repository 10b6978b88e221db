"""Random number generators that a data loader owns: finds, saves and restores them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from cnr_store.errors import OptionError
from cnr_store.training.model.rng_state import check_numpy, check_python, check_torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
_WRAPPED = "_sampler"
"""The attribute in which Fabric's dataset holds a sampler."""
# Numbers that numpy's bit generators don't check: positions in a buffer, and values kept in fixed widths.
_UPPER_BOUNDS = {
    "pos": 625,
    "buffer_pos": 5,
    "has_uint32": 2,
    "uinteger": 1 << 32,
    "state": 1 << 128,
    "inc": 1 << 128,
}


def find_generators(loader: object, named: Mapping[str, Generator]) -> dict[str, Generator]:
    """Generators that are named, and those that a loader, its samplers and its dataset hold as attributes, by path."""
    generators = dict(named)
    for path, part in _parts(loader, "loader", []):
        for name, value in getattr(part, "__dict__", {}).items():
            if _is_generator(value) and not any(value is known for known in generators.values()):
                generators[f"{path}.{name}"] = value
    return generators


def _parts(part: object, path: str, seen: list[object]) -> Iterator[tuple[str, object]]:
    # By identity: datasets may compare in ways of their own, and may refer to each other in circles.
    if part is None or any(part is one for one in seen):
        return
    seen.append(part)
    yield path, part
    for name in _PARTS:
        yield from _parts(getattr(part, "__dict__", {}).get(name), f"{path}.{name}", seen)
    yield from _parts(wrapped_sampler(part), f"{path}.{_WRAPPED}", seen)


def wrapped_sampler(dataset: object) -> Any:
    """The sampler whose samples Fabric deals out to ranks as if they were a dataset; None for other datasets."""
    return getattr(dataset, _WRAPPED) if type(dataset).__name__ == "_DatasetSamplerWrapper" else None


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def check_generators(generators: Mapping[str, Any]) -> dict[str, Generator]:
    """Check the generators that a caller gives by name."""
    for name, value in generators.items():
        if not _is_generator(value):
            raise OptionError(
                f"generator {name!r} is of type {type(value).__name__}; give a torch.Generator of the CPU, a "
                "numpy.random.Generator or RandomState, or a random.Random"
            )
    return dict(generators)


def generator_states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Their states, by name, as plain values."""
    return {name: _accessors(generator)[0]() for name, generator in generators.items()}


def set_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Give generators the states that `check_generator_states` has checked."""
    for name, generator in generators.items():
        _accessors(generator)[1](states[name])


def _accessors(generator: Generator) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """What returns a generator's state, and what sets it."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state


def check_generator_states(generators: Mapping[str, Generator], states: Any) -> None:
    """Check that `set_generators` can take these states."""
    if not isinstance(states, Mapping) or states.keys() != generators.keys():
        names = sorted(states) if isinstance(states, Mapping) else states
        raise ValueError(f"it has the generators {names!r:.200}, and the loader {sorted(generators)!r:.200}")
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


def _check_like(state: Any, current: Any, name: str) -> None:
    """Check that a bit generator's state has the parts of its current one, and every number in its range."""
    if type(state) is not type(current):
        raise ValueError(f"{name} of a numpy generator is of type {type(state).__name__}")
    if isinstance(current, dict):
        if state.keys() != current.keys():
            raise ValueError(f"{name} of a numpy generator has {sorted(state)!r:.200}")
        for key in current:
            _check_like(state[key], current[key], key)
    elif isinstance(current, np.ndarray):
        if (state.dtype, state.shape) != (current.dtype, current.shape):
            raise ValueError(f"{name} of a numpy generator is {state.dtype} {state.shape}")
    elif isinstance(current, str):
        if state != current:
            raise ValueError(f"a numpy generator is {current}, not {state!r:.200}")
    elif not 0 <= state < _UPPER_BOUNDS.get(name, 1 << 64):
        raise ValueError(f"{name} of a numpy generator is out of range")


def is_same_state(one: Any, other: Any) -> bool:
    """Whether states of generators are equal, which are nested plain values, arrays and tensors."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(is_same_state(one[key], other[key]) for key in one)
        )
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same_state, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and np.array_equal(np.asarray(one), np.asarray(other))
    return type(one) is type(other) and bool(one == other)
