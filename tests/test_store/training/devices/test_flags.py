"""Bits set on a device equal those that the host sets, by kernels and by torch's operations."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.training.devices import flags, select, support
from cnr_store.training.devices.flags import DeviceFlags
from cnr_store.training.tracking import bitmap
from tests.test_store.training.devices.device import DEVICE, kernels

DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
BY = pytest.mark.parametrize("by", ["kernels", "torch"])


def flags_of(rows: list[int], by: str) -> DeviceFlags:
    with pytest.MonkeyPatch.context() as patch:
        if by == "kernels":
            kernels()
        else:
            patch.setattr(flags, "kernels_on", lambda device: None)
        return DeviceFlags(rows, DEVICE)


def expected(rows: int, ids: list[int]) -> tuple[bitmap.Bitmap, bool]:
    inside = [each for each in ids if 0 <= each < rows]
    bits = bitmap.empty_bitmap(rows)
    bitmap.mark_reference(bits, rows, np.array(inside, np.int64))
    return bits, len(inside) < len(ids)


@BY
@given(
    tables=st.lists(
        st.tuples(st.integers(1, 100), st.lists(st.integers(-128, 127), max_size=60)), min_size=1, max_size=3
    ),
    dtype=st.sampled_from(DTYPES),
    are_inside=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_rows_are_flagged_as_on_the_host(
    by: str, tables: list[tuple[int, list[int]]], dtype: torch.dtype, are_inside: bool
) -> None:
    """Ids out of range set nothing, in no table, and are told."""
    if are_inside or dtype is torch.uint8:
        tables = [(rows, [each % rows for each in ids]) for rows, ids in tables]
    found = flags_of([rows for rows, _ in tables], by)
    for number, (_, ids) in enumerate(tables):
        half = len(ids) // 2
        found.mark(torch.tensor(ids[: half // 2], dtype=dtype), number)
        pairs = torch.tensor([(each, 0) for each in ids[half // 2 : half]], dtype=dtype, device=DEVICE)
        found.mark(pairs.reshape(-1, 2)[:, 0], number)
        found.mark(torch.tensor([ids[half:]] * 2, dtype=dtype, device=DEVICE).t(), number)
    wanted = [expected(*table) for table in tables]
    bits, has_outside = found.take()
    for one, (other, _) in zip(bits, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert has_outside == any(outside for _, outside in wanted)
    bits, has_outside = found.read()
    assert not has_outside
    assert not any(each.any() for each in bits)


@BY
@given(
    rows=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    batch=st.integers(1, 4),
    is_narrow=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_fused_bags_flag_the_rows_of_each_table(
    by: str, rows: list[int], batch: int, is_narrow: bool, data: st.DataObject
) -> None:
    each = st.lists(st.integers(-1, 70), max_size=4)
    bags = [[data.draw(each) for _ in range(batch)] for _ in rows]
    ids = [row for table in bags for bag in table for row in bag]
    edges = np.cumsum([0, *(len(bag) for table in bags for bag in table)])
    dtype = torch.int32 if is_narrow else torch.int64
    found = flags_of(rows, by)
    found.mark_bags(torch.tensor(ids, dtype=dtype), torch.tensor(edges, dtype=dtype))
    wanted = [
        expected(count, [row for bag in table for row in bag])
        for count, table in zip(rows, bags, strict=True)
    ]
    bits, has_outside = found.read()
    for one, (other, _) in zip(bits, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert has_outside == any(outside for _, outside in wanted)


@BY
def test_ids_beyond_any_row_number_write_nothing(by: str) -> None:
    found = flags_of([64, 64], by)
    far = [2**31, 2**32 + 3, 2**62, -1, -(2**31), -(2**63), 64]
    found.mark(torch.tensor(far), 0)
    bits, has_outside = found.read()
    assert has_outside
    assert not any(each.any() for each in bits)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_rows_are_selected_in_order(words: list[int], piece: int) -> None:
    bits = np.array(words, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_PIECE_WORDS", piece)
        found = select.rows_of(torch.from_numpy(bits).to(DEVICE))
    wanted = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)
    for chunk_rows in (1, 7, 64):
        rows = max(32 * len(words), 1)
        edges = select.chunk_edges(found, rows, chunk_rows).cpu().numpy()
        np.testing.assert_array_equal(
            np.diff(edges), np.bincount(wanted // chunk_rows, minlength=-(-rows // chunk_rows))
        )
        assert edges[0] == 0


@pytest.mark.nightly
def test_rows_beyond_31_bits_are_flagged_and_selected() -> None:
    rows = 2**31 + 100
    found = flags_of([rows], "torch")
    ids = [0, 2**31 - 1, 2**31, rows - 1]
    found.mark(torch.tensor(ids))
    picked = select.rows_of(found.words[: flags.words_for(rows)])
    assert picked.tolist() == ids
    assert torch.diff(select.chunk_edges(picked, rows, 2**30)).tolist() == [1, 1, 2]


def test_a_device_without_working_kernels_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are flagged by torch's operations then."""
    made = kernels()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(made, "flag", lambda *_: 1 / 0)
        support.kernels_on.cache_clear()
        try:
            found = [DeviceFlags([40], DEVICE) for _ in range(2)]
        finally:
            support.kernels_on.cache_clear()
    found[0].mark(torch.tensor([39, 40]))
    bits, has_outside = found[0].read()
    assert has_outside
    assert bitmap.rows_of_reference(bits[0], 40).tolist() == [39]
    (record,) = caplog.records
    assert f"{DEVICE}: a trial of Triton's kernels failed (ZeroDivisionError" in record.message
