"""Row codecs that golden stores were written with: configurations by table, and classes for what these write in large
tables alone, or never."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cnr_codecs
from cnr_codecs import ParameterType, RowSet, Scheme, Segment

UNIFORM: Mapping[str, dict[str, Any]] = {
    f"{scheme}{bits}": {"id": "cnr_uniform", "scheme": scheme, "bits": bits}
    for scheme, widths in {
        "symmetric": (2, 3, 4, 8, 1, 6),
        "asymmetric": (2, 3, 4, 8, 5, 7),
        "adaptive": (2, 3, 4, 8),
    }.items()
    for bits in widths
} | {
    "walk": {"id": "cnr_uniform", "scheme": "adaptive", "bits": 4, "bins": 40, "ratio": 0.8},
    "exact": {"id": "cnr_rows"},
}
KMEANS: Mapping[str, dict[str, Any]] = {
    "row4": {"id": "cnr_kmeans", "bits": 4},
    "row1": {"id": "cnr_kmeans", "bits": 1, "group": "row"},
    "row2exact": {"id": "cnr_kmeans", "bits": 2, "group": "row", "exact": True},
    "block": {"id": "cnr_kmeans", "bits": 4, "group": "block"},
    "block3exact": {"id": "cnr_kmeans", "bits": 3, "group": "block", "block_rows": 5, "exact": True},
    "manyblocks": {"id": "cnr_kmeans", "bits": 1, "group": "block", "block_rows": 1},
    "cluster": {"id": "cnr_kmeans", "bits": 2, "group": "cluster"},
    "cluster8": {"id": "cnr_kmeans", "bits": 3, "group": "cluster", "clusters": 4, "exact": True},
}
FOLLOWED: Mapping[str, dict[str, Any]] = {
    "zstd": {"id": "cnr_uniform", "bits": 4, "then": [{"id": "zstd", "level": 3}]},
    "checked": {"id": "cnr_kmeans", "bits": 2, "then": [{"id": "zstd", "level": -5, "checksum": True}]},
    "blosc": {"id": "cnr_rows", "then": [{"id": "blosc", "cname": "lz4", "shuffle": 2}]},
    "shuffled": {"id": "cnr_rows", "then": [{"id": "blosc", "cname": "zstd", "shuffle": -1}]},
    "lz4": {"id": "cnr_rows", "then": [{"id": "lz4"}]},
    "four": {"id": "cnr_rows", "then": [{"id": "lz4"}, {"id": "blosc"}, {"id": "lz4"}, {"id": "zstd"}]},
}


@dataclass(frozen=True)
class Roomy:
    """Announces so many bytes a row that a small table gets many chunks and several shards."""

    announced_bytes: float
    inner: Any = field(default_factory=lambda: cnr_codecs.UniformRows("asymmetric", 8))

    def get_config(self) -> dict[str, Any]:
        return {"id": "roomy", "announced_bytes": self.announced_bytes}

    def zarr_codec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.inner.zarr_codec()
        return found

    def bytes_per_row(self, dim: int, element: str) -> float:
        return self.announced_bytes

    def encode_rows(self, values: Any, offsets: Any, rows: int, *, element: str, seal: int = 0) -> bytes:
        found: bytes = self.inner.encode_rows(values, offsets, rows, element=element, seal=seal)
        return found


@dataclass(frozen=True)
class Odd:
    """Rows of zeros are absent, rows above zero have codebooks of float32, all others are as they are."""

    def get_config(self) -> dict[str, Any]:
        return {"id": "odd"}

    def zarr_codec(self) -> dict[str, Any]:
        return {"name": "cnr.rows", "configuration": {}}

    def bytes_per_row(self, dim: int, element: str) -> float:
        return 4.0 * dim

    def encode_rows(self, values: Any, offsets: Any, rows: int, *, element: str, seal: int = 0) -> bytes:
        kind, values, offsets = cnr_codecs.check_rows(values, offsets, rows, element)
        absent = ~values.any(axis=1)
        coded = (values > 0).all(axis=1) & np.isfinite(values).all(axis=1)
        segments = []
        if absent.any():
            codes = np.empty((absent.sum(), 0), np.uint8)
            placed = RowSet.of(offsets[absent], rows)
            none = np.empty((0, absent.sum()), np.float32)
            segments.append(Segment(Scheme.ABSENT, 0, ParameterType.NONE, placed, none, codes))
        if coded.any():
            rising = np.quantile(values[coded], [0, 0.3, 0.6, 1], axis=1).T.astype(np.float32)
            chosen = np.abs(values[coded][:, :, None] - rising[:, None]).argmin(axis=2)
            codes = cnr_codecs.pack(chosen.astype(np.uint8), 2)
            placed = RowSet.of(offsets[coded], rows)
            segments.append(Segment(Scheme.CODEBOOK, 2, ParameterType.FLOAT32, placed, rising, codes))
        rest = np.flatnonzero(~absent & ~coded)
        if len(rest):
            segments.append(cnr_codecs.raw_segment(values, offsets, rows, rest, kind))
        return cnr_codecs.build_payload(rows, values.shape[1], kind, segments, seal)


class Refusing:
    """Fails once it is told to, which gives a save up after some of its objects were put."""

    def __init__(self) -> None:
        self.refuses = False
        self._inner = cnr_codecs.LosslessRows()

    def get_config(self) -> dict[str, Any]:
        return {"id": "refusing"}

    def zarr_codec(self) -> dict[str, Any]:
        return self._inner.zarr_codec()

    def bytes_per_row(self, dim: int, element: str) -> float:
        return self._inner.bytes_per_row(dim, element)

    def encode_rows(self, values: Any, offsets: Any, rows: int, *, element: str, seal: int = 0) -> bytes:
        if self.refuses:
            raise RuntimeError("told to refuse")
        return self._inner.encode_rows(values, offsets, rows, element=element, seal=seal)
