"""Payloads written by earlier releases: read to the same bits, and written to the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from numcodecs import zstd

from cnr_codecs import build_payload, decode_into, parse, present_rows, row_codec, rows_written, take_rows
from cnr_codecs.elements import element_named

FOLDER = Path(__file__).parent / "golden"
# make_golden.py says what they are.
NAMES = [
    "adaptive4",
    "adaptive2-walk",
    "asymmetric8",
    "asymmetric5-bfloat16",
    "symmetric3-float16",
    "uniform-gaps",
]
NAMES += [
    "kmeans3",
    "kmeans2-exact-float16",
    "kmeans4-block",
    "kmeans2-cluster-bfloat16",
    "rows-float64",
    "rows-bool",
]
NAMES += ["lattice", "lattice-column", "lattice-bfloat16", "lattice-gaps"]
NAMES += ["floating", "floating-signs", "floating-column", "floating-bfloat16", "floating-gaps"]
NAMES += ["floating-exact", "floating-exact-column", "floating-exact-gaps"]
# Encoders may find better parameters for the same configuration; what was written before decodes as ever.
WRITTEN_DIFFERENTLY: set[str] = set()


def test_every_golden_file_is_known() -> None:
    suffixes = ".json", ".input.npy", ".decoded.npy", ".payload"
    assert {path.name for path in FOLDER.iterdir()} == {
        name + suffix for name in NAMES for suffix in suffixes
    }


@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    expected = np.load(FOLDER / f"{name}.decoded.npy")
    data = (FOLDER / f"{name}.payload").read_bytes()
    offsets = np.array(case["offsets"])
    assert data[4] == case["version"] == 3
    payload = parse(data)
    assert (payload.rows, payload.element, payload.seal) == (case["rows"], case["element"], case["seal"])
    np.testing.assert_array_equal(present_rows(payload), offsets)
    decoded = np.zeros((payload.rows, payload.dim), expected.dtype)
    decode_into(payload, decoded, np.ones(payload.rows, np.uint8))
    assert decoded[offsets].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads_are_written_again(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    data = (FOLDER / f"{name}.payload").read_bytes()
    codec, offsets, seal = row_codec(case["config"]), np.array(case["offsets"]), case["seal"]
    assert codec.get_config() == case["config"]
    values = np.load(FOLDER / f"{name}.input.npy")
    written = codec.encode_rows(values, offsets, case["rows"], element=case["element"], seal=seal)
    held = parse(data)
    kind = element_named(held.element)
    assert build_payload(held.rows, held.dim, kind, held.segments, held.seal) == data
    if case["zstd"] == zstd.VERSION_NUMBER:  # other releases of zstd may make other frames
        assert (written == data) is (name not in WRITTEN_DIFFERENTLY)
        taken = take_rows(held, np.ones(held.rows, np.uint8))
        assert build_payload(held.rows, held.dim, kind, taken, held.seal) == data
    np.testing.assert_array_equal(rows_written(data, seal=seal), offsets)
