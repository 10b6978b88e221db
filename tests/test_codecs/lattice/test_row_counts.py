"""How many rows are stored otherwise than on the grid of the others: what encoders and reports say of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cnr_codecs import FloatingRows, LatticeRows, Scheme, UniformRows, error_report, parse, row_codec
from cnr_codecs.dense import decode_dense
from cnr_codecs.lattice.segments import RowCounts
from tests.test_codecs.lattice.test_lattice import as_element

STEP = 0.125


def rows_of_all_kinds(dim: int) -> npt.NDArray[np.float32]:
    """Of forty rows, three that no grid holds, seven far below the step, and five of zeros."""
    rows = np.random.default_rng(dim).normal(1, 0.2, (40, dim)).astype(np.float32)
    rows[1], rows[4, 0], rows[9, -1] = np.nan, np.inf, 1e38
    rows[10:17] = rows[10:17] * np.float32(2.0) ** -np.arange(8, 36, 4, dtype=np.float32)[:, None]
    rows[20:25] = 0
    rows[21] = -0.0
    return rows


@pytest.mark.parametrize("dim", [1, 3, 8, 33])
@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize(
    ("codec", "element", "expected"),
    [
        (LatticeRows(step=STEP), "float32", RowCounts(3, 7, 5)),
        (LatticeRows(step=STEP), "bfloat16", RowCounts(10, 0, 5)),
        (FloatingRows(3), "float32", RowCounts(2, 0, 5)),
        (FloatingRows(3), "float64", RowCounts(2, 0, 5)),
    ],
)
def test_encoders_count_rows(
    codec: LatticeRows | FloatingRows, element: str, expected: RowCounts, dim: int, is_relative: bool
) -> None:
    values = as_element(rows_of_all_kinds(dim), element)
    known = np.arange(40) % 3 > 0 if is_relative else np.zeros(40, bool)
    found = codec.encode_over(values, None, 40, np.ones(values.shape, np.int16), known, element=element)
    assert found.counts == expected
    segments = parse(found.payload).segments
    assert sum(each.row_set.count for each in segments if each.scheme is Scheme.RAW) == expected.raw
    if not is_relative:
        assert np.count_nonzero(~decode_dense(parse(found.payload)).any(axis=1)) == expected.zero
        assert found.payload == codec.encode_rows(values, None, 40, element=element)


def test_codes_from_elsewhere_are_counted() -> None:
    """As a device gives them: the values of rows with codes are not looked at."""
    values, raw = np.zeros((4, 2), np.float32), np.array([False, True, True, False])
    values[1], values[2] = np.nan, 1e-3
    codes = np.array([[3, 0], [0, 0]], np.int16)
    none = np.zeros((4, 2), np.int16), np.zeros(4, bool)
    found = LatticeRows(step=STEP).encode_over(
        values, None, 4, *none, element="float32", quantized=(codes, raw)
    )
    assert found.counts == RowCounts(raw=1, finer=1, zero=1)


@pytest.mark.parametrize(
    ("codec", "shares"),
    [
        (LatticeRows(step=STEP), (3, 7, 5)),
        (LatticeRows(0.1), (3, 7, 5)),
        (row_codec({"id": "cnr_lattice", "step": STEP, "then": [{"id": "zstd"}]}), (3, 7, 5)),
        (FloatingRows(3), (2, 0, 5)),
        (UniformRows("asymmetric", 4), (2, 0, 5)),
        (LatticeRows(16.0), (3, 32, 5)),
    ],
    ids=repr,
)
def test_reports_tell_the_shares(codec: Any, shares: tuple[int, int, int]) -> None:
    (report,) = error_report(rows_of_all_kinds(8), codecs=[codec])
    found = report.raw_share, report.finer_share, report.zero_share
    assert found == pytest.approx([share / 40 for share in shares])
