"""`cnr_store.rows`, and what notebooks show."""

from __future__ import annotations

import logging
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_store
from cnr_store.errors import OptionError
from tests.nightly import histories


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three versions of tables of two types, of which the later ones are deltas."""
    url = str(tmp_path_factory.mktemp("stores") / "store")
    users = torch.nn.EmbeddingBag(3000, 8, sparse=True)
    items = torch.nn.Embedding(20, 3, sparse=True, dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"users": users, "films": items, "over": torch.nn.Linear(8, 1)})
    optimizer = torch.optim.SparseAdam([*users.parameters(), *items.parameters()])
    with cnr_store.Checkpointer(url, model, optimizer, policy="consecutive") as checkpointer:
        for step in (1, 2, 3):
            (users(torch.randint(3000, (50, 2))).sum() + items(torch.tensor([step])).sum()).backward()
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            checkpointer.save(step, metadata={"loss": 1 / step}).result()
    return url


@pytest.mark.slow
@settings(max_examples=histories(100))
@given(ids=st.lists(st.integers(0, 2999), max_size=40), step=st.integers(1, 3))
def test_rows_are_those_of_the_whole_table(store: str, ids: list[int], step: int) -> None:
    whole = cnr_store.state_dict(store, step)["users.weight"]
    for name in ("users", "users.weight", "tables/users/weight"):
        np.testing.assert_array_equal(cnr_store.rows(store, name, ids, step), whole[ids])


def test_rows_of_state_dense_and_other_types(store: str) -> None:
    group = cnr_store.open(store)
    np.testing.assert_array_equal(
        cnr_store.rows(store, "users/exp_avg", [5, 2999]),
        np.asarray(group["tables/users/exp_avg"])[[5, 2999]],
    )
    assert cnr_store.rows(store, "over.weight", [0]).shape == (1, 8)
    items = cnr_store.rows(store, "films", np.array([19, 0], np.uint8))
    assert (items.dtype, items.shape) == (np.dtype("float32"), (2, 3))


def test_dense_tensors_of_types_that_numpy_lacks(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
    model.register_buffer("eight", torch.randn(4, 3).to(torch.float8_e4m3fn))
    model.register_buffer("count", torch.tensor(3.0))
    with cnr_store.Checkpointer(tmp_path, model, None) as checkpointer:
        checkpointer.save(1).result()
    expected = model.weight.detach().float().numpy()
    np.testing.assert_array_equal(cnr_store.rows(tmp_path, "weight", [5, 0]), expected[[5, 0]])
    with pytest.raises(OptionError, match="holds float8_e4m3fn, which numpy lacks"):
        cnr_store.rows(tmp_path, "eight", [0])
    with pytest.raises(OptionError, match="count is one number"):
        cnr_store.rows(tmp_path, "count", [])


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("user", [0], "no array 'user': there are users"),
        ("users/exp_avgs", [0], "users/exp_avg"),
        ("users", [3000], "users has no row 3000 .* it has 3,000 rows"),
        ("users", [0, -1], "users has no row -1"),
        ("users", [0.5], "give a list of integers"),
        ("users", 3, "give a list of integers"),
        ("users", [[3]], "give a list of integers"),
        ("users", [True], "give a list of integers"),
    ],
)
def test_what_there_is_not(store: str, name: str, ids: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cnr_store.rows(store, name, ids)


def test_some_tables_of_a_state_dict(store: str) -> None:
    whole = cnr_store.state_dict(store)
    found = cnr_store.state_dict(store, tables=["users"])
    assert list(found) == ["users.weight"]
    np.testing.assert_array_equal(found["users.weight"], whole["users.weight"])
    assert cnr_store.state_dict(store, tables=[]) == {}
    with pytest.raises(OptionError, match=r"there are users, users\.weight; `cnr info` lists all"):
        cnr_store.state_dict(store, tables=["usrs"])
    with pytest.raises(OptionError, match="give a list of names"):
        cnr_store.state_dict(store, tables="users")
    for other in ("users/exp_avg", "over.weight"):
        with pytest.raises(OptionError, match=f"tables='{other}': it is no table"):
            cnr_store.state_dict(store, tables=["users", other])


def test_versions_in_a_notebook(store: str) -> None:
    versions = cnr_store.versions(store)
    shown = versions._repr_html_()
    assert shown.count("<tr>") == 4
    assert all(info.id in shown for info in versions)
    assert versions[-1].id in versions[-1]._repr_html_()
    assert versions[0].datetime.timestamp() == pytest.approx(versions[0].time, abs=1e-5)
    assert versions[0].datetime.tzinfo is UTC


def test_names_in_a_notebook_are_text(tmp_path: Path) -> None:
    model = torch.nn.EmbeddingBag(10, 2, sparse=True)
    with cnr_store.Checkpointer(str(tmp_path / "store"), model, None) as checkpointer:
        pending = checkpointer.save(1, metadata={"note": "<script>"})
        pending.result()
    assert "<script>" not in cnr_store.versions(tmp_path / "store")._repr_html_()
    assert "&lt;script&gt;" in cnr_store.versions(tmp_path / "store")._repr_html_()
    assert "seconds_stalled" in pending._repr_html_()
    restored = cnr_store.load(str(tmp_path / "store"), model)
    assert "<td>step</td><td>1</td>" in restored._repr_html_()


def test_a_place_without_a_store_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cnr_store"):
        assert cnr_store.versions(tmp_path) == []
    assert "holds no store: check the URL" in caplog.text
    assert cnr_store.versions(tmp_path)._repr_html_() == "no committed version"


def test_a_table_called_as_the_state_of_another_one_goes_before_it(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"users": torch.nn.Embedding(5, 2), "users/sum": torch.nn.Embedding(5, 2)})
    cnr_store.save(tmp_path, model, torch.optim.Adagrad(model.parameters()), bits=32)
    expected = model.get_parameter("users/sum.weight").detach().numpy()
    assert np.array_equal(cnr_store.rows(tmp_path, "users/sum", range(5)), expected)
    assert np.array_equal(cnr_store.state_dict(tmp_path, tables=["users/sum"])["users/sum.weight"], expected)
    assert not cnr_store.rows(tmp_path, "tables/users/sum", range(5)).any()
