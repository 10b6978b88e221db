"""Ways to change rows that once went unseen, each told by the rows that a save then flags or a load returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer
from cnr_store.training.tensors import assign_rows, gather
from tests.test_store.tracked_table import ALL, Bench


@pytest.mark.parametrize("policy", ["one-shot", "consecutive", "intermittent"])
def test_a_load_by_another_checkpointer_is_seen(tmp_path: Path, policy: str) -> None:
    bench = Bench("adagrad")
    bench.train(7)
    cnr_store.save(tmp_path / "other", bench.model, bench.optimizer, bits=32)
    with Checkpointer(
        tmp_path / "store", bench.model, bench.optimizer, policy=policy, bits=32
    ) as checkpointer:
        bench.train(*ALL)
        checkpointer.save(0).result()
        cnr_store.load(tmp_path / "other", bench.model, bench.optimizer)
        bench.train(3)
        checkpointer.save(1).result()
        saved = Bench("adagrad")
        cnr_store.load(tmp_path / "store", saved.model, saved.optimizer)
        assert torch.equal(saved.table.weight, bench.table.weight)
        assert torch.equal(saved.slot(), bench.slot())


def test_a_load_of_its_own_leaves_nothing_to_save(tmp_path: Path) -> None:
    bench = Bench("adagrad")
    with Checkpointer(tmp_path, bench.model, bench.optimizer, policy="consecutive", bits=32) as checkpointer:
        bench.train(1)
        checkpointer.save(0).result()
        checkpointer.load()
        bench.train(2)
        version = checkpointer.save(1).result()
        assert version.rows == 1


def bfloat16_patterns() -> torch.Tensor:
    """Every bfloat16 there is, (2**13, 8)."""
    return (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 8)
    )


def test_every_bfloat16_survives_gathering_and_assigning() -> None:
    patterns = bfloat16_patterns()
    order = torch.randperm(len(patterns)).numpy()
    other = torch.zeros_like(patterns)
    assign_rows(other, 0, gather(patterns, order))
    assert torch.equal(other.view(torch.int16), patterns[order].view(torch.int16))


def test_float32_is_rounded_to_bfloat16_as_torch_does_and_stays_nan() -> None:
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, (4096, 8), dtype=np.uint32)
    bits[0] = (0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000001)
    values = bits.view(np.float32)
    out = torch.zeros(values.shape, dtype=torch.bfloat16)
    assign_rows(out, 0, values)
    finite = ~np.isnan(values)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(out[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert np.array_equal(out.isnan().numpy(), ~finite)
    assert np.array_equal(out.signbit().numpy(), np.signbit(values))


def test_a_bfloat16_table_keeps_every_bit_with_lossless_rows(tmp_path: Path) -> None:
    table, other = (
        nn.Embedding(1 << 13, 8, dtype=torch.bfloat16),
        nn.Embedding(1 << 13, 8, dtype=torch.bfloat16),
    )
    with torch.no_grad():
        table.weight.copy_(bfloat16_patterns())
    cnr_store.save(tmp_path, table, bits=32)
    cnr_store.load(tmp_path, other)
    assert torch.equal(other.weight.view(torch.int16), table.weight.view(torch.int16))
