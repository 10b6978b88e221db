"""Packed bitmaps of rows: bit ``i & 7`` of byte ``i >> 3`` stands for row ``i``.

Every bitmap is a ``uint8`` array of ``ceil(rows / 8)`` bytes whose bits past the last row are zero. Kernels are serial
and release the GIL. The ``*_reference`` functions do the same in plain numpy; tests compare the two. They stand in for
the kernels until `compile_kernels` has run, so that no lookup, step or save waits for the compiler. Kernels that take
many tables have no such twin: ask `is_compiled` first, and go through tables one by one where it says no.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from cnr_codecs.kernels.building.compiled import helper, kernel

Bitmap = npt.NDArray[np.uint8]
RowIds = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
AnyArray = np.ndarray[Any, Any]
WORD_BYTES = 4  # of kernels that take rows of many tables


def bitmap_bytes(rows: int) -> int:
    """The size of a bitmap of `rows` rows, in bytes."""
    return (rows + 7) // 8


def empty_bitmap(rows: int) -> Bitmap:
    """A bitmap with no row set."""
    return np.zeros(bitmap_bytes(rows), np.uint8)


def full_bitmap(rows: int) -> Bitmap:
    """A bitmap with every row set, and zeros past the last one."""
    bitmap = np.full(bitmap_bytes(rows), 0xFF, np.uint8)
    if rows % 8:
        bitmap[-1] = (1 << rows % 8) - 1
    return bitmap


class _State:
    is_compiled = False


def is_compiled() -> bool:
    """Whether `compile_kernels` has run."""
    return _State.is_compiled


def _typed_pointer(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _typed_or(_context: Any, _address: Any, _bits: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("or", builder.inttoptr(arguments[0], cgutils.voidptr_t), arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8), generate


# For kernels: an address as a pointer, and bits of a byte set so that no other thread's are undone.
_pointer: Any = intrinsic(_typed_pointer)
_or: Any = intrinsic(_typed_or)


@kernel
def _mark_at(bitmap_address: int, rows: int, ids_address: int, count: int) -> int:
    bitmap = carray(_pointer(bitmap_address), (rows + 7) >> 3, np.uint8)
    ids = carray(_pointer(ids_address), count, np.int64)
    for position in range(count):
        row = ids[position]
        if row < 0 or row >= rows:
            return position
        bit = np.uint8(1 << (row & 7))
        if bitmap[row >> 3] & bit == 0:
            _or(bitmap_address + (row >> 3), bit)
    return -1


def mark(bitmap: Bitmap, rows: int, ids: AnyArray) -> int:
    """Set the bits of `ids`, an ``(n,)`` array of integers.

    Returns: -1, or the position in `ids` of the first one outside ``[0, rows)``, where marking stopped.
    """
    # The kernel is compiled for such ids alone.
    plain = np.ascontiguousarray(ids, np.int64)
    if not _State.is_compiled:
        return mark_reference(bitmap, rows, plain)
    return int(_mark_at(bitmap.ctypes.data, rows, plain.ctypes.data, plain.size))


def mark_reference(bitmap: Bitmap, rows: int, ids: AnyArray) -> int:
    """`mark` in numpy."""
    outside = np.flatnonzero((ids < 0) | (ids >= rows))
    good = ids[: outside[0]] if outside.size else ids
    np.bitwise_or.at(bitmap, good >> 3, (1 << (good & 7)).astype(np.uint8))
    return int(outside[0]) if outside.size else -1


@kernel
def mark_ids_of_tables(bitmaps: RowIds, rows: RowIds, ids: RowIds, counts: RowIds) -> int:
    """`mark` for many tables, each with an address of its bitmap and one of its ids, contiguous int64.

    Returns: How many tables have an id outside their rows. Their counts are -1 afterwards.
    """
    outside = 0
    for table in range(bitmaps.size):
        if _mark_at(bitmaps[table], rows[table], ids[table], counts[table]) >= 0:
            counts[table] = -1
            outside += 1
    return outside


@helper
def _combined(words: AnyArray, first: int, last: int) -> Any:
    seen = np.uint64(0)
    # An OR without an early exit, so that the compiler can use vectors.
    for place in range(first, last):
        seen |= words[place]
    return seen


@kernel
def mark_nonzero_of_tables(bitmaps: RowIds, rows: RowIds, gradients: RowIds, row_words: RowIds) -> None:
    """`mark_nonzero` for many tables: `gradients` are the addresses of contiguous rows of 32-bit words."""
    # The memory of eight rows that are all set is not read. Most blocks of eight rows are zero.
    for table in range(bitmaps.size):
        count, size = rows[table], row_words[table]
        bitmap = carray(_pointer(bitmaps[table]), (count + 7) >> 3, np.uint8)
        words = carray(_pointer(gradients[table]), count * size, np.uint32)
        pairs = carray(_pointer(gradients[table]), count * size // 2, np.uint64)
        for index in range(bitmap.size):
            if bitmap[index] == 0xFF:
                continue
            seen = np.uint64(1)
            if 8 * index + 8 <= count:
                seen = _combined(pairs, index * 4 * size, (index + 1) * 4 * size)
            for row in range(8 * index, min(8 * index + 8, count) if seen != 0 else 0):
                if _combined(words, row * size, (row + 1) * size) != 0:
                    _or(bitmaps[table] + index, np.uint8(1 << (row & 7)))


def mark_nonzero(bitmap: Bitmap, words: AnyArray) -> None:
    """Set the bits of the rows of `words`, ``(rows, dim)`` integers with a dim, that are not all zero."""
    plain = np.ascontiguousarray(words)
    address, size = plain.ctypes.data, plain[:1].nbytes
    if _State.is_compiled and not (address % WORD_BYTES or size % WORD_BYTES):
        one = (np.array([each]) for each in (bitmap.ctypes.data, len(plain), address, size // WORD_BYTES))
        mark_nonzero_of_tables(*one)
    else:
        bitmap |= np.packbits((plain != 0).any(axis=1), bitorder="little")


@kernel
def copy_rows_of_tables(
    sources: RowIds, row_words: RowIds, begins: RowIds, ends: RowIds, ids: RowIds, targets: RowIds
) -> None:
    """Copy rows of many arrays of 32-bit words: of each, `ids` from its begin to its end.

    `sources` and `targets` are addresses, of the arrays and of contiguous memory that takes the rows.
    """
    for array in range(sources.size):
        size = row_words[array]
        for position in range(begins[array], ends[array]):
            row = carray(_pointer(sources[array] + 4 * size * ids[position]), size, np.uint32)
            to = carray(_pointer(targets[array] + 4 * size * (position - begins[array])), size, np.uint32)
            for column in range(size):
                to[column] = row[column]


@helper
def _popcount(word: Any) -> Any:
    # Sums of bits side by side, in fields of 2, 4 and 8 bits; the product adds up the eight bytes.
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


def _words(bitmap: Bitmap) -> tuple[Words, np.uint64]:
    """The bitmap as 64-bit words, and the bytes left after them as one more."""
    end = bitmap.size // 8 * 8
    return bitmap[:end].view(np.uint64), np.uint64(int.from_bytes(bitmap[end:].tobytes(), "little"))


def count(bitmap: Bitmap) -> int:
    """The number of rows that are set."""
    total = np.zeros(1, np.int64)
    add_counts(bitmap, 0, 1 << 62, total)
    return int(total[0])


@kernel
def _count_blocks(words: Words, last: np.uint64, first_row: int, shift: int, out: RowIds) -> None:
    for index in range(words.size + (1 if last != 0 else 0)):  # no block may begin where the bitmap ends
        word = words[index] if index < words.size else last
        row = first_row + index * 64
        if row >> shift == (row + 63) >> shift:
            out[row >> shift] += np.int64(_popcount(word))
            continue
        while word != 0:
            lowest = word & (~word + np.uint64(1))
            out[(row + np.int64(_popcount(lowest - np.uint64(1)))) >> shift] += 1
            word ^= lowest


def add_counts(bitmap: Bitmap, first_row: int, block_rows: int, out: RowIds) -> None:
    """Add to `out`, ``(blocks,)``, how many rows are set of each `block_rows` rows of a table: a power of two.

    `first_row`: the row of the table that is row 0 of the bitmap.
    """
    if _State.is_compiled:
        _count_blocks(*_words(bitmap), first_row, block_rows.bit_length() - 1, out)
    else:
        add_counts_reference(bitmap, first_row, block_rows, out)


def add_counts_reference(bitmap: Bitmap, first_row: int, block_rows: int, out: RowIds) -> None:
    """`add_counts` in numpy."""
    rows = first_row + np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    out += np.bincount(rows // block_rows, minlength=out.size)


@kernel
def _rows_of(words: Words, last: np.uint64, out: RowIds) -> None:
    filled = 0
    for index in range(words.size + 1):
        word = words[index] if index < words.size else last
        # From one set bit to the next: a branch for each bit is mispredicted, and takes ten times as long.
        while word != 0:
            lowest = word & (~word + np.uint64(1))
            out[filled] = index * 64 + np.int64(_popcount(lowest - np.uint64(1)))
            filled += 1
            word ^= lowest


def are_set(bitmap: Bitmap, ids: RowIds) -> npt.NDArray[np.bool_]:
    """Whether rows are set."""
    return np.asarray((bitmap[ids >> 3] >> (ids & 7)) & 1 != 0)


def rows_of(bitmap: Bitmap, rows: int) -> RowIds:
    """The rows below `rows` that are set, ascending, ``(n,)`` int64."""
    if not _State.is_compiled:
        return rows_of_reference(bitmap, rows)
    out = np.empty(count(bitmap), np.int64)
    _rows_of(*_words(bitmap), out)
    return out[: np.searchsorted(out, rows)]


def rows_of_reference(bitmap: Bitmap, rows: int) -> RowIds:
    """`rows_of` in numpy."""
    return np.flatnonzero(np.unpackbits(bitmap, bitorder="little")[:rows]).astype(np.int64)


def compile_kernels() -> Iterator[None]:
    """Compile the kernels, one a step. After the last one, they take the place of numpy."""
    bitmap, ids, counts = empty_bitmap(8), np.zeros(1, np.int64), np.zeros(1, np.int64)
    # A bit is set, so that each kernel gets to its end.
    yield _mark_at(bitmap.ctypes.data, 8, ids.ctypes.data, 1)
    bitmaps, rows = np.array([bitmap.ctypes.data]), np.array([8])
    yield mark_ids_of_tables(bitmaps, rows, np.array([ids.ctypes.data]), np.ones(1, np.int64))
    gradients = np.zeros(8, np.uint32)
    yield mark_nonzero_of_tables(bitmaps, rows, np.array([gradients.ctypes.data]), np.ones(1, np.int64))
    one, at = np.zeros(1, np.int64), np.array([gradients.ctypes.data])
    yield copy_rows_of_tables(at, one, one, one + 1, one, at)
    yield _rows_of(*_words(bitmap), counts)
    yield _count_blocks(*_words(bitmap), 0, 3, counts)
    _State.is_compiled = True
