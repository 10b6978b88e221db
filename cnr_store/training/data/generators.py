"""Random number generators that a data loader owns: finds, saves and restores them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from cnr_store.errors import OptionError
from cnr_store.training.model.rng_state import check_numpy, check_python, check_torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1}
"""Numbers of bit generators that numpy takes as they are: it reads memory at positions in a buffer."""


def find_generators(loader: object, named: Mapping[str, Any]) -> dict[str, Generator]:
    """Generators that are named, and those that a loader, its samplers and its dataset hold as attributes, by path."""
    for name, value in named.items():
        if not _is_generator(value):
            raise OptionError(
                f"generator {name!r} is of type {type(value).__name__}; give a torch.Generator of the CPU, a "
                "numpy.random.Generator or RandomState, or a random.Random"
            )
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


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def _access(
    generator: Generator,
) -> tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]:
    """What returns a generator's state, as plain values; what gives it one; and what checks that this can take it."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state"), partial(_check_bits, bits)
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state, check_torch
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate, lambda state: check_python(*state)
    return generator.get_state, generator.set_state, lambda state: check_numpy(*state)


def generator_states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Their states, by name, as plain values."""
    return {name: _access(generator)[0]() for name, generator in generators.items()}


def set_generators(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Give generators the states that `check_generator_states` has checked."""
    for name, generator in generators.items():
        _access(generator)[1](states[name])


def check_generator_states(generators: Mapping[str, Generator], states: Any) -> None:
    """Check that `set_generators` can take these states."""
    if not isinstance(states, Mapping) or states.keys() != generators.keys():
        names = sorted(states) if isinstance(states, Mapping) else states
        raise ValueError(f"it has the generators {names!r:.200}, and the loader {sorted(generators)!r:.200}")
    for name, generator in generators.items():
        _access(generator)[2](states[name])


def _check_bits(bits: np.random.BitGenerator, state: Any) -> None:
    """Check a bit generator's state: one of the same kind can take it, and has it afterwards."""
    trial = copy.deepcopy(bits)
    try:
        for name, value in {**state, **state["state"]}.items():
            if name in _MOST and not 0 <= value <= _MOST[name]:
                raise ValueError(f"its {name} is out of range")
        trial.state = state
        if not is_same_state(trial.state, state):
            raise ValueError("a number is out of range")
    except (IndexError, OverflowError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"it has no state of a numpy generator {type(bits).__name__}: {error!r}") from error


def is_same_state(one: Any, other: Any) -> bool:
    """Whether states of generators are equal, which are nested plain values, arrays and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same_state(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
