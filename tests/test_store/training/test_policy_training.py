"""Policies in training: they decide as simulated, over restores too, and every row comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import cnr_store
from cnr_backends import open_backend
from cnr_store import Checkpointer, ExpectedRestores, OptionError, Trace, simulate
from cnr_store.catalog.catalog import Catalog
from cnr_store.policies.policy import POLICIES, PolicyName

ROWS, DIM, SAVES = 3000, 64, 12
ROW_BYTES = 4 * DIM


def intervals() -> list[np.ndarray[Any, Any]]:
    """Rows changed between saves: popular ones again and again."""
    generator = np.random.default_rng(0)
    popularity = np.arange(1, ROWS + 1) ** -0.9
    return [generator.choice(ROWS, 1000, p=popularity / popularity.sum()) for _ in range(SAVES - 1)]


def train(model: nn.Embedding, optimizer: SGD, ids: np.ndarray[Any, Any]) -> None:
    optimizer.zero_grad()
    model(torch.as_tensor(ids)).square().sum().backward()
    optimizer.step()


def make() -> tuple[nn.Embedding, SGD]:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, DIM, sparse=True)
    return model, SGD(model.parameters(), lr=0.1)


def policies_of(store: Path) -> list[dict[str, Any]]:
    """What each version's record says of its policy."""
    catalog = Catalog(open_backend(store))
    return [dict(catalog.record(info.id).policy) for info in cnr_store.versions(store)]


def run(store: Path, options: dict[str, Any], restart_every: int = SAVES) -> list[dict[str, Any]]:
    """Train and save, going on now and then from what was saved; the policy of each record."""
    for first in range(0, SAVES, restart_every):
        model, optimizer = make()
        with Checkpointer(store, model, optimizer, bits=32, **options) as checkpointer:
            if first:
                assert checkpointer.load().step == first - 1
            for step in range(first, min(first + restart_every, SAVES)):
                if step:
                    train(model, optimizer, intervals()[step - 1])
                info = checkpointer.save(step).result()
                stored = cnr_store.state_dict(store, info)["weight"]
                np.testing.assert_array_equal(stored, model.weight.detach().numpy())
    return policies_of(store)


@pytest.mark.slow
@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("restart_every", [SAVES, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_decides_as_simulated(tmp_path: Path, policy: PolicyName, restart_every: int) -> None:
    found = run(tmp_path, {"policy": policy}, restart_every)
    bytes_written = [info.bytes for info in cnr_store.versions(tmp_path)]
    fixed_bytes = bytes_written[0] - ROWS * ROW_BYTES
    trace = Trace.of_rows(ROWS, intervals())
    simulated = simulate(trace, policy, row_bytes=ROW_BYTES, fixed_bytes=fixed_bytes)
    assert [(one["full"], one["since"]) for one in found] == [
        (save.decision.full, save.decision.since) for save in simulated
    ]
    np.testing.assert_allclose(bytes_written, [save.bytes for save in simulated], rtol=0.02)


@pytest.mark.slow
def test_auto_mixes_deltas_and_writes_less_than_intermittent(tmp_path: Path) -> None:
    written = {}
    for policy in ("auto", "intermittent"):
        found = run(tmp_path / policy, {"policy": policy})
        kinds = {one["since"] for one in found if not one["full"]}
        assert kinds == ({"baseline", "previous"} if policy == "auto" else {"baseline"})
        written[policy] = sum(info.bytes for info in cnr_store.versions(tmp_path / policy))
    assert written["auto"] < 0.9 * written["intermittent"]


@pytest.mark.slow
def test_auto_writes_no_chains_where_restores_abound(tmp_path: Path) -> None:
    found = run(tmp_path, {"policy": "auto", "job": cnr_store.Job(restores_per_save=1000.0)})
    assert {one["since"] for one in found} == {"baseline"}


@pytest.mark.slow
def test_bits_follow_the_restores(tmp_path: Path) -> None:
    expected = ExpectedRestores(failures_per_node_hour=0.01, nodes=10, hours=15)
    widths = []
    for restart in range(4):
        model, optimizer = make()
        with Checkpointer(
            tmp_path, model, optimizer, job=cnr_store.Job(expected_restores=expected)
        ) as checkpointer:
            if restart:
                checkpointer.load()
            info = checkpointer.save(restart, full=True).result()
        codec = Catalog(open_backend(tmp_path)).record(info.id).arrays["tables/weight/weight"].codec
        widths.append((codec or {})["bits"])
    assert widths == [3, 3, 3, 8]
    settled = [one["bits"] for one in policies_of(tmp_path)]
    assert [bits for bits, _ in settled] == widths
    assert settled[-1][1] == "3 restores are more than the 1.5 expected"


def test_widths_that_are_given_leave_nothing_to_expectations(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="only with bits='auto'"):
        Checkpointer(
            tmp_path, make()[0], bits=4, job=cnr_store.Job(expected_restores=ExpectedRestores(0.01, 1, 1))
        )
    cnr_store.save(tmp_path, make()[0], bits=4)
    assert policies_of(tmp_path)[0]["bits"] is None


def two_tables(rows: int) -> tuple[nn.Module, nn.Embedding, nn.Embedding, SGD]:
    large, other = nn.Embedding(ROWS, DIM), nn.Embedding(rows, DIM)
    model = nn.ModuleDict({"large": large, "other": other})
    return model, large, other, SGD(model.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["one-shot", "intermittent"])
def test_a_small_table_that_changes_as_a_whole_keeps_no_version_beside_the_baseline(
    tmp_path: Path, policy: PolicyName
) -> None:
    model, large, other, optimizer = two_tables(7)
    with Checkpointer(tmp_path, model, optimizer, policy=policy, bits=32, keep_last=1) as checkpointer:
        checkpointer.save(0)
        for step in range(1, 6):
            train(large, optimizer, np.array([step]))
            train(other, optimizer, np.arange(7 if step == 2 else 1))
            checkpointer.save(step).result()
    assert [info.step for info in cnr_store.versions(tmp_path)] == [0, 5]
    found = cnr_store.state_dict(tmp_path)
    for name, values in model.state_dict().items():
        assert torch.equal(torch.from_numpy(found[name]), values)


def test_a_large_table_that_changes_as_a_whole_is_a_base_of_its_own(tmp_path: Path) -> None:
    model, _, _, optimizer = two_tables(ROWS)
    with Checkpointer(tmp_path, model, optimizer, policy="one-shot", bits=32) as checkpointer:
        checkpointer.save(0)
        checkpointer.touch("large", range(ROWS))
        second = checkpointer.save(1).result()
        checkpointer.touch("large", [3])
        checkpointer.touch("other", [4])
        record = Catalog(open_backend(tmp_path)).record(checkpointer.save(2).result().id)
    assert record.arrays["tables/large/weight"].base == second.id
    assert record.rows == 2
