"""Writes the golden payloads: `python tests/test_codecs/make_golden.py NAME...`.

Of each case NAME.json describes the configuration and the rows' places; NAME.input.npy and NAME.decoded.npy hold the
rows; NAME.payload their payload. Only a new version of payloads may change a file that exists, so this writes new
files only.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import zstd

import cnr_codecs
from cnr_codecs.protocol import Rows

FOLDER = Path(__file__).parent / "golden"


def _rows(count: int, dim: int, element: str = "float32") -> Rows:
    """Plain rows, constant ones, some with large offsets, zeros, NaN and infinities."""
    rng = np.random.default_rng(20261101)
    values = rng.normal(0, 0.1, (count, dim)).astype(np.float32)
    values[2::9] = values[2::9, :1]
    values[4::9] += 3000
    values[5::9] = 0
    values[6, 1] = np.nan
    values[7, 2] = -np.inf
    values[8] *= 1e-6
    values[3, 0] = 1e-40
    if element == "bfloat16":
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values.astype(cnr_codecs.array_dtype(element))


CASES: dict[str, tuple[dict[str, Any], str, Rows]] = {
    "adaptive4": ({"id": "cnr_uniform", "scheme": "adaptive", "bits": 4}, "float32", _rows(70, 17)),
    "adaptive2-walk": (
        {"id": "cnr_uniform", "scheme": "adaptive", "bits": 2, "bins": 40, "ratio": 0.8},
        "float32",
        _rows(30, 12),
    ),
    "asymmetric8": ({"id": "cnr_uniform", "scheme": "asymmetric", "bits": 8}, "float32", _rows(30, 9)),
    "asymmetric5-bfloat16": (
        {"id": "cnr_uniform", "scheme": "asymmetric", "bits": 5},
        "bfloat16",
        _rows(20, 11, "bfloat16"),
    ),
    "symmetric3-float16": (
        {"id": "cnr_uniform", "scheme": "symmetric", "bits": 3},
        "float16",
        _rows(20, 10, "float16"),
    ),
    "kmeans3": ({"id": "cnr_kmeans", "bits": 3, "group": "row"}, "float32", _rows(40, 40)),
    "kmeans2-exact-float16": (
        {"id": "cnr_kmeans", "bits": 2, "group": "row", "exact": True},
        "float16",
        _rows(20, 21, "float16"),
    ),
    "kmeans4-block": (
        {"id": "cnr_kmeans", "bits": 4, "group": "block", "block_rows": 16},
        "float32",
        _rows(70, 17),
    ),
    "kmeans2-cluster-bfloat16": (
        {"id": "cnr_kmeans", "bits": 2, "group": "cluster"},
        "bfloat16",
        _rows(60, 20, "bfloat16"),
    ),
    "rows-float64": ({"id": "cnr_rows"}, "float64", _rows(12, 3, "float64")),
    "rows-bool": ({"id": "cnr_rows"}, "bool", _rows(12, 3) > 0),
    "lattice": ({"id": "cnr_lattice", "rms_step": 0.0625}, "float32", _rows(70, 17)),
    "lattice-column": ({"id": "cnr_lattice", "step": 0.0625}, "float32", _rows(70, 3)[:, :1].copy()),
    "lattice-bfloat16": (
        {"id": "cnr_lattice", "rms_step": 0.25, "step": 0.02734375},
        "bfloat16",
        _rows(40, 10, "bfloat16"),
    ),
    "floating": ({"id": "cnr_floating", "mantissa_bits": 3}, "float32", _rows(70, 17) ** 2),
    "floating-signs": ({"id": "cnr_floating", "mantissa_bits": 4}, "float32", _rows(70, 17)),
    "uniform-gaps": ({"id": "cnr_uniform", "scheme": "asymmetric", "bits": 4}, "float32", _rows(90, 4)),
    "floating-column": (
        {"id": "cnr_floating", "mantissa_bits": 5},
        "float64",
        _rows(70, 3, "float64")[:, :1] ** 2,
    ),
    "floating-bfloat16": ({"id": "cnr_floating", "mantissa_bits": 1}, "bfloat16", _rows(40, 10, "bfloat16")),
    "floating-gaps": ({"id": "cnr_floating", "mantissa_bits": 7}, "float16", _rows(90, 4, "float16")),
    "floating-exact": ({"id": "cnr_floating", "mantissa_bits": 23}, "float32", _rows(70, 17)),
    "floating-exact-column": (
        {"id": "cnr_floating", "mantissa_bits": 23},
        "bfloat16",
        _rows(70, 3, "bfloat16")[:, :1].copy(),
    ),
    "floating-exact-gaps": ({"id": "cnr_floating", "mantissa_bits": 23}, "float16", _rows(90, 4, "float16")),
    "lattice-gaps": ({"id": "cnr_lattice", "step": 0.0625}, "float16", _rows(90, 4, "float16")),
}


def write(name: str) -> None:
    """The payload of a case, its description, its input and the decoded rows."""
    config, element, values = CASES[name]
    rows = (300 if name.endswith("gaps") else 3) * len(values)
    offsets = np.arange(len(values)) * 2 + 1
    if name.endswith("gaps"):
        offsets = offsets**2 // 2
    payload = cnr_codecs.row_codec(config).encode_rows(values, offsets, rows, element=element, seal=len(name))
    decoded = np.zeros((rows, values.shape[1]), values.dtype)
    cnr_codecs.decode_into(cnr_codecs.parse(payload), decoded, np.ones(rows, np.uint8))
    case = {"version": payload[4], "config": config, "element": element, "rows": rows, "seal": len(name)}
    case |= {"zstd": zstd.VERSION_NUMBER, "offsets": offsets.tolist()}
    with (FOLDER / f"{name}.payload").open("xb") as file:
        file.write(payload)
    with (FOLDER / f"{name}.json").open("x") as file:
        json.dump(case, file)
    np.save(FOLDER / f"{name}.input.npy", values)
    np.save(FOLDER / f"{name}.decoded.npy", decoded[offsets])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:]:
        write(chosen)
