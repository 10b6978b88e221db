"""Rows as integers, on one step or a floating grid: finds the integers of rows, and writes rows from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnr_codecs.kernels.building.compiled import kernel
from cnr_codecs.kernels.building.instructions import bits_of, prefetch

# Beyond every limit, and within an int32.
_BEYOND = np.float64(1 << 16)
_1 = np.uint64(1)
# Sums lie anywhere in memory: those of a row are asked for so many rows before they are needed.
_AHEAD = 12
_LINE = 16
"""Sums of a line of the cache."""


@kernel
def quantize(values: Any, dim: int, inverse: float, limit: int, codes: Any, raw: Any) -> Any:
    """Write the codes of rows to `codes` (int16), one row after the other, and return how many rows have any.

    `values` is flat float32. A code is the value times `inverse`, as float64, rounded half even. A row that is not
    finite, or has a code beyond `limit`, is marked in `raw` (uint8), and its codes are overwritten.
    """
    width, held = np.uintp(dim), np.int64(0)
    for i in range(raw.size):
        start, place = np.uintp(i * dim), np.uintp(held * dim)
        most = np.int32(0)
        for j in range(width):
            exact = np.float64(values[start + j]) * inverse
            # NaN fails each comparison, and ends beyond every limit.
            exact = exact if exact > -_BEYOND else -_BEYOND
            exact = exact if exact < _BEYOND else _BEYOND
            code = np.int32(np.rint(exact))
            codes[place + j] = np.int16(code)
            most = max(most, abs(code))
        raw[i] = most > limit
        held += most <= limit
    return held


@kernel
def sum_squares(values: Any) -> float:
    """Return the sum of the squares of `values`, flat float32, as float64. It is not finite if a value is not.

    Value j belongs to sum j mod 64, and these sums are added in order: so the compiler can make vectors of them.
    """
    sums, lanes = np.zeros(64), np.uintp(64)
    whole = np.uintp(values.size // 64)
    for i in range(whole):
        for k in range(lanes):
            value = np.float64(values[i * lanes + k])
            sums[k] += value * value
    for k in range(np.uintp(values.size) - whole * lanes):
        value = np.float64(values[whole * lanes + k])
        sums[k] += value * value
    total = 0.0
    for k in range(lanes):
        total += sums[k]
    return total


@kernel
def place_rows(
    codes: Any, first: int, dim: int, step: Any, rows: Any, first_row: int, need: Any, flat: Any, stride: int
) -> int:
    """Write the wanted ones of `rows` (uint32) to `flat` (float32), clear their marks, and return their number.

    Row i of `rows` has the codes (int32) from `first` + i * `dim` on, and is row `rows[i] - first_row` of the output,
    which `need` (uint8) marks if it is wanted, and which begins at that many times `stride`.
    """
    written, width = 0, np.uintp(dim)
    for i in range(rows.size):
        place = np.int64(rows[i]) - first_row
        if need[place] == 0:
            continue
        need[place] = 0
        written += 1
        source, to = np.uintp(first + i * dim), np.uintp(place * stride)
        for j in range(width):
            flat[to + j] = step * np.float32(codes[source + j])
    return written


@kernel
def quantize_floating(
    bits: Any, dim: int, sign: int, shift: int, bias: int, least: int, most: int, codes: Any, raw: Any
) -> Any:
    """Write the codes of rows to `codes` (int16), one row after the other, and return how many rows have any.

    `bits` is flat uint32 or uint64: numbers whose sign is bit `sign`. A code's magnitude is what stands above `shift`
    bits, to which these are rounded half even, less `bias`. A row with a magnitude that is neither that of 0 nor from
    `least` to `most` is marked in `raw` (uint8), and its codes are overwritten.
    """
    width, held = np.uintp(dim), np.int64(0)
    below, top = np.uint64(shift), np.uint64(sign)
    mask, half = (_1 << top) - _1, (_1 << (below - _1)) - _1
    for i in range(raw.size):
        start, place = np.uintp(i * dim), np.uintp(held * dim)
        bad: Any = False
        for j in range(width):
            number = np.uint64(bits[start + j])
            size = number & mask
            magnitude: Any = np.int64((size + half + ((size >> below) & _1)) >> below) - bias
            magnitude = magnitude if size else 0
            bad |= size != 0 and (magnitude < least or magnitude > most)
            codes[place + j] = np.int16(-magnitude if number >> top else magnitude)
        raw[i] = bad
        held += not bad
    return held


@kernel
def find_centers(codes: Any, line: int, shift: int, centers: Any) -> None:
    """Write the mean of each line's magnitudes that are not 0, rounded down, to `centers` (int64); 0 without any.

    `codes` is flat int16. A magnitude is shifted by `shift` bits, the lowest of which is the sign.
    """
    for i in range(centers.size):
        total, count = np.int64(0), np.int64(0)
        for j in range(np.uintp(i * line), np.uintp(min((i + 1) * line, codes.size))):
            code = np.int64(codes[j])
            total += (abs(code) << shift) | (code < 0)
            count += code != 0
        centers[i] = total // count if count > 0 else 0


@kernel
def center_lines(codes: Any, line: int, shift: int, centers: Any, floor: int, symbols: Any) -> None:
    """Write lines of symbols (int32): each line's center less `floor`, then its magnitudes less the center.

    0 stays 0, also as a center, so differences from 0 on are raised by 1.
    """
    place = np.uintp(0)
    for i in range(centers.size):
        center = np.int64(centers[i])
        symbols[place] = np.int32(center - floor if center > 0 else 0)
        place += np.uintp(1)
        for j in range(np.uintp(i * line), np.uintp(min((i + 1) * line, codes.size))):
            code = np.int64(codes[j])
            rest = ((abs(code) << shift) | (code < 0)) - center
            rest += rest >= 0
            symbols[place] = np.int32(rest if code else 0)
            place += np.uintp(1)


@kernel
def restore_lines(symbols: Any, line: int, shift: int, floor: int, least: int, most: int, codes: Any) -> Any:
    """Write the codes (int32) of lines of symbols, and return how many there are; -1 if these are no such lines.

    A code other than 0 has a magnitude from `least` to `most`. `codes` may be `symbols`.
    """
    source, place, end = np.uintp(0), np.uintp(0), np.uintp(symbols.size)
    bad: Any = False
    while source < end:
        first = np.int64(symbols[source])
        center = first + floor if first else 0
        bad |= first < 0
        source += np.uintp(1)
        for _ in range(min(np.uintp(line), end - source)):
            rest = np.int64(symbols[source])
            magnitude = center + rest - (rest > 0)
            size = magnitude >> shift
            bad |= rest != 0 and (first == 0 or size < least or size > most)
            code = -size if magnitude & shift else size
            codes[place] = np.int32(code if rest else 0)
            source += np.uintp(1)
            place += np.uintp(1)
    return -1 if bad else np.int64(place)


@kernel
def place_floating(
    codes: Any, first: int, dim: int, shift: int, rows: Any, first_row: int, need: Any, flat: Any, stride: int
) -> int:
    """Write the wanted ones of `rows` (uint32) to `flat`, the bits of float32, clear their marks, return their number.

    As `place_rows`, with magnitudes that are shifted by `shift` bits.
    """
    written, width = 0, np.uintp(dim)
    for i in range(rows.size):
        place = np.int64(rows[i]) - first_row
        if need[place] == 0:
            continue
        need[place] = 0
        written += 1
        source, to = np.uintp(first + i * dim), np.uintp(place * stride)
        for j in range(width):
            code = np.int64(codes[source + j])
            flat[to + j] = np.uint32((abs(code) << shift) | ((code < 0) << 31))
    return written


@kernel
def add_rows(
    codes: Any,
    first: int,
    dim: int,
    step: Any,
    rows: Any,
    first_row: int,
    need: Any,
    sums: Any,
    place: int,
    stride: int,
    steps: Any,
    base: int,
) -> int:
    """Add the differences of the wanted ones of `rows` (uint32) to their sums, and return the number of rows added.

    Return -1 if a sum has another step. `rows`, `first` and `need` are as for `place_rows`; marks of 1 become 2, which
    says that there is a sum. Row i of the output has the sum (int32) from `place` + i * `stride` on, and the step
    `steps[base + i]` (float32).
    """
    added, width = 0, np.uintp(dim)
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            to = np.uintp(place + (np.int64(rows[i + _AHEAD]) - first_row) * stride)
            for j in range(np.uintp(0), width, np.uintp(_LINE)):
                prefetch(sums, to + j)
        row = np.int64(rows[i]) - first_row
        if need[row] == 0:
            continue
        source, to = np.uintp(first + i * dim), np.uintp(place + row * stride)
        if need[row] == 1:
            need[row] = 2
            steps[base + row] = step
            for j in range(width):
                sums[to + j] = codes[source + j]
        elif steps[base + row] != step:
            return -1
        else:
            for j in range(width):
                sums[to + j] += codes[source + j]
        added += 1
    return added


@kernel
def settle_rows(
    codes: Any,
    first: int,
    dim: int,
    step: Any,
    rows: Any,
    first_row: int,
    need: Any,
    sums: Any,
    place: int,
    stride: int,
    steps: Any,
    base: int,
) -> Any:
    """Add codes to the sums of those of `rows` that have any, and the sums to these codes.

    Return the greatest magnitude of a sum, or -1 if a sum has another step. The arguments are as for `add_rows`.
    """
    most, width = np.int64(0), np.uintp(dim)
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            to = np.uintp(place + (np.int64(rows[i + _AHEAD]) - first_row) * stride)
            for j in range(np.uintp(0), width, np.uintp(_LINE)):
                prefetch(sums, to + j)
        row = np.int64(rows[i]) - first_row
        if need[row] != 2:
            continue
        if steps[base + row] != step:
            return -1
        source, to = np.uintp(first + i * dim), np.uintp(place + row * stride)
        for j in range(width):
            code = np.int64(codes[source + j]) + np.int64(sums[to + j])
            most = max(most, abs(code))
            codes[source + j] = np.int32(code)
            sums[to + j] = np.int32(code)
    return most


@kernel
def find_codes(values: Any, rows: Any, steps: Any, dim: int, mantissa: int, codes: Any) -> None:
    """Write the codes (int32) of `rows` (int64) of `values`, flat float32 that was made of codes, one after the other.

    The step of row i is `steps[i]` (float32); of a floating grid, the bits that its codes have of `mantissa`, less
    than 0.
    """
    width = np.uintp(dim)
    for i in range(rows.size):
        step, source, to = steps[rows[i]], np.uintp(rows[i] * dim), np.uintp(i * dim)
        if step > 0:
            # A value is exactly its step times its code.
            for j in range(width):
                codes[to + j] = np.int32(values[source + j] / step)
            continue
        shift = np.uint32(mantissa + np.int64(step))
        for j in range(width):
            bits = bits_of(values[source + j])
            size = np.int32((bits & np.uint32(0x7FFFFFFF)) >> shift)
            codes[to + j] = -size if bits >> np.uint32(31) else size
