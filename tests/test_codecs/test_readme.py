"""The README's examples run as they stand; and the parts that a row codec of one's own is made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

from cnr_codecs import (
    Element,
    LosslessRows,
    RowsError,
    build_payload,
    check_rows,
    compile_decoding,
    most_packed_bytes,
    raw_segment,
    row_codec,
)
from tests.paths import ROOT

README = ROOT / "codecs" / "README.md"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # the README is ours
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("7.1")
    assert printed[1].startswith("0.04")
    assert printed[-3:] == ["[  5  70 900]", "3", "[  5  70 900]"]


@pytest.mark.parametrize("element", ["float32", "float64", "float16"])
def test_raw_rows_make_the_payload_of_the_lossless_codec(element: str) -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(element)
    offsets = np.array([0, 2, 3, 7, 8, 11])
    kind, checked, places = check_rows(values, offsets, 12, element)
    built = build_payload(12, 5, kind, [raw_segment(checked, places, 12, np.arange(6), kind)])
    assert built == bytes(LosslessRows().encode_rows(values, offsets, 12, element=element))


@pytest.mark.parametrize(
    ("name", "array", "stored", "overflow"),
    [
        ("float32", "float32", "<f4", np.inf),
        ("float16", "float16", "<f2", 65520),
        ("bfloat16", "float32", "<u2", 2.0**128 - 2.0**119),
        ("int64", "int64", "<i8", 0),
    ],
)
def test_an_element_type_tells_how_values_are_held(
    name: str, array: str, stored: str, overflow: float
) -> None:
    kind, *_ = check_rows(np.zeros((1, 2), array), None, 1, name)
    assert isinstance(kind, Element)
    assert (kind.name, kind.array, kind.stored) == (name, np.dtype(array), np.dtype(stored))
    assert (kind.overflow, kind.quantizable) == (overflow, overflow > 0)


@pytest.mark.parametrize(
    ("name", "of_zarr"),
    [
        ("cnr_uniform", "cnr.uniform"),
        ("cnr_kmeans", "cnr.kmeans"),
        ("cnr_lattice", "cnr.lattice"),
        ("cnr_floating", "cnr.floating"),
        ("cnr_rows", "cnr.rows"),
    ],
)
def test_zarr_and_numcodecs_find_codecs_by_name(name: str, of_zarr: str) -> None:
    values = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    codec, entry = numcodecs.get_codec({"id": name}), row_codec(name).zarr_codec()
    assert entry["name"] == of_zarr
    layout: Any = {"shape": values.shape, "chunks": values.shape, "dtype": "f4"}
    array = zarr.create_array({}, serializer=entry, compressors=None, **layout)
    array[:] = values
    np.testing.assert_array_equal(array[:], codec.decode(codec.encode(values)))


def test_rows_that_do_not_fit_are_refused() -> None:
    values = np.zeros((3, 4), np.float32)
    for offsets, rows, element in (
        (None, 2, "float32"),
        (np.array([0, 2, 1]), 9, "float32"),
        (None, 9, "float64"),
    ):
        with pytest.raises(RowsError):
            check_rows(values, offsets, rows, element)


def test_a_payload_may_be_larger_than_its_rows_by_a_fixed_share() -> None:
    most = most_packed_bytes(1000, 16, "float32")
    assert most == 64_000 + 16_000 + 2**20
    assert (
        len(LosslessRows().encode_rows(np.ones((1000, 16), np.float32), None, 1000, element="float32")) < most
    )


def test_kernels_compile_step_by_step() -> None:
    """So that a program may stop between two of them."""
    assert len(list(compile_decoding("float32"))) > 1
