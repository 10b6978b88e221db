"""Payloads written by earlier releases: read to the same bits, and written to the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest

from cnr_codecs import decode_into, parse, present_rows, row_codec

FOLDER = Path(__file__).parent / "golden"
# make_golden.py says what they are.
NAMES = [
    "adaptive4",
    "adaptive4-searched",
    "adaptive2-searched",
    "asymmetric8",
    "asymmetric5-bfloat16",
    "symmetric3-float16",
    "kmeans3",
    "kmeans2-exact-float16",
    "kmeans4-block",
    "kmeans2-cluster-bfloat16",
    "rows-float64",
    "rows-bool",
]
# Encoders may find better parameters for the same configuration; what was written before decodes as ever.
WRITTEN_DIFFERENTLY = {"adaptive4"}


def test_every_golden_file_is_known() -> None:
    suffixes = ".json", ".input.npy", ".decoded.npy", ".payload"
    assert {path.name for path in FOLDER.iterdir()} == {
        name + suffix for name in NAMES for suffix in suffixes
    }


@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    values = np.load(FOLDER / f"{name}.input.npy")
    expected = np.load(FOLDER / f"{name}.decoded.npy")
    data = (FOLDER / f"{name}.payload").read_bytes()
    offsets = np.array(case["offsets"])
    assert case["format"] == data[4] == 1
    payload = parse(data)
    assert (payload.rows, payload.element, payload.seal) == (case["rows"], case["element"], case["seal"])
    np.testing.assert_array_equal(present_rows(payload), offsets)
    decoded = np.zeros((payload.rows, payload.dim), expected.dtype)
    decode_into(payload, decoded, np.ones(payload.rows, np.uint8))
    assert decoded[offsets].tobytes() == expected.tobytes()
    codec = row_codec(case["config"])
    assert codec.get_config() == case["config"]
    written = codec.encode_rows(values, offsets, case["rows"], element=case["element"], seal=case["seal"])
    assert (written == data) is (name not in WRITTEN_DIFFERENTLY)
