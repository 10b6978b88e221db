"""Values of every type that a state may hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

NUMBERS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
TENSORS = (
    *NUMBERS,
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "complex32",
)


def plain_values() -> dict[str, Any]:
    """Values without arrays, such as metadata may hold."""
    return {
        "nothing": None,
        "truth": [True, False],
        "integers": [0, -1, 2**63, -(2**64), 3**1000],
        "floats": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, 1e22],
        "not finite": [float("nan"), float("inf"), -float("inf")],
        "texts": ["", "plain", 'a"\\\n\t\0', "日本語 \U0001f600", "\u2028", "$float"],
        "bytes": [b"", b"\0\xff", bytes(range(256))],
        "tuples": [(), (1,), (1, 2, 3), (1, (2.5, [None]))],
        "keys": {
            1: "one",
            -5: "minus",
            False: "untruth",
            2.5: "float",
            None: "none",
            (1, "b"): "tuple",
            b"x": "bytes",
        },
        "$tag": {"$float": "nan", "$tuple": [1], "$": 2},
        "ordered": OrderedDict([("z", 1), ("a", OrderedDict([(3, 4), (1, 2)]))]),
        "counts": Counter({"b": 2, "a": -1, 7: 0}),
        "empty": [{}, [], (), OrderedDict(), Counter()],
        "": "an empty key",
        "a/b c%ä": "an odd key",
    }


def scalars() -> dict[str, Any]:
    """A numpy scalar of each type."""
    return {name: np.dtype(name).type(3) for name in NUMBERS} | {
        "nan": np.array([0x7FA00001], np.uint32).view(np.float32)[0],
        "least": np.int64(-(2**63)),
        "most": np.uint64(2**64 - 1),
    }


def arrays() -> dict[str, Any]:
    """A numpy array of each type, and of all kinds of shapes; some too large to stand in the tree."""
    draw = np.random.default_rng(11)
    return {
        name: draw.integers(0, 2 if name == "bool" else 256, 3 * np.dtype(name).itemsize, np.uint8).view(name)
        for name in NUMBERS
    } | {
        "number": np.array(2.5),
        "empty": np.empty((0, 3), np.int16),
        "cube": np.arange(24.0).reshape(2, 3, 4),
        "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "every other": np.arange(10, dtype=np.int32)[::2],
        "other order": np.arange(5).astype(">i8"),
        "large": np.arange(3000, dtype=np.float32).reshape(3, 1000),
        "large integers": (np.arange(1100, dtype=np.int64) ** 5).reshape(1100, 1),
        "large other order": np.arange(1100).astype(">f8"),
    }


def tensors() -> dict[str, Any]:
    """A tensor of each type, and of all kinds of shapes; some too large to stand in the tree."""
    draw = np.random.default_rng(12)
    found: dict[str, Any] = {}
    for name in TENSORS:
        dtype = getattr(torch, name)
        data = draw.integers(0, 2 if name == "bool" else 256, 4 * dtype.itemsize, np.uint8)
        found[name] = torch.from_numpy(data).view(dtype).reshape(2, 2)
    return found | {
        "number": torch.tensor(2.5),
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "turned": torch.arange(6).reshape(2, 3).T,
        "large": torch.arange(3000, dtype=torch.int32),
        "large half": torch.linspace(-1, 1, 5000).to(torch.bfloat16).reshape(50, 100),
        "large truth": torch.arange(9000) % 3 == 0,
    }


def nested(levels: int) -> Any:
    """A value so many levels deep, of lists, tuples and dictionaries in turn."""
    value: Any = "inside"
    for level in range(levels):
        value = ([value], (value,), {"d": value}, {level: value})[level % 4]
    return value


def everything() -> dict[str, Any]:
    return {
        "plain": plain_values(),
        "scalars": scalars(),
        "arrays": arrays(),
        "tensors": tensors(),
        "nested": nested(120),
        "mixed": [(np.float32(1), torch.ones(2), {3: [np.zeros(2)]})],
    }
