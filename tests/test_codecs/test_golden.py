"""Payloads written by earlier releases: read to the same bits, and written to the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest

from cnr_codecs import build_payload, decode_into, parse, present_rows, row_codec, rows_written, take_rows
from cnr_codecs.elements import element_named
from tests.test_codecs.payload_bytes import of_version_1

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
# Payloads of version 1 have none of these.
NAMES_OF_2 = ["lattice", "lattice-column", "lattice-bfloat16", "lattice-gaps"]
NAMES_OF_2 += ["floating", "floating-column", "floating-bfloat16", "floating-gaps"]
# Encoders may find better parameters for the same configuration; what was written before decodes as ever.
# A lattice's step goes by the values of finite rows alone now.
WRITTEN_DIFFERENTLY = {"adaptive4", "lattice"}


def test_every_golden_file_is_known() -> None:
    suffixes = ".json", ".input.npy", ".decoded.npy", ".payload", ".v2.payload"
    assert {path.name for path in FOLDER.iterdir()} == {
        name + suffix
        for name in [*NAMES, *NAMES_OF_2]
        for suffix in suffixes
        if name in NAMES or suffix != ".payload"
    }


@pytest.mark.parametrize(
    ("name", "version", "suffix"),
    [
        *[(name, 1, ".payload") for name in NAMES],
        *[(name, 2, ".v2.payload") for name in [*NAMES, *NAMES_OF_2]],
    ],
)
def test_golden_payloads(name: str, version: int, suffix: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    expected = np.load(FOLDER / f"{name}.decoded.npy")
    data = (FOLDER / f"{name}{suffix}").read_bytes()
    offsets = np.array(case["offsets"])
    assert case["format"] == (1 if name in NAMES else 2)
    assert data[4] == version
    payload = parse(data)
    assert (payload.rows, payload.element, payload.seal) == (case["rows"], case["element"], case["seal"])
    np.testing.assert_array_equal(present_rows(payload), offsets)
    decoded = np.zeros((payload.rows, payload.dim), expected.dtype)
    decode_into(payload, decoded, np.ones(payload.rows, np.uint8))
    assert decoded[offsets].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads_are_written_again(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    values = np.load(FOLDER / f"{name}.input.npy")
    older, data = ((FOLDER / f"{name}{suffix}").read_bytes() for suffix in (".payload", ".v2.payload"))
    offsets, seal = np.array(case["offsets"]), case["seal"]
    codec = row_codec(case["config"])
    assert codec.get_config() == case["config"]
    written = codec.encode_rows(values, offsets, case["rows"], element=case["element"], seal=seal)
    assert (written == data) is (name not in WRITTEN_DIFFERENTLY)
    assert (of_version_1(written) == older) is (name not in WRITTEN_DIFFERENTLY)
    moved = parse(older)
    kind = element_named(moved.element)
    assert build_payload(moved.rows, moved.dim, kind, moved.segments, moved.seal) == data
    np.testing.assert_array_equal(rows_written(data, seal=seal), offsets)


@pytest.mark.parametrize("name", NAMES_OF_2)
def test_golden_payloads_of_version_2_alone_are_written_again(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text())
    data = (FOLDER / f"{name}.v2.payload").read_bytes()
    codec, offsets, seal = row_codec(case["config"]), np.array(case["offsets"]), case["seal"]
    assert codec.get_config() == case["config"]
    values = np.load(FOLDER / f"{name}.input.npy")
    written = codec.encode_rows(values, offsets, case["rows"], element=case["element"], seal=seal)
    assert (written == data) is (name not in WRITTEN_DIFFERENTLY)
    held = parse(data)
    kind = element_named(held.element)
    assert build_payload(held.rows, held.dim, kind, held.segments, held.seal) == data
    taken = take_rows(held, np.ones(held.rows, np.uint8))
    assert build_payload(held.rows, held.dim, kind, taken, held.seal) == data
    np.testing.assert_array_equal(rows_written(data, seal=seal), offsets)
