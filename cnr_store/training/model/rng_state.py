"""Random number generators that training draws from: torch, numpy, Python."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.devices.support import failing_saves

_TWISTER = "MT19937"
_WORDS = 624
_PYTHON_VERSION = 3
# The head of torch's state: the seed, the number of words left, whether it is seeded, the next word.
_TORCH_HEAD = struct.Struct("<QiiQ")


def rng_state() -> dict[str, Any]:
    """The state of the global random number generators."""
    numpy_state = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != _TWISTER:
        raise UnsupportedModelError(
            f"numpy's global random generator is {numpy_state['bit_generator']}, not {_TWISTER}; give "
            "job=cnr_store.Job(rng=False), and save its state with `state=`"
        )
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        with failing_saves(torch.device("cuda"), "random number generators"):
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Give the generators a state that has passed `check_rng_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if _fits_devices(state):
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_rng(text: str) -> None:
    """Begin the generators anew. Equal texts give equal numbers, and different ones independent ones."""
    seed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(seed, "little"))
    np.random.seed(np.frombuffer(seed, "<u4"))
    random.seed(seed)


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check that `set_rng_state` can take a state, and that drawing numbers then stays inside of it.

    numpy takes any position and reads memory there, so the state is not tried on the generators themselves.
    """
    check_torch(state["torch"])
    check_numpy(*state["numpy"])
    check_python(*state["python"])
    if _fits_devices(state):
        for device, one in enumerate(state["cuda"]):
            torch.Generator(f"cuda:{device}").set_state(_bytes_tensor(one))


def _fits_devices(state: Mapping[str, Any]) -> bool:
    return "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count()


def _bytes_tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.ndim != 1:
        raise ValueError("torch's generator state is no tensor of bytes")
    return state


def check_torch(state: Any) -> None:
    """Check the state of a CPU generator of torch; see `check_rng_state`."""
    torch.Generator().set_state(_bytes_tensor(state))
    _, left, _, following = _TORCH_HEAD.unpack_from(state.numpy().tobytes())
    if not 1 <= left <= _WORDS or following + left > _WORDS + 1:
        raise ValueError(f"torch's generator has {left} words left from word {following} of {_WORDS}")


def check_numpy(name: Any, key: Any, position: Any, has_gauss: Any, gauss: Any) -> None:
    """Check the state of a ``numpy.random.RandomState``; see `check_rng_state`."""
    if (
        name != _TWISTER
        or not isinstance(key, np.ndarray)
        or key.dtype != np.uint32
        or key.shape != (_WORDS,)
    ):
        raise ValueError(f"numpy's generator is no {_TWISTER} of {_WORDS} words")
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"numpy's generator has no position in its {_WORDS} words")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("numpy's generator has no valid next normal number")


def check_python(version: Any, words: Any, gauss: Any) -> None:
    """Check the state of a ``random.Random``; see `check_rng_state`."""
    if version != _PYTHON_VERSION or type(words) is not tuple or len(words) != _WORDS + 1:
        raise ValueError(
            f"Python's generator is no version {_PYTHON_VERSION} of {_WORDS} words and a position"
        )
    if any(type(word) is not int or not 0 <= word < 1 << 32 for word in words) or words[-1] > _WORDS:
        raise ValueError(
            f"Python's generator has a word beyond 32 bits, or no position in its {_WORDS} words"
        )
    if gauss is not None and type(gauss) is not float:
        raise ValueError("Python's generator has no valid next normal number")
