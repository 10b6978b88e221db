"""Packed bitmaps: kernels against plain numpy, against sets, and the tensor path against the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import nn

from cnr_store.training.devices import support
from cnr_store.training.tracking import bitmap, table_tracker
from cnr_store.training.tracking.table_tracker import RowBits


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Kernels, not what stands in for them until they are compiled."""
    for _ in bitmap.compile_kernels():
        pass


ROWS = st.integers(1, 300)
# The first call of a kernel compiles it.
compiles = settings(deadline=None)


def bits_there(rows: int) -> RowBits:
    """Of a table on the CPU that is taken for one of a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "is_elsewhere", lambda _: True)
        return RowBits(rows, torch.device("cpu"))


def taken(bits: RowBits) -> bitmap.Bitmap:
    """What is set, and set no more afterwards."""
    found = bits.read().copy()
    bits.clear()
    return found


@st.composite
def rows_and_ids(draw: st.DrawFn) -> tuple[int, list[int]]:
    rows = draw(ROWS)
    return rows, draw(st.lists(st.integers(0, rows - 1), max_size=50))


@compiles
@given(rows_and_ids(), rows_and_ids())
def test_bitmaps_are_sets_of_rows(one: tuple[int, list[int]], two: tuple[int, list[int]]) -> None:
    rows = max(one[0], two[0])
    left, right = bitmap.empty_bitmap(rows), bitmap.empty_bitmap(rows)
    assert bitmap.mark(left, rows, np.array(one[1], np.int64)) == -1
    assert bitmap.mark(right, rows, np.array(two[1], np.int32)) == -1
    assert bitmap.rows_of(left, rows).tolist() == sorted({*one[1]})
    assert bitmap.count(left) == len({*one[1]})
    left |= right
    assert bitmap.rows_of(left, rows).tolist() == sorted({*one[1], *two[1]})
    assert bitmap.rows_of(right, rows).tolist() == sorted({*two[1]})


@compiles
@given(st.integers(1, 200), st.lists(st.integers(-10, 210), max_size=30))
def test_marking_equals_its_reference_and_stops_at_the_first_id_out_of_range(
    rows: int, ids: list[int]
) -> None:
    ours, reference = bitmap.empty_bitmap(rows), bitmap.empty_bitmap(rows)
    array = np.array(ids, np.int64)
    assert bitmap.mark(ours, rows, array) == bitmap.mark_reference(reference, rows, array)
    np.testing.assert_array_equal(ours, reference)


@compiles
@given(npst.arrays(np.uint8, st.integers(0, 70)), st.integers(0, 600))
def test_counting_and_listing_equal_their_references(packed: bitmap.Bitmap, rows: int) -> None:
    assert bitmap.count(packed) == int(np.unpackbits(packed).sum())
    np.testing.assert_array_equal(bitmap.rows_of(packed, rows), bitmap.rows_of_reference(packed, rows))


@compiles
@given(npst.arrays(np.uint8, st.integers(0, 70)), st.integers(0, 600), st.sampled_from([1, 4, 8, 16, 256]))
def test_counting_by_blocks_equals_its_reference(
    packed: bitmap.Bitmap, first_row: int, block_rows: int
) -> None:
    blocks = -(-(first_row + 8 * packed.size) // block_rows)
    ours, reference = np.ones(blocks, np.int64), np.ones(blocks, np.int64)
    bitmap.add_counts(packed, first_row, block_rows, ours)
    bitmap.add_counts_reference(packed, first_row, block_rows, reference)
    np.testing.assert_array_equal(ours, reference)


@compiles
@given(st.integers(1, 100))
def test_a_full_bitmap_has_every_row_and_no_more(rows: int) -> None:
    full = bitmap.full_bitmap(rows)
    assert bitmap.rows_of(full, rows).tolist() == list(range(rows))
    assert bitmap.count(full) == rows


@compiles
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_rows_with_any_bit_are_marked_alike_by_kernel_reference_and_tensors(
    rows: int, dim: int, dtype: str
) -> None:
    values = torch.zeros(rows, dim, dtype=getattr(torch, dtype))
    for row in range(0, rows, 3):
        values[row, row % dim] = (1.0, float("nan"), -0.0, 0.0)[row % 4]
    words = values.view(torch.int32 if dtype == "float32" else torch.int16)
    ours, reference = bitmap.empty_bitmap(rows), bitmap.empty_bitmap(rows)
    bitmap.mark_nonzero(ours, words.numpy())
    reference |= np.packbits((words.numpy() != 0).any(axis=1), bitorder="little")
    np.testing.assert_array_equal(ours, reference)
    device = bits_there(rows)
    device.mark_gradient(values)
    np.testing.assert_array_equal(device.read(), reference)
    strided = bitmap.empty_bitmap(rows)
    bitmap.mark_nonzero(strided, words.t().contiguous().t().numpy())
    np.testing.assert_array_equal(strided, reference)


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda ids: ids,
    lambda ids: ids.to(torch.int32),
    lambda ids: ids.to(torch.uint8),
    lambda ids: torch.stack([ids, ids + 1000], 1)[:, 0],
    lambda ids: torch.stack([ids, ids]).t(),
    lambda ids: torch.cat([ids + 1000, ids])[len(ids) :],
    lambda ids: nn.Parameter(ids, requires_grad=False),
]


@pytest.mark.slow
@compiles
@given(st.integers(1, 200), st.lists(st.integers(0, 210), max_size=30), st.sampled_from(LAYOUTS))
def test_ids_are_marked_alike_however_they_lie_in_memory(
    rows: int, ids: list[int], lay_out: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    bits, reference = RowBits(rows, torch.device("cpu")), bitmap.empty_bitmap(rows)
    there, inside = bits_there(rows), bitmap.empty_bitmap(rows)
    for _ in range(2):
        laid_out = lay_out(torch.tensor(ids, dtype=torch.int64))
        flat = laid_out.numpy().reshape(-1).astype(np.int64)
        outside = bitmap.mark_reference(reference, rows, flat)
        assert bits.mark(laid_out) == (outside < 0)
        np.testing.assert_array_equal(taken(bits), reference)
        bitmap.mark_reference(inside, rows, flat[flat < rows])
        assert there.mark(laid_out)
        assert there.saw_outside == (outside >= 0)
        np.testing.assert_array_equal(taken(there), inside)
        assert not there.saw_outside
        reference[:] = inside[:] = 0


@pytest.mark.parametrize("rows", [8, 64, 61])
def test_ids_beyond_any_row_number_mark_nothing_on_a_device(rows: int) -> None:
    bits = bits_there(rows)
    for far in (rows, 2**31, 2**32 + 3, 2**62, -1, -(2**31), -(2**63)):
        bits.mark(torch.tensor([far, 3]))
        assert bits.saw_outside
        assert bitmap.rows_of(bits.read(), rows).tolist() == [3]
        bits.clear()
        assert not bits.saw_outside


def test_bits_of_a_device_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_tracker, "_PACKED_BYTES", 3)
    bits = bits_there(100)
    bits.mark(torch.arange(0, 100, 7, dtype=torch.int8))
    assert bitmap.rows_of(taken(bits), 100).tolist() == list(range(0, 100, 7))
    assert not taken(bits_there(0)).size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_on_a_gpu_equal_bits_on_the_host() -> None:
    rows = 100_003
    ids = torch.randint(rows, (4, 5000))
    gradient = torch.zeros(rows, 3)
    gradient[torch.randint(rows, (500,)), 1] = 1
    sparse = torch.sparse_coo_tensor(ids[:1], torch.ones(5000, 3), (rows, 3))
    found = []
    for device in ("cpu", "cuda"):
        bits = RowBits(rows, torch.device(device))
        bits.mark(ids.to(device))
        bits.mark_gradient(gradient.to(device))
        bits.mark_gradient(sparse.to(device))
        found.append(taken(bits))
        assert not taken(bits).any()
    np.testing.assert_array_equal(found[0], found[1])


@compiles
@given(st.lists(st.tuples(ROWS, st.integers(1, 9), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
def test_marking_rows_of_many_tables_equals_marking_those_of_each(
    tables: list[tuple[int, int, int]],
) -> None:
    words = [np.zeros((rows, dim), np.uint32) for rows, dim, _ in tables]
    ours, reference = ([bitmap.empty_bitmap(rows) for rows, _, _ in tables] for _ in range(2))
    for each, one, other, (rows, _, seed) in zip(words, ours, reference, tables, strict=True):
        random = np.random.default_rng(seed)
        each[random.random(rows) < random.choice([0.02, 0.5]), -1] = 1
        one |= bitmap.full_bitmap(rows) & np.uint8(random.integers(256))
        other |= one
        other |= np.packbits((each != 0).any(axis=1), bitorder="little")
    sizes = np.array([each.shape for each in words], np.int64).T.copy()
    addresses = np.array([[one.ctypes.data, each.ctypes.data] for one, each in zip(ours, words, strict=True)])
    bitmaps, gradients = addresses.astype(np.int64).T.copy()
    bitmap.mark_nonzero_of_tables(bitmaps, sizes[0], gradients, sizes[1])
    for one, other in zip(ours, reference, strict=True):
        np.testing.assert_array_equal(one, other)


def test_marking_ids_of_many_tables_tells_which_have_an_id_out_of_range() -> None:
    rows, ids = np.array([9, 20, 300]), [np.array(each) for each in ([0, 8], [19, 20, 1], [299])]
    ours = [bitmap.empty_bitmap(int(each)) for each in rows]
    counts = np.array([each.size for each in ids])
    addresses = np.array([[one.ctypes.data, each.ctypes.data] for one, each in zip(ours, ids, strict=True)])
    bitmaps, places = addresses.astype(np.int64).T.copy()
    assert bitmap.mark_ids_of_tables(bitmaps, rows, places, counts) == 1
    assert counts.tolist() == [2, -1, 1]
    assert [bitmap.rows_of(one, 300).tolist() for one in ours] == [[0, 8], [19], [299]]


@pytest.mark.slow
def test_threads_that_mark_one_bitmap_undo_nothing() -> None:
    even, odd = np.tile(np.arange(0, 64, 2), 40_000), np.arange(1, 64, 2)
    for _ in range(150):
        marked = bitmap.empty_bitmap(64)
        thread = threading.Thread(target=bitmap.mark, args=(marked, 64, even))
        thread.start()
        while thread.is_alive():
            bitmap.mark(marked, 64, odd)
            assert {*odd} <= {*bitmap.rows_of(marked.copy(), 64)}
        thread.join()


READS_AT_THE_END_OF_MEMORY = """
import ctypes, mmap
import numpy as np
from cnr_store.training.tracking import bitmap, table_tracker

for _ in bitmap.compile_kernels():
    pass
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
for rows in (1, 7, 8, 9, 20):
    for size in (1, 3, 8):
        flags = bitmap.empty_bitmap(rows)
        one = [np.array([each]) for each in (flags.ctypes.data, rows, start + page - 4 * rows * size, size)]
        bitmap.mark_nonzero_of_tables(*one)
        assert not flags.any()
print("read")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="mprotect is POSIX")
def test_no_memory_behind_a_gradient_is_read() -> None:
    """A page behind it may belong to nobody: reading it ends the process, which is thus another one."""
    done = subprocess.run(
        [sys.executable, "-c", READS_AT_THE_END_OF_MEMORY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
