"""Sets the bits of rows that were looked up."""

import triton
import triton.language as tl


@triton.jit
def _set_bits(row, rows, held, words, outside):
    """Set bit `row` of `words` where `held`; note in `outside` if a row is not below `rows`, and set nothing for it."""
    inside = held & (row >= 0) & (row < rows)
    row = tl.where(inside, row, 0)
    bit = tl.full(row.shape, 1, tl.int32) << (row & 31).to(tl.int32)
    word = words + (row >> 5)
    # Rows that are looked up often are set already. Reading spares them the atomic operation.
    seen = tl.load(word, mask=inside, other=0)
    tl.atomic_or(word, bit, mask=inside & ((seen & bit) == 0), sem="relaxed")
    tl.store(outside + tl.zeros_like(row), 1, mask=held & ~inside)


@triton.jit(do_not_specialize=["count", "rows"], do_not_specialize_on_alignment=["ids", "words"])
def flag_rows(ids, count, rows, words, outside, block: tl.constexpr):
    """Set the bits of `count` ids, integers of any type."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    held = place < count
    row = tl.load(ids + place, mask=held, other=0).to(tl.int64)
    _set_bits(row, rows, held, words, outside)


@triton.jit(do_not_specialize=["count", "tables", "batch"])
def flag_bags(
    ids,
    count,
    offsets,
    tables,
    batch,
    rows,
    words,
    first_words,
    outside,
    halvings: tl.constexpr,
    block: tl.constexpr,
):
    """Set the bits of ids of many tables, which lie one table after the other.

    The ids of table t begin at offsets[t * batch]. It has rows[t] rows, whose bits begin at words[first_words[t]].
    """
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    begin = tl.load(offsets).to(tl.int64)
    end = tl.load(offsets + tables.to(tl.int64) * batch).to(tl.int64)
    held = (place < count) & (place >= begin) & (place < end)
    # The last table that begins at the place or before it. Empty ones are passed over.
    table = tl.zeros((block,), tl.int64)
    beyond = tl.zeros((block,), tl.int64) + tables
    for _ in tl.static_range(halvings):
        middle = (table + beyond) // 2
        is_after = tl.load(offsets + middle * batch, mask=held, other=0).to(tl.int64) <= place
        table = tl.where(is_after, middle, table)
        beyond = tl.where(is_after, beyond, middle)
    row = tl.load(ids + place, mask=held, other=0).to(tl.int64)
    first = tl.load(first_words + table, mask=held, other=0)
    _set_bits(row, tl.load(rows + table, mask=held, other=0), held, words + first, outside)
