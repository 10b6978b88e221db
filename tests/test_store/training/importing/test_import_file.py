"""Models saved as one file, stored as a version, and loaded by whoever loads versions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import cnr_store
from cnr_backends import OpenError
from cnr_store import Checkpointer, FormatError, ModelMismatchError, OptionError
from tests.test_store.reading.test_export import Model, contents, same
from tests.test_store.support.zarr_nodes import group_of

TABLES = ["users", "items", "tags"]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    return Model()


def write(model: nn.Module, path: Path, kind: str) -> Path:
    if kind == "torch":
        torch.save(model.state_dict(), path)
    else:
        safetensors.torch.save_model(model, str(path))
    return path


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_model_loads_what_was_imported(model: Model, tmp_path: Path, kind: str) -> None:
    if kind == "safetensors":  # which tells nothing of tied tensors, so a model without them
        model.again, model.tied = nn.Embedding(9, 2), nn.Linear(2, 2)
    source = write(model, tmp_path / "file", kind)
    tables = [*TABLES, "again"] if kind == "safetensors" else TABLES
    info = cnr_store.import_file(source, tmp_path / "store", step=5, bits=32, tables=tables)
    assert (info.step, info.kind, info.previous) == (5, "baseline", None)
    assert cnr_store.versions(tmp_path / "store") == [info]
    served = Model()
    if kind == "safetensors":
        served.again, served.tied = nn.Embedding(9, 2), nn.Linear(2, 2)
    assert cnr_store.load(tmp_path / "store", served).version == info
    for name, values in model.state_dict().items():
        assert same(served.state_dict()[name], values), name


def test_rows_are_quantized_as_a_checkpointer_does(model: Model, tmp_path: Path) -> None:
    bits = {"users": 4, "items": 2}
    source = write(model, tmp_path / "file", "torch")
    cnr_store.import_file(source, tmp_path / "imported", bits=bits, tables=TABLES)
    cnr_store.save(tmp_path / "saved", model, bits=bits)
    imported, saved = (cnr_store.state_dict(tmp_path / place) for place in ("imported", "saved"))
    assert imported.keys() == saved.keys()
    for name, values in saved.items():
        assert imported[name].tobytes() == values.tobytes(), name


def test_a_codec_takes_the_place_of_widths(model: Model, tmp_path: Path) -> None:
    source = write(model, tmp_path / "file", "torch")
    for codec, exact in (("cnr_rows", True), ({"id": "cnr_uniform", "bits": 4}, False)):
        cnr_store.import_file(source, tmp_path / "store", codec=codec, tables=TABLES, workers=2)
        found = cnr_store.state_dict(tmp_path / "store")["users.weight"]
        assert np.array_equal(found, model.state_dict()["users.weight"]) == exact


class KeyedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Takes a key, as S3 does."""

    protocol = "keyed"
    cachable = False
    keys: ClassVar[list[str | None]] = []

    def __init__(self, key: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.keys.append(key)


def test_an_option_of_storage_may_be_called_as_a_parameter_is(model: Model, tmp_path: Path) -> None:
    fsspec.register_implementation("keyed", KeyedFileSystem, clobber=True)
    torch.save({"model": model.state_dict()}, tmp_path / "file")
    options: dict[str, Any] = {"storage_options": {"key": "secret"}}
    cnr_store.import_file(tmp_path / "file", "keyed://imported", key="model", tables=TABLES, **options)
    assert [info.kind for info in cnr_store.versions("keyed://imported", **options)] == ["baseline"]
    assert set(KeyedFileSystem.keys) == {"secret"}


def test_an_export_is_imported_with_its_tied_tensors(model: Model, tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "saved", model, bits=32)
    cnr_store.export(tmp_path / "saved", tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "imported", bits=32, tables=TABLES)
    served = Model()
    cnr_store.load(tmp_path / "imported", served)
    for name, values in model.state_dict().items():
        assert same(served.state_dict()[name], values), name
    cnr_store.export(tmp_path / "imported", tmp_path / "again")
    again, first = (safetensors.torch.load_file(tmp_path / name) for name in ("again", "file"))
    assert again.keys() == first.keys()
    assert all(same(again[name], first[name]) for name in first)


def test_tensors_that_are_tied_no_more_keep_their_values(model: Model, tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "saved", model, bits=32)
    cnr_store.export(tmp_path / "saved", tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", "pt") as file:
        metadata = file.metadata()
    state = safetensors.torch.load_file(tmp_path / "file")
    state["again.weight"][2999, 5] += 1
    safetensors.torch.save_file(state, tmp_path / "changed", metadata)
    cnr_store.import_file(tmp_path / "changed", tmp_path / "imported", bits=32, tables=[*TABLES, "again"])
    found = cnr_store.state_dict(tmp_path / "imported")
    assert np.array_equal(found["again.weight"], state["again.weight"].numpy())
    assert np.array_equal(found["users.weight"], state["users.weight"].numpy())
    assert found["tied.weight"] is found["top.weight"]


def test_a_child_that_is_called_module_is_no_wrapper_in_an_export(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"module": nn.Embedding(30, 4), "other": nn.Identity()})

    trained, served = build(), build()
    cnr_store.save(tmp_path / "saved", trained, bits=32)
    cnr_store.export(tmp_path / "saved", tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "imported", bits=32, tables="module")
    cnr_store.load(tmp_path / "imported", served)
    assert torch.equal(served.get_parameter("module.weight"), trained.get_parameter("module.weight"))


def test_training_goes_on_from_an_import_with_a_new_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(500, 4, sparse=True), nn.Linear(4, 1))
    torch.save(model.state_dict(), tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", tables=["0"], bits=32)
    other = nn.Sequential(nn.Embedding(500, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ModelMismatchError, match="was saved without an optimizer"):
        cnr_store.load(tmp_path / "store", other, optimizer)
    cnr_store.load(tmp_path / "store", other)
    assert other.state_dict().keys() == model.state_dict().keys()
    with Checkpointer(tmp_path / "store", other, optimizer) as checkpointer:
        other(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert checkpointer.save(1).result().kind == "baseline"


def test_only_large_matrices_are_tables_unless_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.large, model.small = nn.Embedding(10_000, 2), nn.Embedding(9_999, 2)
    model.wide = nn.Linear(10_000, 3)
    model.ids = nn.Module()
    model.ids.register_buffer("weight", torch.zeros(10_000, 2, dtype=torch.int64))
    torch.save(model.state_dict(), tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "store")
    assert list(group_of(cnr_store.open(tmp_path / "store"), "tables").group_keys()) == ["large"]
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", tables=["s*"])
    assert list(group_of(cnr_store.open(tmp_path / "store"), "tables").group_keys()) == ["small"]
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", tables=[])
    assert "tables" not in cnr_store.open(tmp_path / "store")


@pytest.mark.parametrize("pattern", ["nothing", "ids", "users.weight"])
def test_a_pattern_that_fits_no_table_is_refused(model: Model, tmp_path: Path, pattern: str) -> None:
    model.ids = nn.Module()
    model.ids.register_buffer("weight", torch.zeros(3, 2, dtype=torch.int64))
    source = write(model, tmp_path / "file", "torch")
    with pytest.raises(OptionError, match=f"{pattern!r} fits no.*'users', 'items'"):
        cnr_store.import_file(source, tmp_path / "store", tables=[pattern])
    assert not (tmp_path / "store").exists()


def test_prefixes_of_wrappers_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1))
    state = {f"module._orig_mod.{name}": values for name, values in model.state_dict().items()}
    torch.save({"epoch": 3, "model": state}, tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", key="model", tables=["0"], bits=32)
    served = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1))
    cnr_store.load(tmp_path / "store", served)
    assert torch.equal(served.get_parameter("0.weight"), model.get_parameter("0.weight"))


def test_extra_state_is_imported(tmp_path: Path) -> None:
    class Words(nn.Linear):
        words: Any = None

        def get_extra_state(self) -> dict[str, object]:
            return {"words": self.words, "few": ("a", 1)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            assert state["few"] == ("a", 1)
            self.words = state["words"]

    model = Words(2, 2)
    model.words = torch.arange(5000)
    torch.save(model.state_dict(), tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "store")
    served = Words(2, 2)
    cnr_store.load(tmp_path / "store", served)
    assert torch.equal(served.words, model.words)
    (update,) = cnr_store.follow(tmp_path / "store")
    following = Words(2, 2)
    update.apply(following)
    assert torch.equal(following.words, model.words)


def test_a_store_goes_on_with_what_is_imported_into_it(model: Model, tmp_path: Path) -> None:
    first = cnr_store.save(tmp_path / "store", model)
    source = write(model, tmp_path / "file", "torch")
    second = cnr_store.import_file(source, tmp_path / "store", tables=TABLES)
    assert cnr_store.versions(tmp_path / "store") == [first, second]


# What is told


def test_a_series_of_imports_is_no_run_that_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        torch.save(nn.Embedding(50, 4).state_dict(), tmp_path / f"{step}.pt")
        cnr_store.import_file(tmp_path / f"{step}.pt", tmp_path / "store", tables=["weight"])
    cnr_store.save(tmp_path / "trained", nn.Embedding(50, 4), step=1)
    cnr_store.import_file(tmp_path / "2.pt", tmp_path / "trained", tables=["weight"])
    assert [info.step for info in cnr_store.versions(tmp_path / "store")] == [1, 2]
    assert [info.step for info in cnr_store.versions(tmp_path / "trained")] == [1, 2]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_what_became_a_table_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cnr_store")
    model = nn.Module()
    model.large, model.small, model.top = nn.Embedding(10_000, 2), nn.Embedding(500, 2), nn.Linear(2, 300)
    torch.save(model.state_dict(), tmp_path / "1.pt")
    cnr_store.import_file(tmp_path / "1.pt", tmp_path / "store")
    warned, told = (each.getMessage() for each in caplog.records)
    assert told.endswith(
        "tables: large (10,000 x 2); whole: small.weight (500 x 2), top.weight (300 x 2), top.bias (300)"
    )
    assert "fewer than 10,000 rows: small.weight (500 x 2)" in warned
    assert warned.endswith("tables=['large', 'small']")
    caplog.clear()
    for tables in (["large"], []):  # who names tables knows them
        cnr_store.import_file(tmp_path / "1.pt", tmp_path / "store", tables=tables)
    assert [each.levelname for each in caplog.records] == ["INFO", "INFO"], caplog.text


def test_a_load_says_which_tables_to_import(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"users": nn.Embedding(50, 4), "top": nn.Linear(4, 30)})

    torch.save(build().state_dict(), tmp_path / "file")
    again = r"import again with --table users \(tables=\['users'\]\)"
    for tables, found in ((None, r"\['users'\] whole, not by rows"), (["*"], r"\['top'\] by rows")):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store", tables=tables)
        with pytest.raises(ModelMismatchError, match=f"^version .* {found}; .*{again}") as told:
            cnr_store.load(tmp_path / "store", build())
        assert "ignore" not in str(told.value)  # which would leave the table as it is
        parts: list[dict[str, Any]] = [{"tables": ["*"]}, {"tensors": ["*"]}]
        for part in parts:
            with pytest.raises(ModelMismatchError, match=f"{found}; .*{again}"):
                cnr_store.load(tmp_path / "store", build(), **part)
    cnr_store.load(tmp_path / "store", build(), tables=["users"])  # which fits
    with pytest.raises(ModelMismatchError) as told:  # no word of imports where another table is missing
        cnr_store.load(tmp_path / "store", nn.ModuleDict({"ads": nn.Embedding(50, 4)}))
    assert "import again" not in str(told.value)
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", tables=["users"])
    cnr_store.load(tmp_path / "store", build())


@pytest.mark.parametrize(
    ("name", "content", "step"),
    [
        ("1200.pt", {}, 1200),
        ("1200", {}, 1200),
        ("epoch=3-step=70.ckpt", {}, 70),
        ("model_Step-00012.pt", {}, 12),
        ("checkpoint-9", {}, 9),
        ("2026-11-27.pt", {}, 0),
        ("footstep3.pt", {}, 0),
        ("resnet-50.pt", {}, 0),
        ("model.pt", {}, 0),
        (f"step-{10**18}.pt", {}, 0),
        ("70.pt", {"step": 5, "global_step": 6}, 5),
        ("70.pt", {"global_step": 6, "epoch": 2}, 6),
        ("70.pt", {"step": True, "iteration": 7}, 7),
        ("70.pt", {"step": -1, "epoch": 2}, 70),
        ("70.pt", {"global_step": torch.tensor(5)}, 5),
        ("70.pt", {"step": torch.tensor([8.0])}, 8),
        ("70.pt", {"step": 9.0}, 9),
        ("70.pt", {"step": torch.tensor([1, 2]), "iteration": torch.tensor(math.nan)}, 70),
    ],
)
def test_the_step_is_that_of_the_file(
    tmp_path: Path, name: str, content: dict[str, object], step: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"model": nn.Linear(2, 1).state_dict()} | content, tmp_path / name)
    assert cnr_store.import_file(tmp_path / name, tmp_path / "store", key="model").step == step
    guessed = f"{tmp_path / name}: no step found, stored as step 0; give it, as with step=1200"
    assert caplog.messages == ([] if step else [guessed])
    assert cnr_store.import_file(tmp_path / name, tmp_path / "store", 3, key="model").step == 3


# What is refused


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("harm"),)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Harmful()}, tmp_path / "file")
    with pytest.raises(FormatError, match="can't be read as tensors alone"):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store")
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"model": {"weight": torch.zeros(3)}, "epoch": 1}, "give the part to import, key='model'$"),
        ({"epoch": 1, "args": {}, "net": {"weight": torch.zeros(3)}}, "give the part to import, key='net'$"),
        ({"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}}, "import, key='a' or key='b'$"),
        ({"args": {"lr": 0.1}}, "'args' is of type dict, not a tensor"),
        ({"a": deque()}, r"tensors alone: it holds a collections\.deque; save"),
        ({"epoch": 1}, "'epoch' is of type int, not a tensor"),
        ([torch.zeros(3)], "holds an object of type list, not tensors by name"),
        (torch.zeros(3), "holds an object of type Tensor"),
        ({"a": torch.zeros(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"module.a": torch.zeros(1), "module._orig_mod.a": torch.zeros(2)}, "two tensors of one name"),
    ],
)
def test_what_is_no_state_dict_is_told(tmp_path: Path, found: object, words: str) -> None:
    torch.save(found, tmp_path / "file")
    with pytest.raises(FormatError, match=words):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store")


def test_a_key_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    torch.save({"model": {}, "epoch": 1}, tmp_path / "file")
    with pytest.raises(OptionError, match="nothing under key='net'; it holds 'model', 'epoch'"):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store", key="net")


def test_a_key_with_dots_leads_into_entries(tmp_path: Path) -> None:
    deep = {"net": {"model": {"a": torch.ones(2)}, "iteration": 7}, "step": 3}
    torch.save({"state": deep, "net.model": {"b": torch.ones(3)}}, tmp_path / "file")
    found = {}
    for key in ("state.net.model", "net.model"):
        url = tmp_path / key
        info = cnr_store.import_file(tmp_path / "file", url, key=key)
        found[key] = list(cnr_store.state_dict(url)), info.step
    assert found == {"state.net.model": (["a"], 7), "net.model": (["b"], 0)}
    for part in (None, "state", "state.net"):
        with pytest.raises(FormatError, match=r"give the part to import, key='state\.net\.model'"):
            cnr_store.import_file(tmp_path / "file", tmp_path / "other", key=part)
    with pytest.raises(
        OptionError, match=r"nothing under key='state.net.users'; it holds 'model', 'iteration'"
    ):
        cnr_store.import_file(tmp_path / "file", tmp_path / "other", key="state.net.users")


def test_a_misspelled_option_is_told_before_the_file(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "file")
    with pytest.raises(OpenError, match="kye"):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store", kye="model")


def test_files_of_other_kinds_are_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="can't read"):
        cnr_store.import_file(tmp_path / "nothing", tmp_path / "store")
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "old", _use_new_zipfile_serialization=False)
    for name, data in [("empty", b""), ("text", b"hello, world, this is text"), ("zip", b"PK\x03\x04....")]:
        (tmp_path / name).write_bytes(data)
    for name in ("old", "empty", "text", "zip"):
        with pytest.raises(FormatError):
            cnr_store.import_file(tmp_path / name, tmp_path / "store")
    with pytest.raises(FormatError, match=r"no file of torch\.save"):
        cnr_store.import_file(tmp_path / "text", tmp_path / "store", key="model")
    for source in (5, b"file", str(tmp_path / "a\0b"), "\ud800"):
        with pytest.raises(OptionError, match=r"can't import .*: give the path of a file"):
            cnr_store.import_file(source, tmp_path / "store")  # type: ignore[arg-type]  # deliberately wrong
    for tables in (5, [5], True, torch.tensor(1), torch.tensor([1])):
        with pytest.raises(OptionError, match=r"tables=.*: give names, or patterns"):
            cnr_store.import_file(tmp_path / "text", tmp_path / "store", tables=tables)  # type: ignore[arg-type]  # deliberately wrong
    with pytest.raises(OptionError, match="workers=0"):
        cnr_store.import_file(tmp_path / "text", tmp_path / "store", workers=0)
    with pytest.raises(OptionError, match="step"):
        cnr_store.import_file(tmp_path / "text", tmp_path / "store", step=-1)
    assert not (tmp_path / "store").exists()


def tensor(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": []},
        {"a": {"dtype": "F32"}},
        {"a": tensor(dtype="F31")},
        {"a": tensor(dtype=["F32"])},
        {"a": tensor(shape=[3])},
        {"a": tensor(shape=[-2])},
        {"a": tensor(shape=[1 << 40, 1 << 40])},
        {"a": tensor(shape=2)},
        {"a": tensor(data_offsets=[0, 8, 8])},
        {"a": tensor(data_offsets=[8, 0])},
        {"a": tensor(data_offsets=[-8, 0])},
        {"a": tensor(data_offsets=[8, 16])},
        {"a": tensor(shape=[1], data_offsets=[0, 4])},
        {"a": tensor(), "b": tensor()},
        {"a": tensor(), "b": tensor(data_offsets=[8, 16])},
        {"a": tensor(), "__metadata__": []},
        {"a": tensor(), "__metadata__": {"cnr_aliases": "[]"}},
        {"a": tensor(), "__metadata__": {"cnr_aliases": '{"b": "a"}'}},
        {"a": tensor(), "__metadata__": {"cnr_aliases": '{"a": "a"}'}},
        {"a": tensor(), "__metadata__": {"cnr_aliases": '{"a": 5}'}},
    ],
)
def test_a_damaged_header_is_told(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(FormatError, match="file"):
        cnr_store.import_file(tmp_path / "file", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_every_cut_of_a_file_is_told(model: Model, tmp_path: Path) -> None:
    source = write(nn.Linear(2, 2), tmp_path / "file", "safetensors")
    data = source.read_bytes()
    for length in range(len(data)):
        source.write_bytes(data[:length])
        with pytest.raises(FormatError):
            cnr_store.import_file(source, tmp_path / "store")
    source.write_bytes(data)
    cnr_store.import_file(source, tmp_path / "store")


@pytest.mark.slow
def test_safetensors_are_imported_without_torch(model: Model, tmp_path: Path) -> None:
    cnr_store.save(tmp_path / "saved", model)
    cnr_store.export(tmp_path / "saved", tmp_path / "file")
    torch.save(model.state_dict(), tmp_path / "torch")
    program = """
import sys
sys.modules["torch"] = None
import cnr_store
cnr_store.import_file("file", "store", tables=["users", "items", "tags"])
try:
    cnr_store.import_file("torch", "store")
except ImportError as error:
    assert "cnr-store[torch]" in str(error), error
else:
    raise SystemExit("imported without torch")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    expected = cnr_store.state_dict(tmp_path / "saved")
    found = cnr_store.state_dict(tmp_path / "store")
    assert found.keys() == expected.keys()
    assert contents(tmp_path / "file")
    assert np.array_equal(found["sixteenth"], expected["sixteenth"])


def test_a_conjugated_tensor_is_not_the_one_whose_memory_it_has(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    torch.save({"a": values, "b": values.conj()}, tmp_path / "file")
    cnr_store.import_file(tmp_path / "file", tmp_path / "store", step=1)
    found = cnr_store.state_dict(tmp_path / "store")
    assert found["a"].tolist() == [1 + 2j, 3 - 1j]
    assert found["b"].tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_are_told_the_version_of_their_state_in_the_file(tmp_path: Path, wrapped: bool) -> None:
    class Tens(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
            if metadata["version"] < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
            super()._load_from_state_dict(state, prefix, metadata, *more)

    def build(kind: type[nn.Linear]) -> nn.ModuleDict:
        return nn.ModuleDict({"users": nn.Embedding(900, 8), "top": kind(8, 1)})

    for kind, factor in ((nn.Linear, 10), (Tens, 1)):
        saved, model = build(kind), build(Tens)
        state = (nn.DataParallel(saved) if wrapped else saved).state_dict()
        torch.save(state, tmp_path / "old.pt")
        cnr_store.import_file(tmp_path / "old.pt", tmp_path / kind.__name__, tables=["users"], step=1)
        cnr_store.load(tmp_path / kind.__name__, model, job=cnr_store.Job(rng=False))
        assert torch.equal(model.get_parameter("top.weight"), saved.get_parameter("top.weight") * factor)
