"""Ours and its peers behind one face: rows to something and back, on one thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numcodecs
import numpy as np
import torch
from sklearn.cluster import KMeans  # type: ignore[import-untyped]  # scikit-learn ships no types
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]  # as above

from benchmarks.codec_bench.rows import Rows
from cnr_codecs import KMeansRows, RowCodec, UniformRows

_QUANTIZED = torch.ops.quantized


@dataclass(frozen=True)
class Contender:
    """A way to encode rows (n, dim). `slow` ones take milliseconds a row, and get few."""

    name: str
    bits: int
    encode: Callable[[Rows], Any]
    decode: Callable[[Any], Rows]
    slow: bool = False


def ours(name: str, codec: RowCodec, bits: int) -> Contender:
    """One of our codecs, as numcodecs gives it. Decoding includes the proof of the payload and, as for the peers, the
    memory for the rows.
    """
    face = numcodecs.get_codec(codec.get_config())
    return Contender(name, bits, face.encode, face.decode)


def _torch(
    name: str, bits: int, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> Contender:
    def encode(rows: Rows) -> Any:
        return pack(torch.from_numpy(rows))

    def decode(packed: Any) -> Rows:
        rows: Rows = unpack(packed).numpy()
        return rows

    return Contender(name, bits, encode, decode)


def _kmeans_fit(rows: Rows) -> list[tuple[Rows, Any]]:
    with warnings.catch_warnings():
        # A row may hold fewer different values than there are clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # One model a row is what the peer is: it knows no batches of small problems.
        return [_kmeans_row(row) for row in rows]


def _kmeans_row(row: Rows) -> tuple[Rows, Any]:
    clusters = min(16, len(row))
    fitted = KMeans(clusters, n_init=1, max_iter=15, random_state=0).fit(row[:, None])
    return fitted.cluster_centers_[:, 0].astype(np.float32), fitted.labels_


def _kmeans_rows(fitted: list[tuple[Rows, Any]]) -> Rows:
    return np.stack([centers[labels] for centers, labels in fitted])


ASYMMETRIC_8 = ours("ours, asymmetric", UniformRows("asymmetric", 8), 8)
ADAPTIVE_4 = ours("ours, adaptive", UniformRows("adaptive", 4), 4)
ADAPTIVE_2 = ours("ours, adaptive", UniformRows("adaptive", 2), 2)
ASYMMETRIC_4 = ours("ours, asymmetric", UniformRows("asymmetric", 4), 4)
ASYMMETRIC_2 = ours("ours, asymmetric", UniformRows("asymmetric", 2), 2)
WALK_4 = ours("ours, the paper's walk", UniformRows("adaptive", 4, 45, 0.5), 4)
KMEANS_4 = ours("ours, k-means a row", KMeansRows(4), 4)
WALK_2 = ours("ours, the paper's walk", UniformRows("adaptive", 2, 25, 0.99), 2)
TORCH_8 = _torch(
    "torch, byte", 8, _QUANTIZED.embedding_bag_byte_prepack, _QUANTIZED.embedding_bag_byte_unpack
)
TORCH_4 = _torch(
    "torch, greedy 45 bins",
    4,
    lambda rows: _QUANTIZED.embedding_bag_4bit_prepack(rows, True, 45, 0.5),
    _QUANTIZED.embedding_bag_4bit_unpack,
)
TORCH_2 = _torch(
    "torch, greedy 25 bins",
    2,
    lambda rows: _QUANTIZED.embedding_bag_2bit_prepack(rows, True, 25, 0.99),
    _QUANTIZED.embedding_bag_2bit_unpack,
)
SKLEARN_4 = Contender("scikit-learn, k-means a row", 4, _kmeans_fit, _kmeans_rows, slow=True)

CONTENDERS = (
    *(ASYMMETRIC_8, TORCH_8),
    *(ADAPTIVE_4, WALK_4, ASYMMETRIC_4, TORCH_4, KMEANS_4, SKLEARN_4),
    *(ADAPTIVE_2, WALK_2, ASYMMETRIC_2, TORCH_2),
)
