"""Configurations: what makes a codec, and what does not."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from cnr_codecs import (
    CodecConfigError,
    CodecError,
    FloatingRows,
    KMeansRows,
    LatticeRows,
    LosslessRows,
    RowCodec,
    RowsError,
    UniformRows,
    array_dtype,
    element_of,
    fill_value,
    row_codec,
)

CODECS = [
    (UniformRows(), {"id": "cnr_uniform", "scheme": "adaptive", "bits": 4}),
    (UniformRows("symmetric", 8), {"id": "cnr_uniform", "scheme": "symmetric", "bits": 8}),
    (UniformRows(bins=20), {"id": "cnr_uniform", "scheme": "adaptive", "bits": 4, "bins": 20, "ratio": 0.5}),
    (
        UniformRows(bits=2, ratio=0.5),
        {"id": "cnr_uniform", "scheme": "adaptive", "bits": 2, "bins": 25, "ratio": 0.5},
    ),
    (KMeansRows(), {"id": "cnr_kmeans", "bits": 4, "group": "row"}),
    (KMeansRows(2, exact=True), {"id": "cnr_kmeans", "bits": 2, "group": "row", "exact": True}),
    (KMeansRows(4, "block"), {"id": "cnr_kmeans", "bits": 4, "group": "block"}),
    (
        KMeansRows(4, "block", block_rows=8),
        {"id": "cnr_kmeans", "bits": 4, "group": "block", "block_rows": 8},
    ),
    (
        KMeansRows(1, "cluster", clusters=8),
        {"id": "cnr_kmeans", "bits": 1, "group": "cluster", "clusters": 8},
    ),
    (FloatingRows(), {"id": "cnr_floating", "mantissa_bits": 3}),
    (FloatingRows(7), {"id": "cnr_floating", "mantissa_bits": 7}),
    (LatticeRows(), {"id": "cnr_lattice", "rms_step": 0.35}),
    (LatticeRows(1), {"id": "cnr_lattice", "rms_step": 1.0}),
    (LatticeRows(step=0.5), {"id": "cnr_lattice", "step": 0.5}),
    (LatticeRows(0.1).with_step(0.25), {"id": "cnr_lattice", "rms_step": 0.1, "step": 0.25}),
    (LosslessRows(), {"id": "cnr_rows"}),
]


@pytest.mark.parametrize(("codec", "config"), CODECS)
def test_configurations_round_trip(codec: RowCodec, config: dict[str, Any]) -> None:
    assert codec.get_config() == config
    assert row_codec(config) == codec
    assert row_codec(codec) is codec
    assert isinstance(codec, RowCodec)
    assert hash(row_codec(config)) == hash(codec)
    options = {name: value for name, value in config.items() if name != "id"}
    assert codec.zarr_codec() == {"name": config["id"].replace("_", "."), "configuration": options}


def test_names_alone_make_default_codecs() -> None:
    assert row_codec("cnr_uniform") == UniformRows()
    assert row_codec("cnr_kmeans") == KMeansRows() == KMeansRows(4, "row")
    assert row_codec("cnr_rows") == LosslessRows()
    assert KMeansRows(4, "block", block_rows=64) == KMeansRows(4, "block")


@pytest.mark.parametrize(
    ("bits", "bins", "ratio"), [(1, 25, 0.99), (3, 25, 0.99), (4, 45, 0.5), (8, 45, 0.5)]
)
def test_bins_or_ratio_mean_the_walk_and_the_paper_gives_the_other(
    bits: int, bins: int, ratio: float
) -> None:
    walk = UniformRows("adaptive", bits, bins, ratio)
    assert UniformRows("adaptive", bits, bins) == UniformRows("adaptive", bits, ratio=ratio) == walk
    assert walk != UniformRows("adaptive", bits)
    assert row_codec(walk.get_config()) == walk


def test_eight_bits_are_not_searched_unless_asked() -> None:
    values = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)

    def encoded(codec: RowCodec) -> bytes:
        return codec.encode_rows(values, None, 50, element="float32")

    assert encoded(UniformRows("adaptive", 8)) == encoded(UniformRows("asymmetric", 8))
    assert encoded(UniformRows("adaptive", 4, ratio=0)) == encoded(UniformRows("asymmetric", 4))
    assert encoded(UniformRows("adaptive", 4, ratio=1)) != encoded(UniformRows("asymmetric", 4))


def test_codecs_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        UniformRows().bits = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("cnr_kmean", "cnr_uniform, cnr_kmeans, cnr_lattice, cnr_floating, cnr_rows"),
        ({"bits": 4}, "unknown codec None"),
        ({"id": "zstd"}, "'zstd'"),
        ({"id": "cnr_uniform", "bit": 4}, "bit"),
        ({"id": "cnr_rows", "bits": 4}, "bits"),
        ({"id": "cnr_uniform", "scheme": "greedy"}, "symmetric, asymmetric, adaptive"),
        ({"id": "cnr_uniform", "bits": 0}, "1 to 8, got 0"),
        ({"id": "cnr_uniform", "bits": 9}, "1 to 8, got 9"),
        ({"id": "cnr_uniform", "bits": "4"}, "got '4'"),
        ({"id": "cnr_uniform", "bits": True}, "got True"),
        ({"id": "cnr_uniform", "bins": 1}, "bins"),
        ({"id": "cnr_uniform", "bins": 2.5}, "bins"),
        ({"id": "cnr_uniform", "ratio": 1.5}, "ratio"),
        ({"id": "cnr_uniform", "ratio": float("nan")}, "ratio"),
        ({"id": "cnr_uniform", "scheme": "asymmetric", "bins": 45}, "adaptive"),
        ({"id": "cnr_kmeans", "bits": 9}, "1 to 8, got 9"),
        ({"id": "cnr_kmeans", "group": "column"}, "row, block, cluster"),
        ({"id": "cnr_kmeans", "exact": 1}, "true or false"),
        ({"id": "cnr_kmeans", "block_rows": 8}, "group 'block'"),
        ({"id": "cnr_kmeans", "group": "block", "clusters": 8}, "group 'cluster'"),
        ({"id": "cnr_kmeans", "group": "block", "block_rows": 0}, "got 0"),
        ({"id": "cnr_kmeans", "group": "cluster", "clusters": 12}, "power of two"),
        ({"id": "cnr_kmeans", "group": "cluster", "clusters": 512}, "power of two"),
        ({"id": "cnr_floating", "mantissa_bits": 0}, "integer from 1 to 7, or 23, got 0"),
        ({"id": "cnr_floating", "mantissa_bits": 8}, "integer from 1 to 7, or 23, got 8"),
        ({"id": "cnr_floating", "mantissa_bits": 3.0}, "integer from 1 to 7, or 23, got 3.0"),
        ({"id": "cnr_floating", "mantissa_bits": True}, "integer from 1 to 7, or 23, got True"),
        ({"id": "cnr_floating", "bits": 4}, "bits"),
        ({"id": "cnr_lattice", "rms_step": 0}, "0.001 to 16.0, got 0.0"),
        ({"id": "cnr_lattice", "rms_step": 17}, "0.001 to 16.0, got 17.0"),
        ({"id": "cnr_lattice", "rms_step": float("nan")}, "a number, got nan"),
        ({"id": "cnr_lattice", "rms_step": "0.35"}, "a number, got '0.35'"),
        ({"id": "cnr_lattice", "step": 0}, "8 significant bits"),
        ({"id": "cnr_lattice", "step": 0.1}, "lattice_step rounds"),
        ({"id": "cnr_lattice", "step": -0.5}, "got -0.5"),
        ({"id": "cnr_lattice", "step": 2.0**101}, "2\\*\\*100"),
        ({"id": "cnr_lattice", "step": True}, "a number, got True"),
        ({"id": "cnr_lattice", "bits": 4}, "bits"),
        (7, "int"),
    ],
)
def test_wrong_configurations_are_refused(config: Any, message: str) -> None:
    with pytest.raises(CodecConfigError, match=message):
        row_codec(config)


def test_errors_are_values_errors_too() -> None:
    assert issubclass(CodecConfigError, CodecError)
    with pytest.raises(ValueError, match="complex64"):
        element_of("c8")
    with pytest.raises(RowsError, match="float8"):
        array_dtype("float8")


def test_dtypes_of_elements() -> None:
    assert element_of(">f4") == "float32"
    assert array_dtype("bfloat16") == np.float32
    assert np.isnan(fill_value("float16"))
    assert fill_value("int64") == 0
    assert fill_value("bool") == np.False_
