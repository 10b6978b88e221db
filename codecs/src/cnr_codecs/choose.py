"""Chooses `bins` and `ratio` of the adaptive search from a small sample of a table's rows, as the paper does."""

from __future__ import annotations

import numpy as np

from cnr_codecs.dense import decode_dense
from cnr_codecs.elements import element_of
from cnr_codecs.errors import RowsError
from cnr_codecs.payload.validate import parse
from cnr_codecs.protocol import Rows
from cnr_codecs.report import l2_errors
from cnr_codecs.uniform.uniform import UniformRows

SAMPLE_SHARE = 1e-5
SAMPLE_FLOOR_ROWS = 1000
BINS_LADDER = (5, 10, 15, 20, 25, 30, 35, 40, 45, 60, 80, 100)
RATIO_LADDER = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOLERANCE = 1.01


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
