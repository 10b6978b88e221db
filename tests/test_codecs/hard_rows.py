"""Rows that break quantizers, and what the tests of quantizers do with them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import cnr_codecs
from cnr_codecs import Payload, RowCodec, Scheme, Segment
from cnr_codecs.protocol import Rows

FLOAT_MAX = float(np.finfo(np.float32).max)
RowMaker: TypeAlias = Callable[[np.random.Generator, int], Any]
ROW_MAKERS: dict[str, RowMaker] = {
    "normal": lambda rng, dim: rng.normal(0, 0.1, dim),
    "constant": lambda rng, dim: np.full(dim, rng.choice([0.1, 1.0, -3e38, 1e-42, 0.0, -0.0])),
    "zeros of both signs": lambda rng, dim: rng.choice([0.0, -0.0], dim),
    "with nan": lambda rng, dim: rng.choice([1.0, np.nan, -np.nan], dim),
    "with inf": lambda rng, dim: rng.choice([1.0, np.inf, -np.inf], dim),
    "subnormal": lambda rng, dim: rng.normal(0, 1e-41, dim),
    "small": lambda rng, dim: rng.uniform(-3e-4, 3e-4, dim),
    "tiny": lambda rng, dim: rng.uniform(-1e-30, 1e-30, dim),
    "tiny range, huge offset": lambda rng, dim: 1e8 + rng.uniform(0, 100, dim),
    "one step apart": lambda rng, dim: np.nextafter(np.float32(7), rng.choice([0, 7, 9], dim).astype("f4")),
    "largest": lambda rng, dim: rng.choice([FLOAT_MAX, -FLOAT_MAX, 0], dim),
    "nearly largest": lambda rng, dim: rng.uniform(1e38, FLOAT_MAX, dim),
    "one outlier": lambda rng, dim: np.where(np.arange(dim) == dim // 2, 1e6, rng.normal(0, 1e-3, dim)),
    "beyond float16": lambda rng, dim: rng.uniform(-1e5, 1e5, dim),
    "any bits": lambda rng, dim: rng.integers(0, 1 << 32, dim, dtype=np.uint32).view(np.float32),
}
SCHEMES = st.sampled_from(["symmetric", "asymmetric", "adaptive"])
BITS = st.integers(1, 8)


@st.composite
def adversarial_rows(
    draw: st.DrawFn, makers: Mapping[str, RowMaker] = ROW_MAKERS, min_rows: int = 1, most_rows: int = 70
) -> Rows:
    """Rows (n, dim) float32 of the kinds that break quantizers, mixed."""
    dim = draw(st.integers(1, 70))
    kinds = draw(st.lists(st.sampled_from(sorted(makers)), min_size=min_rows, max_size=most_rows))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    with np.errstate(all="ignore"):
        rows = [np.asarray(makers[kind](rng, dim)).astype(np.float32) for kind in kinds]
    return np.stack(rows) if rows else np.empty((0, dim), np.float32)


def encode(codec: RowCodec, values: Rows, element: str = "float32") -> Payload:
    return cnr_codecs.parse(codec.encode_rows(values, None, max(len(values), 1), element=element))


def decode(payload: Payload) -> Rows:
    out = np.full((payload.rows, payload.dim), 7, cnr_codecs.array_dtype(payload.element))
    need = np.ones(payload.rows, np.uint8)
    cnr_codecs.decode_into(payload, out, need)
    return out


def rows_of(segment: Segment) -> npt.NDArray[np.intp]:
    return np.concatenate([rows for _, rows in segment.row_set.blocks()]).astype(np.intp)


def affine(segment: Segment) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scale and offset of each row: a code q decodes to scale * q + offset."""
    first, *others = segment.parameters.astype(np.float32)
    if segment.scheme is Scheme.SYMMETRIC:
        return first * np.float32(2), first * np.float32(1 - (1 << segment.bits))
    return first, others[0]


def quantized(payload: Payload) -> list[tuple[npt.NDArray[np.intp], Rows, Rows, Segment]]:
    """(rows, scale, offset, segment) of each segment with codes."""
    return [
        (rows_of(segment), *affine(segment), segment)
        for segment in payload.segments
        if segment.scheme is not Scheme.RAW
    ]
