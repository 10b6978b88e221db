"""Optimizer state on a floating grid: which arrays it is, what it decodes to, and every way of reading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Adagrad, SparseAdam

import cnr_store
from cnr_backends import open_backend
from cnr_codecs import FloatingRows, LosslessRows
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format import layout, record_document
from cnr_store.policies.widths import ExpectedRestores, StateWidths
from cnr_store.training.saving.codec_choice import CodecChoice
from tests.test_codecs.references.floating import codes_of, floating_values
from tests.test_docs import block
from tests.test_store.chains.test_relative import RELATIVE, count_relative
from tests.test_store.training.saving.test_state_bits import Model, OneSumARow, slots, train

PATH = "tables/users/sum"


def on_grid(values: Any, mantissa: int = 3, element: str = "float32") -> Any:
    values = np.asarray(values)
    codes, raw = codes_of(values.reshape(len(values), -1), mantissa, element)
    assert not raw.any()
    return floating_values(codes, mantissa, element).reshape(values.shape)


def requires(url: Path, version: str, room: str = "versions") -> set[str]:
    attributes = json.loads((url / room / version / "zarr.json").read_text())["attributes"]
    return set(attributes["cnr" if room == "versions" else "cnr_fold"]["requires"])


def held(url: Path, version: str) -> Any:
    array: Any = cnr_store.open(str(url), version)[PATH]
    return np.asarray(array[:])


def entry_of(url: Path, version: str, path: str = PATH) -> Any:
    record = Catalog(open_backend(str(url))).find_record(version)
    assert record is not None
    return record.arrays[path]


def saved(url: Path, policy: str, saves: int = 3, **options: Any) -> tuple[Model, Adagrad, dict[str, Any]]:
    """A model with its optimizer, and the state that each version should hold."""
    model = Model()
    optimizer = Adagrad(model.parameters())
    asked: dict[str, Any] = {"policy": policy, "bits": 32, "state_bits": "m3", **options}
    expected = {}
    with Checkpointer(str(url), model, optimizer, **asked) as checkpointer:
        for step in range(saves):
            train(model, optimizer, 1, seed=step)
            version = checkpointer.save(step).result().id
            expected[version] = on_grid(slots(model, optimizer)["sum"].numpy())
    return model, optimizer, expected


def test_widths_of_floating_grids() -> None:
    widths = StateWidths({"users/sum": "m3", "*": "m7"})
    assert [widths.of("users", "sum", 10), widths.of("items", "sum", 10)] == ["m3", "m7"]
    assert widths.quantized == {"m3", "m7"}
    assert [StateWidths("m1").of("users", "sum", nbytes) for nbytes in (1 << 20, 1 << 10)] == ["m1", 32]
    choice = CodecChoice(state_bits="m5")
    codecs = {
        element: choice.state_codec_for("t", "s", 1 << 20, element)
        for element in ("float32", "float16", "bfloat16", "int32")
    }
    assert codecs.pop("int32") == LosslessRows()
    assert set(codecs.values()) == {FloatingRows(5)}
    exact = CodecChoice(bits="auto", codec={"*": RELATIVE}, state_bits="m23")
    assert exact.state_codec_for("t", "s", 1 << 20, "float32") == FloatingRows(23)
    assert exact.state_codec_for("t", "s", 1 << 20, "float64") == LosslessRows()


def test_the_width_of_a_table_follows_the_restores() -> None:
    choice = CodecChoice(expected=ExpectedRestores(0.001, 1, 1))
    widths = []
    for restores in (0, 9, 0):
        choice.resolve_auto(restores)
        codecs = [choice.codec_for("t", 1 << 20) for _ in range(2)]
        assert codecs[0] == codecs[1]
        widths.append(codecs[0].get_config()["bits"])
    assert widths == [2, 8, 2]


@pytest.mark.parametrize("wrong", ["m0", "m8", "m", "3", "M3", "m03", {"users": "m9"}])
def test_wrong_grids(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"state_bits '.*': use 2, 3, 4, 8, 32 \(lossless\), 'm1', .*'m7'"):
        StateWidths(wrong)


@pytest.mark.parametrize(
    ("policy", "options"),
    [(policy, {}) for policy in ("full", "one-shot", "consecutive", "intermittent")]
    + [(policy, {"bits": "auto", "codec": {"*": RELATIVE}}) for policy in ("consecutive", "one-shot")],
)
def test_versions_give_back_the_codes(tmp_path: Path, policy: str, options: dict[str, Any]) -> None:
    """Of state beside relative rows, too, which is relative."""
    model, optimizer, expected = saved(tmp_path, policy, **options)
    for version, values in expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), values)
        assert {"floating", "lattice"} <= requires(tmp_path, version)
    relative = {"relative": True} if options else {}
    assert dict(entry_of(tmp_path, version).codec) == {"id": "cnr_floating", "mantissa_bits": 3, **relative}
    if options:
        assert count_relative(str(tmp_path), version, PATH) > 0
    assert not cnr_store.verify(str(tmp_path), deep=True).problems
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    np.testing.assert_array_equal(names["read_rows"](tmp_path, version, PATH), values)
    again = Model(1)
    other = Adagrad(again.parameters())
    cnr_store.load(str(tmp_path), again, other)
    np.testing.assert_array_equal(slots(again, other)["sum"].numpy(), values)
    before = np.asarray(slots(model, optimizer)["sum"])
    assert (np.abs(values - before) <= before / 16).all()
    cnr_store.compact(str(tmp_path), version)
    np.testing.assert_array_equal(held(tmp_path, version), values)
    if entry_of(tmp_path, version).base is not None:
        assert {"floating", "lattice"} <= requires(tmp_path, version, "folds")


@pytest.mark.parametrize("policy", ["one-shot", "consecutive"])
def test_all_bits_come_back_beside_relative_rows(tmp_path: Path, policy: str) -> None:
    """None of these rows is relative; deltas hold those that changed alone, and folds keep them."""
    model = Model()
    optimizer = Adagrad(model.parameters())
    options: dict[str, Any] = {
        "policy": policy,
        "bits": "auto",
        "codec": {"*": RELATIVE},
        "state_bits": "m23",
    }
    expected = {}
    with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
        for step in range(3):
            train(model, optimizer, 1, seed=step)
            version = checkpointer.save(step).result().id
            expected[version] = slots(model, optimizer)["sum"].numpy().copy()
    for version, values in expected.items():
        assert held(tmp_path, version).tobytes() == values.tobytes()
        assert count_relative(str(tmp_path), version, PATH) == 0
    entry = entry_of(tmp_path, version)
    assert dict(entry.codec) == {"id": "cnr_floating", "mantissa_bits": 23}
    assert entry.base is not None
    assert entry.rows < len(values)
    assert not cnr_store.verify(str(tmp_path), deep=True).problems
    names: dict[str, Any] = {}
    exec(compile(block("reader"), "docs/format.md", "exec"), names)
    assert names["read_rows"](tmp_path, version, PATH).tobytes() == values.tobytes()
    cnr_store.compact(str(tmp_path), version)
    assert held(tmp_path, version).tobytes() == values.tobytes()
    again = Model(1)
    other = Adagrad(again.parameters())
    cnr_store.load(str(tmp_path), again, other)
    assert slots(again, other)["sum"].numpy().tobytes() == values.tobytes()


def test_all_slots_of_adam_and_one_number_a_row_gain(tmp_path: Path) -> None:
    model = Model()
    optimizer = SparseAdam(model.parameters())
    train(model, optimizer)
    cnr_store.save(str(tmp_path / "adam"), model, optimizer, state_bits={"users": "m3"})
    again = Model(1)
    other = SparseAdam(again.parameters())
    cnr_store.load(str(tmp_path / "adam"), again, other)
    for name, values in slots(model, optimizer).items():
        np.testing.assert_array_equal(slots(again, other)[name].numpy(), on_grid(values.numpy()))

    rowwise = OneSumARow(model.parameters())
    train(model, rowwise)
    cnr_store.save(str(tmp_path / "rowwise"), model, rowwise, state_bits={"users": "m4"})
    restored = OneSumARow(again.parameters())
    cnr_store.load(str(tmp_path / "rowwise"), again, restored)
    before, after = slots(model, rowwise), slots(again, restored)
    assert all(torch.equal(before[name], after[name]) for name in ("times", "mean"))
    np.testing.assert_array_equal(after["momentum"].numpy(), on_grid(before["momentum"].numpy(), 4))


@pytest.mark.some_by_day(4)
@pytest.mark.parametrize("kind", [Adagrad, SparseAdam])
@pytest.mark.parametrize("width", ["m1", "m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_finite_steps_after_every_restore(
    tmp_path: Path, kind: Any, width: str, dtype: torch.dtype
) -> None:
    url, model = str(tmp_path), Model(dtype=dtype)
    optimizer = kind(model.parameters(), lr=0.01)
    for restored in range(3):
        train(model, optimizer, 6, seed=restored)
        cnr_store.save(url, model, optimizer, restored, bits=32, state_bits=width)
        model = Model(restored, dtype)
        optimizer = kind(model.parameters(), lr=0.01)
        cnr_store.load(url, model, optimizer)
        before = model.users.weight.detach().clone()
        train(model, optimizer, 1, seed=9)
        assert float((model.users.weight.detach() - before).abs().max()) < 0.05


@pytest.mark.slow
def test_rows_that_were_saved_with_a_width_or_none_are_followed_by_a_grid(tmp_path: Path) -> None:
    """One chain has lossless rows, rows of 8 bits and rows on two grids."""
    model, optimizer, _ = saved(tmp_path, "consecutive", 1, state_bits=32)
    expected = slots(model, optimizer)["sum"].numpy().copy()
    for step, width in enumerate((8, "m3", "m5", 32), 1):
        options: dict[str, Any] = {"policy": "consecutive", "bits": 32, "state_bits": width}
        with Checkpointer(str(tmp_path), model, optimizer, **options) as checkpointer:
            checkpointer.load()
            before = slots(model, optimizer)["sum"].numpy().copy()
            train(model, optimizer, 1, seed=step)
            now = slots(model, optimizer)["sum"].numpy()
            changed = (now != before).any(axis=1)
            version = checkpointer.save(step).result().id
            expected = held(tmp_path, version)
            np.testing.assert_array_equal(expected[~changed], before[~changed])
            if isinstance(width, str):
                np.testing.assert_array_equal(expected[changed], on_grid(now[changed], int(width[1])))
    cnr_store.compact(str(tmp_path), version)
    np.testing.assert_array_equal(held(tmp_path, version), expected)


def test_an_older_release_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, expected = saved(tmp_path, "full", 1)
    monkeypatch.setattr(record_document, "FEATURES", layout.FEATURES - {layout.FLOATING})
    with pytest.raises(FormatError, match="requires floating: install a newer cnr-store"):
        cnr_store.open(str(tmp_path), next(iter(expected)))


def test_damaged_state_is_an_error_and_salvage_finds_older_rows(tmp_path: Path) -> None:
    model, optimizer, expected = saved(tmp_path, "consecutive", 2)
    *_, version = expected
    (shard,) = (path for path in (tmp_path / "versions" / version / PATH / "c").rglob("*") if path.is_file())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(bytes(data))
    with pytest.raises(CorruptionError, match=r"crc32c|damaged"):
        held(tmp_path, version)
    assert cnr_store.verify(str(tmp_path), deep=True).problems
    with Checkpointer(str(tmp_path), model, optimizer, state_bits="m3") as checkpointer:
        assert checkpointer.load(salvage=True).salvaged


def test_explanation_counts_fewer_bytes(tmp_path: Path) -> None:
    sizes = {}
    for width in (32, 8, "m3"):
        model = Model()
        optimizer = Adagrad(model.parameters())
        train(model, optimizer)
        options: dict[str, Any] = {"bits": 32, "state_bits": width}
        with Checkpointer(str(tmp_path / str(width)), model, optimizer, **options) as checkpointer:
            checkpointer.save(0).result()
            sizes[width] = checkpointer.explain()[0].whole_bytes
    assert sizes["m3"] < sizes[8] < sizes[32]
