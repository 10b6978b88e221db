"""Optimizer state quantized by choice: what it decodes to, which arrays it is, and what training does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from torch.optim import Adagrad, Optimizer, SparseAdam

import cnr_store
from cnr_backends import open_backend
from cnr_codecs import RowCodec, array_dtype, decode_into, parse
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.policies.widths import StateWidths
from cnr_store.training.saving.codec_choice import CodecChoice
from cnr_store.training.saving.never_below_codec import CeilingRows
from tests.nightly import histories

Array = np.ndarray[Any, np.dtype[np.float32]]
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8]
TYPES = {"float32": (24, 2.0**127), "float16": (11, 65504.0), "bfloat16": (8, 2.0**127)}
"""Significant bits, and values up to which are drawn."""


def decoded(codec: RowCodec, values: Array, element: str = "float32") -> Array:
    payload = parse(codec.encode_rows(values, None, len(values), element=element))
    out = np.empty_like(values)
    decode_into(payload, out, np.ones(len(values), np.uint8))
    return out


@st.composite
def squares(draw: st.DrawFn) -> tuple[str, Array]:
    """Rows without negative values, of any magnitudes, zeros and equal values among them."""
    element = draw(st.sampled_from(list(TYPES)))
    most = TYPES[element][1]
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 40)))
    smallest = 2.0**-24 if element == "float16" else 2.0**-126
    value = st.one_of(
        st.just(0.0),
        st.floats(0, most, allow_subnormal=False, width=16 if element == "float16" else 32),
        st.builds(
            lambda exponent, share: smallest * 2.0**exponent * share, st.integers(0, 35), st.floats(1, 2)
        ),
    )
    rows = draw(arrays.arrays(np.float64, shape, elements=value))
    if element == "bfloat16":
        return element, torch.from_numpy(rows).to(torch.bfloat16).float().numpy()
    return element, rows.astype(array_dtype(element))


@pytest.mark.slow
@settings(max_examples=histories(200), deadline=None)
@given(drawn=squares(), bits=st.sampled_from(WIDTHS))
def test_no_square_comes_back_smaller_or_much_larger_than_it_was(drawn: tuple[str, Array], bits: int) -> None:
    element, rows = drawn
    found, before = decoded(CeilingRows(bits), rows, element).astype(np.float64), rows.astype(np.float64)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    # Two roundings to the element type: of what is raised, and of what is decoded.
    rounding = np.abs(found) * 2.0 ** (2 - TYPES[element][0]) + (2.0**-23 if element == "float16" else 0)
    step = np.ptp(before, axis=1, keepdims=True) / ((1 << bits) - 1)
    assert (found >= before - rounding).all()
    assert (found <= before + 1.03 * step + rounding).all()


@settings(deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 1000))
def test_only_a_row_that_is_all_zero_decodes_to_zeros(bits: int, seed: int) -> None:
    rows = np.square(np.random.default_rng(seed).normal(0, 1e-4, (50, 16))).astype(np.float32)
    rows[:, 3] = 0
    rows[7] = 0
    found = decoded(CeilingRows(bits), rows)
    assert not found[7].any()
    assert (np.delete(found, 7, axis=0) > 0).all()


@settings(deadline=None)
@given(bits=st.sampled_from(WIDTHS), seed=st.integers(0, 1000))
def test_rows_of_both_signs_err_by_half_a_step(bits: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(0, 0.1, (40, 16)).astype(np.float32)
    rows[:, 0] = -np.abs(rows[:, 0])  # one seed of these has a row of 16 positive values
    step = np.ptp(rows, axis=1, keepdims=True) / ((1 << bits) - 1)
    assert (np.abs(decoded(CeilingRows(bits), rows) - rows) <= 0.52 * step).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_are_not_quantized_keep_every_bit(bits: int) -> None:
    draw = np.random.default_rng(0)
    narrow = np.square(draw.normal(0, 1, (30, 1))).astype(np.float32)
    assert decoded(CeilingRows(bits), narrow).tobytes() == narrow.tobytes()
    rows = np.square(draw.normal(0, 1, (30, 12))).astype(np.float32)
    rows[3, 2], rows[4, 5], rows[5] = np.nan, np.inf, np.float32(1e-42) * np.arange(12, dtype=np.float32)
    found = decoded(CeilingRows(bits), rows)
    assert found[3:6].tobytes() == rows[3:6].tobytes()


@pytest.mark.slow
@settings(deadline=None)
@given(drawn=squares(), bits=st.sampled_from(WIDTHS), data=st.data())
def test_a_row_is_encoded_as_it_is_alone(drawn: tuple[str, Array], bits: int, data: st.DataObject) -> None:
    element, rows = drawn
    one = data.draw(st.integers(0, len(rows) - 1))
    together, alone = (
        decoded(CeilingRows(bits), rows, element),
        decoded(CeilingRows(bits), rows[one:][:1], element),
    )
    assert together[one].tobytes() == alone[0].tobytes()


# Which arrays


def test_widths_by_table_and_slot() -> None:
    widths = StateWidths({"users/exp_avg_sq": 8, "users/*": 4, "item*": 3, "a/b/sum": 2})
    large, small = 1 << 20, 1 << 10
    assert [widths.of("users", slot, small) for slot in ("exp_avg_sq", "exp_avg")] == [8, 4]
    assert widths.of("items", "sum", large) == 3
    assert widths.of("a/b", "sum", large) == 2
    assert widths.of("other", "sum", large) == 32
    assert widths.quantized == {2, 3, 4, 8}
    assert [StateWidths(4).of("users", "sum", nbytes) for nbytes in (large, small)] == [4, 32]
    assert [StateWidths().of("users", "sum", large), *StateWidths().quantized] == [32]


@pytest.mark.parametrize("wrong", ["any", 0, 5, True, {"users": "any"}, {"users": 7}, {3: 8}])
def test_wrong_widths(wrong: Any) -> None:
    with pytest.raises(OptionError, match="state_bits"):
        StateWidths(wrong)


def test_a_pattern_must_fit_a_table(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"state_bits: the pattern 'user/sum' fits no table; there are 'users'"
    ):
        Checkpointer(str(tmp_path), Model(), state_bits={"user/sum": 8})


def test_a_pattern_that_fits_no_slot_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def told(pattern: str, slots: dict[str, set[str]]) -> bool:
        caplog.clear()
        widths = CodecChoice(state_bits={pattern: 8})
        for _ in range(2):
            widths.warn_unknown_slots(lambda: slots)
        assert len(caplog.records) <= 1
        return bool(caplog.records)

    adam, adagrad = {"exp_avg", "exp_avg_sq"}, {"sum"}
    assert not told("users/summ", {})
    assert not told("users/summ", {"users": set(), "items": adagrad})  # it has no state yet
    assert not told("*/exp_avg", {"users": adagrad, "items": adam})
    assert not told("users", {"users": adagrad})
    assert told("users/summ", {"users": adagrad})
    assert told("*/exp_avg", {"users": adagrad, "items": adagrad})
    assert "'*/exp_avg' fits no optimizer state" in caplog.text
    assert "its tables have 'sum'" in caplog.text


def test_a_typo_in_a_slot_is_told_as_soon_as_the_state_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, model = str(tmp_path), Model()
    optimizer = SparseAdam(model.parameters())
    with Checkpointer(url, model, optimizer, state_bits={"users/exp": 8}) as checkpointer:
        checkpointer.save(0).result()
        assert "fits no" not in caplog.text
        for step in (1, 2):
            train(model, optimizer)
            checkpointer.save(step).result()
    assert caplog.text.count("'users/exp' fits no optimizer state") == 1
    caplog.clear()
    with Checkpointer(url, model, optimizer, state_bits={"users/exp": 8}):
        assert "'users/exp' fits no optimizer state" in caplog.text


class Model(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.Embedding(500, 16, sparse=True, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.users(ids).float()
        return (found * torch.linspace(-1, 3, 16)).square().sum()


class OneSumARow(Optimizer):
    """Row-wise Adagrad: one accumulated square a row, a count of steps, and a mean in double precision."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.to_dense(), self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros(len(parameter))
                state["times"] = torch.zeros(parameter.shape, dtype=torch.int32)
                state["mean"] = torch.zeros(parameter.shape, dtype=torch.float64)
            state["momentum"] += gradient.square().mean(1)
            state["times"] += gradient != 0
            state["mean"] += gradient / 3
            with torch.no_grad():
                parameter -= 0.1 * gradient / (state["momentum"].sqrt()[:, None] + 1e-8)


def train(model: Model, optimizer: Optimizer, steps: int = 3, seed: int = 0) -> float:
    draw, loss = torch.Generator().manual_seed(seed), torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randint(0, 500, (64,), generator=draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def slots(model: Model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state[model.users.weight]
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}


def test_state_that_has_no_codes_or_nothing_to_gain_stays_exact(tmp_path: Path) -> None:
    model, again = Model(), Model(1)
    optimizer, other = OneSumARow(model.parameters()), OneSumARow(again.parameters())
    train(model, optimizer)
    cnr_store.save(str(tmp_path), model, optimizer, state_bits={"users": 4})
    cnr_store.load(str(tmp_path), again, other)
    before, after = slots(model, optimizer), slots(again, other)
    assert before.keys() == after.keys() == {"momentum", "times", "mean"}
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("policy", ["consecutive", "intermittent"])
def test_each_array_has_the_width_of_its_name(tmp_path: Path, policy: str) -> None:
    url, model, again = str(tmp_path), Model(), Model(1)
    optimizer, other = SparseAdam(model.parameters()), SparseAdam(again.parameters())
    options: dict[str, Any] = {"policy": policy, "bits": 32, "state_bits": {"users/exp_avg": 8}}
    with Checkpointer(url, model, optimizer, **options) as checkpointer:
        for step in range(3):
            train(model, optimizer, 1, seed=step)
            info = checkpointer.save(step).result()
    entries = Catalog(open_backend(url)).record(info.id).arrays
    codecs = {path.rsplit("/", 1)[1]: entry.codec for path, entry in entries.items() if entry.kind != "dense"}
    assert {name: codec and codec["id"] for name, codec in codecs.items()} == {
        "weight": "cnr_rows",
        "exp_avg": "cnr_raised",
        "exp_avg_sq": "cnr_rows",
    }
    cnr_store.load(url, again, other)
    before, after = slots(model, optimizer), slots(again, other)
    assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])
    assert not torch.equal(before["exp_avg"], after["exp_avg"])
    expected = torch.from_numpy(decoded(CeilingRows(8), before["exp_avg"].numpy()))
    trained = torch.from_numpy(np.unique(np.flatnonzero(before["exp_avg"].any(1).numpy())))
    assert torch.equal(after["exp_avg"][trained], expected[trained])


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("kind", [Adagrad, SparseAdam])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_finite_steps_after_every_restore(
    tmp_path: Path, kind: Any, bits: int, dtype: torch.dtype
) -> None:
    url, model = str(tmp_path), Model(dtype=dtype)
    optimizer = kind(model.parameters(), lr=0.01)
    for restored in range(3):
        train(model, optimizer, 6, seed=restored)
        cnr_store.save(url, model, optimizer, restored, bits=32, state_bits=bits)
        model = Model(restored, dtype)
        optimizer = kind(model.parameters(), lr=0.01)
        cnr_store.load(url, model, optimizer)
        # No step is longer than some of the learning rate, whatever became of the state.
        before = model.users.weight.detach().clone()
        train(model, optimizer, 1, seed=9)
        assert float((model.users.weight.detach() - before).abs().max()) < 0.05


def test_a_small_table_of_16_bits_is_lossless(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(1000, 8, dtype=torch.bfloat16)})
    with Checkpointer(tmp_path, model, bits=8) as checkpointer:
        checkpointer.save(1).result()
    loaded = nn.ModuleDict({"a": nn.Embedding(1000, 8, dtype=torch.bfloat16)})
    cnr_store.load(tmp_path, loaded)
    assert torch.equal(loaded.get_parameter("a.weight"), model.get_parameter("a.weight"))
