"""Reports say of each codec what numpy says of the rows that it decodes."""

import numpy as np
import numpy.typing as npt
import pytest

import cnr_codecs
from cnr_codecs import LosslessRows, RowCodec, RowsError, UniformRows, error_report, row_codec
from cnr_codecs.protocol import Rows


def some_rows(count: int = 400, dim: int = 24, dtype: npt.DTypeLike = np.float32) -> Rows:
    return np.random.default_rng(2).laplace(0, 0.2, (count, dim)).astype(dtype)


def decoded_by(codec: RowCodec, rows: Rows) -> Rows:
    element = cnr_codecs.element_of(rows.dtype)
    payload = cnr_codecs.parse(codec.encode_rows(rows, None, len(rows), element=element))
    out = np.empty_like(rows)
    assert cnr_codecs.decode_into(payload, out, np.ones(len(rows), np.uint8)) == len(rows)
    return out


def test_every_scheme_and_width_is_reported() -> None:
    reports = error_report(some_rows())
    found = {
        (report.config["scheme"], report.config["bits"]): report
        for report in reports
        if "scheme" in report.config
    }
    for scheme in "symmetric", "asymmetric", "adaptive":
        errors = [found[scheme, bits].mean_l2_error for bits in range(1, 9)]
        assert errors == sorted(errors, reverse=True)
        relative = [found[scheme, bits].mean_relative_error for bits in range(1, 9)]
        assert relative == sorted(relative, reverse=True)
    for bits in range(1, 9):
        assert found["adaptive", bits].mean_l2_error <= found["asymmetric", bits].mean_l2_error * 1.0001
    lattice = {report.config["rms_step"]: report for report in reports if "rms_step" in report.config}
    assert list(lattice) == [0.35, 0.2, 0.1, 0.05]
    steps = [report.mean_l2_error for report in lattice.values()]
    assert steps == sorted(steps, reverse=True)
    assert all(report.encode_seconds > 0 and report.decode_seconds > 0 for report in reports)
    assert all(row_codec(report.config).get_config() == report.config for report in reports)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("codec", [UniformRows("adaptive", 3), UniformRows("symmetric", 5)], ids=repr)
def test_errors_are_those_of_the_decoded_rows(codec: RowCodec, dtype: npt.DTypeLike) -> None:
    rows = some_rows(dtype=dtype)
    (report,) = error_report(rows, codecs=[codec])
    differences = np.linalg.norm(rows.astype(float) - decoded_by(codec, rows), axis=1)
    assert report.mean_l2_error == pytest.approx(differences.mean(), rel=1e-12)
    relative = differences / np.linalg.norm(rows.astype(float), axis=1)
    assert report.mean_relative_error == pytest.approx(relative.mean(), rel=1e-12)
    assert report.decoded_bytes == rows.nbytes


@pytest.mark.parametrize(
    ("codec", "row_bytes"),
    [
        (UniformRows("adaptive", 4), 4 + 12),
        (UniformRows("asymmetric", 3), 4 + 9),
        (UniformRows("symmetric", 8), 2 + 24),
        (LosslessRows(), 96),
    ],
    ids=repr,
)
def test_bytes_are_those_of_parameters_and_codes(codec: RowCodec, row_bytes: float) -> None:
    (report,) = error_report(some_rows(), codecs=[codec])
    assert report.row_bytes == row_bytes


def test_row_sets_are_left_out_of_the_bytes() -> None:
    rows = some_rows()
    rows[::2] += 100_000  # float32 parameters: two segments, each with a bitmap
    (report,) = error_report(rows, codecs=[UniformRows("asymmetric", 8)])
    assert report.row_bytes == (4 + 8) / 2 + 24


def test_a_codec_that_others_follow_counts_all_their_bytes() -> None:
    rows = some_rows()
    rows[1:] = rows[0]
    codec = row_codec({"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd"}]})
    plain, followed = error_report(rows, codecs=[UniformRows(bits=4), codec])
    assert followed.mean_l2_error == plain.mean_l2_error
    assert followed.row_bytes * len(rows) == len(codec.encode_rows(rows, None, len(rows), element="float32"))


def test_rows_that_are_stored_exactly_have_no_error() -> None:
    rows = some_rows(6)
    rows[0] = np.nan
    rows[1, :2] = np.inf, -np.inf
    rows[2] = 0
    rows[3:] = 2.5
    (report,) = error_report(rows, codecs=[UniformRows("asymmetric", 4)])
    assert report.mean_l2_error == 0
    assert report.mean_relative_error == 0


def test_rows_that_can_not_be_measured_are_refused() -> None:
    for shape in (0, 4), (4,), (2, 0):
        with pytest.raises(RowsError, match="shape"):
            error_report(np.zeros(shape, np.float32))
    with pytest.raises(RowsError, match="int32"):
        error_report(np.zeros((3, 3), np.int32))
    assert error_report(some_rows(2), codecs=[]) == []
