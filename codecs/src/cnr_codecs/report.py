"""Measures the error, bytes and time of codecs on rows of a table, and chooses by the error of a sample of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_codecs.compressed import Followed, most_packed_bytes
from cnr_codecs.dense import decode_dense
from cnr_codecs.elements import element_of
from cnr_codecs.errors import RowsError
from cnr_codecs.kmeans.kmeans import GROUPS, KMeansRows
from cnr_codecs.lattice.lattice import LatticeRows
from cnr_codecs.lattice.steps import median_scale, scale_counts
from cnr_codecs.payload.payload import Payload, Scheme, Segment, head_bytes
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import RowCodec, Rows
from cnr_codecs.uniform.uniform import SCHEMES, UniformRows

WIDTHS = range(1, 9)
RMS_STEPS = (0.35, 0.2, 0.1, 0.05)
SAMPLE_SHARE = 1e-5
SAMPLE_FLOOR_ROWS = 1000
BINS_LADDER = (5, 10, 15, 20, 25, 30, 35, 40, 45, 60, 80, 100)
RATIO_LADDER = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOLERANCE = 1.01


@dataclass(frozen=True)
class CodecReport:
    """What one codec was measured to do with one set of rows.

    Attributes
    ----------
    config
        The codec's configuration, as `row_codec` takes it.
    mean_l2_error
        Mean of ||x - x'||_2 over the rows.
    mean_relative_error
        Mean of ||x - x'||_2 / ||x||_2 over the rows that are not all zero.
    row_bytes
        Encoded bytes a row, with parameters and codebooks. Headers and row sets are left out, because their share
        depends on the chunk. For a codec that others follow, all bytes count.
    encode_seconds, decode_seconds
        Seconds for all rows on one thread, the shorter of two runs.
    decoded_bytes
        Bytes of all rows when decoded. Divided by the seconds it gives the throughput.
    raw_share, finer_share, zero_share
        Shares of the rows that are stored as they are, since the codec has no codes for them; that are on a finer step
        than that of the lattice; and that decode to zeros alone.
    """

    config: dict[str, Any]
    mean_l2_error: float
    mean_relative_error: float
    row_bytes: float
    encode_seconds: float
    decode_seconds: float
    decoded_bytes: int
    raw_share: float = 0.0
    finer_share: float = 0.0
    zero_share: float = 0.0


def error_report(rows: Rows, *, codecs: Iterable[RowCodec] | None = None) -> list[CodecReport]:
    """Measure codecs on rows, and return a report of each.

    Parameters
    ----------
    rows
        (n, dim) of float32 or float16, n at least 1. A sample of a table is enough: time and memory grow with n.
    codecs
        The codecs, in the order of the reports. By default every scheme at every width of 1 to 8 bits, and the
        lattice at four steps.

    Raises
    ------
    RowsError
        There are no rows, or a codec doesn't store their dtype.
    """
    if rows.ndim != 2 or rows.size == 0:
        raise RowsError(f"expected rows (n, dim) with values, got shape {rows.shape}")
    chosen = all_codecs() if codecs is None else codecs
    return [_measure(codec, np.ascontiguousarray(rows)) for codec in chosen]


def all_codecs() -> list[RowCodec]:
    """Return every scheme at every width, uniform schemes first, and the lattice at four steps."""
    uniform: list[RowCodec] = [UniformRows(scheme, bits) for scheme in SCHEMES for bits in WIDTHS]
    kmeans = (KMeansRows(bits, group) for group in GROUPS for bits in WIDTHS)
    return [*uniform, *kmeans, *map(LatticeRows, RMS_STEPS)]


def l2_errors(rows: Rows, decoded: Rows) -> npt.NDArray[np.float64]:
    """Return ||x - x'||_2 of each row, float64 (n,). Equal values differ by 0, NaN and infinities too."""
    with np.errstate(invalid="ignore"):
        differences = rows.astype(np.float64) - decoded
    differences[(rows == decoded) | (np.isnan(rows) & np.isnan(decoded))] = 0
    errors: npt.NDArray[np.float64] = np.linalg.norm(differences, axis=1)
    return errors


def _measure(codec: RowCodec, rows: Rows) -> CodecReport:
    element = element_of(rows.dtype)
    encode_seconds = decode_seconds = np.inf
    # The first run may compile the loops, and its memory is new to the process.
    for _ in range(2):
        began = time.perf_counter()
        data = codec.encode_rows(rows, None, len(rows), element=element)
        encoded = time.perf_counter()
        payload = _parsed(codec, data, rows)
        decoded = decode_dense(payload)
        decode_seconds = min(decode_seconds, time.perf_counter() - encoded)
        encode_seconds = min(encode_seconds, encoded - began)
    errors = l2_errors(rows, decoded)
    raw, finer = _counts(codec, payload.segments, rows)
    return CodecReport(
        config=codec.get_config(),
        mean_l2_error=float(errors.mean()),
        mean_relative_error=_mean_relative(errors, rows),
        row_bytes=_content_bytes(codec, data, payload) / len(rows),
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
        decoded_bytes=rows.nbytes,
        raw_share=raw / len(rows),
        finer_share=finer / len(rows),
        zero_share=1 - np.count_nonzero(decoded.any(axis=1)) / len(rows),
    )


def _parsed(codec: RowCodec, data: bytes, rows: Rows) -> Payload:
    if isinstance(codec, Followed):
        most = most_packed_bytes(len(rows), rows.shape[1], element_of(rows.dtype))
        data = codec.compressors.unpack(data, most)
    return parse(data, max_decoded_bytes=rows.nbytes)


def _counts(codec: RowCodec, segments: Sequence[Segment], rows: Rows) -> tuple[int, int]:
    """Return how many rows are stored as they are, and how many on a finer step than that of the lattice."""
    own = codec.codec if isinstance(codec, Followed) else codec
    raw = sum(each.row_set.count for each in segments if each.scheme is Scheme.RAW)
    if not isinstance(own, LatticeRows):
        return raw, 0
    step = own.step_of(median_scale(scale_counts(rows)))
    finer = (each for each in segments if each.scheme is Scheme.LATTICE and each.grid.step < step)
    return raw, sum(each.row_set.count for each in finer)


def _mean_relative(errors: npt.NDArray[np.float64], rows: Rows) -> float:
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    judged = np.isfinite(norms) & (norms > 0)
    return float((errors[judged] / norms[judged]).mean()) if judged.any() else 0.0


def _content_bytes(codec: RowCodec, data: bytes, payload: Payload) -> int:
    if isinstance(codec, Followed):
        return len(data)
    return len(data) - head_bytes(segment.row_set for segment in payload.segments)


def choose_search(rows: Rows, bits: int, *, seed: int = 0) -> UniformRows:
    """Return the adaptive codec that suits a table: the cheapest search within 1 % of the least error.

    It has explicit `bins` and `ratio`, unless the default search of `UniformRows` is as good. The error is the mean of
    ||x - x'||_2 over sampled rows. The rule, on one sample throughout:

    1. Sample 0.001 % of the finite rows without replacement, but at least 1,000, or all if there are fewer.
    2. Let the greedy walk cut off everything (ratio 1), with 5, 10, 15 ... 100 bins. Take the fewest bins whose
       error is at most 1.01 times the least of these errors.
    3. With these bins, let the walk stop earlier: take the smallest ratio of 0, 0.1 ... 1 whose error is at most 1.01
       times the same least error.
    4. If the default search has no larger error than that walk, take the default.

    The same rows, bits and seed give the same codec.

    Parameters
    ----------
    rows
        (n, dim) of float32 or float16, for example a memory map of a table: only the sample is read.
    bits
        Bits of a code, 1 to 8.
    seed
        The seed of the sample.

    Raises
    ------
    RowsError
        There are no finite rows with values, or they can't be quantized.
    CodecConfigError
        `bits` is out of range.
    """
    default = UniformRows("adaptive", bits)
    if rows.ndim != 2 or rows.size == 0:
        raise RowsError(f"expected rows (n, dim) with values, got shape {rows.shape}")
    default.bytes_per_row(rows.shape[1], element_of(rows.dtype))
    sample = _sample(rows, seed)
    full = {bins: _mean_error(UniformRows("adaptive", bits, bins, 1.0), sample) for bins in BINS_LADDER}
    allowed = min(full.values()) * TOLERANCE
    bins = next(bins for bins, error in full.items() if error <= allowed)
    for ratio in RATIO_LADDER:
        walk = UniformRows("adaptive", bits, bins, ratio)
        error = _mean_error(walk, sample)
        if error <= allowed:
            break
    return default if _mean_error(default, sample) <= error else walk


def _sample(rows: Rows, seed: int) -> Rows:
    count = min(len(rows), max(SAMPLE_FLOOR_ROWS, round(len(rows) * SAMPLE_SHARE)))
    chosen = np.sort(np.random.default_rng(seed).choice(len(rows), count, replace=False))
    sample = np.ascontiguousarray(rows[chosen])
    finite: Rows = sample[np.isfinite(sample).all(axis=1)]
    if len(finite) == 0:
        raise RowsError(
            f"none of {count} sampled rows is finite; such rows are stored raw, so there is nothing to choose"
        )
    return finite


def _mean_error(codec: UniformRows, sample: Rows) -> float:
    data = codec.encode_rows(sample, None, len(sample), element=element_of(sample.dtype))
    decoded = decode_dense(parse(data, max_decoded_bytes=sample.nbytes))
    return float(l2_errors(sample, decoded).mean())
