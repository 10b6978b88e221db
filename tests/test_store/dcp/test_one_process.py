"""DCP on a store in one process: what a state dict may hold, and which versions can be loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import Checkpointer, OptionError
from cnr_store.catalog.catalog import open_record
from cnr_store.dcp import Reader, Writer, import_checkpoint
from tests.test_store.dcp.saved_state import Tripwire, same, whole_state, zeroed
from tests.test_store.support.tampering import Forgery

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: Any, writer: Writer, **arguments: Any) -> cnr_store.VersionInfo:
    save_checkpoint(state, storage_writer=writer, **arguments)
    return writer.version


def load(state: Any, url: Any, version: Any = "latest", **arguments: Any) -> Any:
    load_checkpoint(state, storage_reader=Reader(url, version), **arguments)
    return state


def test_a_nested_state_dict_returns_bit_for_bit(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for seed in range(2):
        assert save(whole_state(seed), writer).step == seed
        same(load(zeroed(whole_state(seed)), tmp_path), whole_state(seed))
    same(load(zeroed(whole_state()), tmp_path, 0), whole_state())
    assert [info.previous for info in cnr_store.versions(tmp_path)] == [
        None,
        cnr_store.versions(tmp_path)[0].id,
    ]
    assert cnr_store.verify(tmp_path, deep=True).ok


@pytest.mark.some_by_day(16)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float16", "bfloat16", "float8_e4m3fn", "complex64", "bool", "uint8", "int64", "float32"],
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (200, 50), (9, 3, 2), (1, 5000)])
def test_element_types_and_shapes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    random = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1))
    wanted = random.to(getattr(torch, dtype))
    save({"x": wanted, "y": 1}, Writer(tmp_path))
    found = load({"x": torch.zeros_like(wanted), "y": 0}, tmp_path)["x"]
    assert found.dtype == wanted.dtype
    if "float8" in dtype:  # which torch does not compare
        found, wanted = found.double(), wanted.double()
    assert torch.equal(found, wanted)


def test_names_that_would_share_a_path(tmp_path: Path) -> None:
    names = ["emb", "emb.weight", "Emb.weight", "weight", "a/b", "$float", ".", "ü", "n" * 400, "n" * 401]
    state = {name: torch.full((300, 20), float(i)) for i, name in enumerate(names)}
    state |= {f"small {name}": torch.tensor(float(i)) for i, name in enumerate(names)}
    planners = (
        DefaultSavePlanner(flatten_state_dict=False),
        DefaultLoadPlanner(flatten_state_dict=False),
    )
    save(state, Writer(tmp_path), planner=planners[0])
    same(load(zeroed(state), tmp_path, planner=planners[1]), state)
    assert "emb.weight" in cnr_store.state_dict(tmp_path)


@pytest.mark.parametrize("name", ["$dict", "$tuple", "$", "$dict.a", "values"])
def test_values_by_names_that_look_like_tags(tmp_path: Path, name: str) -> None:
    save({name: 5, "x": torch.ones(2)}, Writer(tmp_path))
    assert load({name: 0, "x": torch.zeros(2)}, tmp_path)[name] == 5


def test_views_and_tensors_with_gradients(tmp_path: Path) -> None:
    base = torch.arange(40000.0).reshape(200, 200)
    state = {"turned": base.T, "columns": base[:, 3:90], "grad": nn.Parameter(base + 1), "each": base[::2, 0]}
    save(state, Writer(tmp_path))
    found = load({name: torch.zeros(each.shape) for name, each in state.items()}, tmp_path)
    same(found, {name: each.detach() for name, each in state.items()})


@pytest.mark.slow
def test_a_box_reads_only_the_chunks_that_it_meets(tmp_path: Path) -> None:
    """A planner that asks for some rows of a table and of a dense tensor."""
    state = {"table": torch.randn(1_600_000, 16), "dense": torch.arange(12_000_000)}
    save(state, Writer(tmp_path))
    backend = FaultyBackend(open_backend(tmp_path), lambda *_: None, reads=True)

    class SomeRows(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            sizes = {"table": (100, 16), "dense": (100,)}
            offsets = {"table": (1_599_000, 0), "dense": (11_000_000,)}
            items = [
                type(item)(
                    item.type,
                    item.dest_index,
                    torch.Size([0] * len(sizes[item.dest_index.fqn])),
                    item.storage_index,
                    torch.Size(offsets[item.dest_index.fqn]),
                    torch.Size(sizes[item.dest_index.fqn]),
                )
                for item in plan.items
            ]
            return LoadPlan(items)

    found = {name: torch.zeros_like(each) for name, each in state.items()}
    load(found, backend, planner=SomeRows())
    assert torch.equal(found["table"][:100], state["table"][1_599_000:1_599_100])
    assert torch.equal(found["dense"][:100], state["dense"][11_000_000:11_000_100])
    read = {key.split("/", 2)[2] for _, key in backend.log if "/c/" in key}
    assert {key for key in read if key.startswith("dense/")} == {"dense/model/dense/c/2"}
    shards = {key for key in read if key.startswith("tables/")}
    assert shards == {f"tables/table/weight/c/{max(int(key.split('/')[-2]) for key in shards)}/0"}


def test_tables_are_quantized_where_widths_are_given(tmp_path: Path) -> None:
    state = {"users.weight": torch.randn(2000, 16), "other.weight": torch.randn(2000, 16)}
    save(state, Writer(tmp_path, tables=["users"], bits=8))
    found = load(zeroed(state), tmp_path)
    assert torch.equal(found["other.weight"], state["other.weight"])
    assert not torch.equal(found["users.weight"], state["users.weight"])
    assert torch.allclose(found["users.weight"], state["users.weight"], atol=0.03)
    save(state, Writer(tmp_path, tables="users", codec="cnr_rows", workers=2))
    same(load(zeroed(state), tmp_path), state)


def test_jobs_that_go_on_spend_a_budget(tmp_path: Path) -> None:
    """A second save of a job spends nothing; each job that begins from a version does."""
    state, last = {"users.weight": torch.randn(2000, 16)}, None
    for job in range(4):
        writer = Writer(tmp_path, tables=["users"], codec="auto", previous=last)
        save(state, writer)
        last = save(state, writer)
        writer.close()
        found = open_record(tmp_path, last.id)[1]
        assert found.spent == pytest.approx(0.01 * (1 - 0.9**job))
        (entry,) = (each for each in found.arrays.values() if each.kind != "dense")
        assert (entry.codec or {})["rms_step"] == pytest.approx((0.005 * 0.9**job) ** 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 4}, "name them with tables"),
        ({"codec": "cnr_rows"}, "name them with tables"),
        ({"tables": ["x"], "bits": 5}, "bits"),
        ({"tables": 3}, "tables=3"),
        ({"workers": 0}, "workers=0"),
    ],
)
def test_options_that_are_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Writer(tmp_path, **options)


def test_a_pattern_that_fits_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="the pattern 'nobody' fits no floating tensor"):
        save(whole_state(), Writer(tmp_path, tables=["nobody"]))


# Versions


def test_steps_and_versions_are_named_by_the_checkpoint_id(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step in ("600", "700"):
        save({"x": int(step)}, writer, checkpoint_id=step)
    assert save({"x": 701}, writer).step == 701
    first = cnr_store.versions(tmp_path)[0]
    for version in ("600", first.id):
        reader, state = Reader(tmp_path), {"x": 0}
        load_checkpoint(state, checkpoint_id=version, storage_reader=reader)
        assert state == {"x": 600}
        assert reader.version == first
    with pytest.raises(OptionError, match="give the step in digits"):
        save({"x": 1}, writer, checkpoint_id="folder/600")


def test_a_load_without_an_id_is_of_the_readers_own_version(tmp_path: Path) -> None:
    for step in ("100", "200"):
        save({"x": int(step)}, Writer(tmp_path), checkpoint_id=step)
    reader = Reader(tmp_path)
    for chosen, expected in (("100", 100), (None, 200), ("100", 100), (None, 200)):
        state = {"x": 0}
        load_checkpoint(state, checkpoint_id=chosen, storage_reader=reader)
        assert state == {"x": expected}


def test_a_job_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"x": 1}, Writer(tmp_path), checkpoint_id="10")
    reader, state = Reader(tmp_path), {"x": 0}
    load_checkpoint(state, storage_reader=reader)
    writer = Writer(tmp_path, previous=reader.version)
    found = save({"x": 2}, writer)
    assert (found.step, found.previous) == (11, reader.version.id)
    assert "begins anew" not in caplog.text
    writer.close()


def test_a_writer_superseded_by_another(tmp_path: Path) -> None:
    first, second = Writer(tmp_path), Writer(tmp_path)
    save({"x": 1}, first)
    save({"x": 2}, second)
    with pytest.raises(CheckpointException, match="SupersededError"):
        save({"x": 3}, first)
    assert load({"x": 0}, tmp_path) == {"x": 2}


def test_before_the_first_save_and_load(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing was saved"):
        _ = Writer(tmp_path).version
    with pytest.raises(OptionError, match="nothing was loaded"):
        _ = Reader(tmp_path).version
    with pytest.raises(CheckpointException, match="metadata"):
        load({"x": 0}, tmp_path)


def test_saves_do_not_overlap(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            reached.set()
            assert go_on.wait(60)
            return super().resolve_data(write_item)

    writer = Writer(tmp_path)
    thread = threading.Thread(
        target=save,
        args=({"x": torch.ones(2)}, writer),
        kwargs={"planner": Waiting(), "no_dist": True, "checkpoint_id": "100"},
    )
    thread.start()
    assert reached.wait(60)
    with pytest.raises(CheckpointException, match="another save of this writer is under way"):
        save({"x": torch.ones(2)}, writer, checkpoint_id="200")
    go_on.set()
    thread.join()
    assert [version.step for version in cnr_store.versions(tmp_path)] == [100]


def test_the_step_of_a_save_that_dcp_could_not_plan_is_of_no_other_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    save({"x": 1}, writer, checkpoint_id="1")
    with pytest.raises(CheckpointException, match="duplicate"):
        save({"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, writer, checkpoint_id="500")
    assert save({"x": 2}, writer).step == 2


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="rename its key"):
        save({"": torch.ones(3)}, Writer(tmp_path))


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    failing = True

    def fault(operation: str, key: str, index: int) -> Any:
        return "before" if failing and "/c/" in key else None

    writer = Writer(FaultyBackend(open_backend(tmp_path), fault))
    with pytest.raises(CheckpointException, match="SaveError"):
        save(whole_state(), writer)
    assert cnr_store.versions(tmp_path) == []
    failing = False
    save(whole_state(), writer)
    same(load(zeroed(whole_state()), tmp_path), whole_state())


# What is refused


@pytest.mark.parametrize(
    "value",
    [Tripwire(), {1, 2}, object, np.array(["text"]), lambda: 1, [Tripwire()], {"a": {"b": Tripwire()}}],
)
def test_values_that_json_does_not_hold(tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException, match=r"state.*own.*can't be stored"):
        save({"x": torch.ones(2), "own": value}, Writer(tmp_path / "store"))
    assert cnr_store.versions(tmp_path / "store") == []
    assert not (tmp_path / "tripped").exists()


def test_the_deepest_value_that_is_stored_is_sound(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(197):
        deep = [deep]
    state = {"$deep": deep, "x": torch.arange(5000)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, Writer(tmp_path), planner=planner)
    same(load({"$deep": [], "x": torch.zeros(5000, dtype=torch.int64)}, tmp_path), state)
    assert cnr_store.verify(tmp_path, deep=True).ok
    with pytest.raises(CheckpointException, match="nested deeper than 200 levels"):
        save({"$deep": [deep]}, Writer(tmp_path), planner=planner)


def test_a_planner_that_gives_no_values(tmp_path: Path) -> None:
    class Other(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    with pytest.raises(CheckpointException, match="x is no tensor, and Other has no lookup_object"):
        save({"x": 1}, Writer(tmp_path), planner=Other())


def test_a_writer_does_not_go_to_another_process(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"AsyncCheckpointerType\.THREAD"):
        Writer(tmp_path).__reduce__()


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc.pop("values"),
        lambda doc: doc.update(tensors=3),
        lambda doc: doc["tensors"][0].pop(),
        lambda doc: doc["tensors"][0].__setitem__(1, "tables/nobody/weight"),
        lambda doc: doc["tensors"][0].__setitem__(1, "../../x"),
        lambda doc: doc["tensors"][0].__setitem__(2, [3, 5]),
        lambda doc: doc["tensors"][0].__setitem__(2, [1 << 60]),
        lambda doc: doc["tensors"][0].__setitem__(3, "save"),
        lambda doc: doc["paths"][0].__setitem__(1, [[1]]),
        lambda doc: doc["values"]["$dict"][0].__setitem__(0, 5),
        lambda doc: doc["values"]["$dict"][0].__setitem__(1, {"$pickle": "gA=="}),
    ],
)
def test_a_forged_description_is_refused(tmp_path: Path, change: Callable[[Any], object]) -> None:
    save({"x": torch.ones(2), "y": 1}, Writer(tmp_path / "store"))
    forgery = Forgery(tmp_path / "store", tmp_path / "forged")
    change(forgery.state["dcp"])
    forgery.sign()
    with pytest.raises(CheckpointException, match=r"is malformed: |unknown tag \$pickle|element type"):
        load({"x": torch.zeros(2), "y": 0}, tmp_path / "forged")


# Versions of a Checkpointer


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.Embedding(3000, 16, sparse=True)
        self.items = nn.Embedding(3000, 16, sparse=True)
        self.lin = nn.Linear(16, 1)
        self.again = self.lin

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.lin(self.users(ids) * self.items(ids)).sum()
        return loss


def test_what_a_checkpointer_saved_is_loaded_with_its_deltas(tmp_path: Path) -> None:
    model = Model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", bits=32) as checkpointer:
        for step in range(3):
            checkpointer.save(step).result()
            model(torch.tensor([step, step + 50])).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.save(3).result()
    assert [info.kind for info in cnr_store.versions(tmp_path)] == ["baseline", "delta", "delta", "delta"]
    found = Model(1).state_dict()
    load_checkpoint(found, storage_reader=Reader(tmp_path))
    same(dict(found), dict(model.state_dict()))


def test_a_checkpointer_loads_what_dcp_saved(tmp_path: Path) -> None:
    saved, model = Model(0), Model(1)
    save(saved.state_dict(), Writer(tmp_path))
    cnr_store.load(tmp_path, model, strict="ignore")  # DCP knows no ties: `again` is stored, too
    same(dict(model.state_dict()), dict(saved.state_dict()))
    save({"model": saved.state_dict()}, Writer(tmp_path))
    assert set(cnr_store.state_dict(tmp_path)) >= {"model.users.weight", "model.lin.bias"}


# Import


def test_a_checkpoint_in_files_is_imported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(whole_state(), checkpoint_id=tmp_path / "files")
    info = import_checkpoint(tmp_path / "files", tmp_path / "store", 40)
    assert info.step == 40
    same(load(zeroed(whole_state()), tmp_path / "store"), whole_state())
    again = import_checkpoint(tmp_path / "files", tmp_path / "store", 41, tables=["model.users"], bits=8)
    assert again.bytes < info.bytes
    exact: dict[str, Any] = {
        "tables": ["model.users"],
        "codec": "cnr_rows",
        "workers": 2,
    }
    assert import_checkpoint(tmp_path / "files", tmp_path / "store", 42, **exact).step == 42
    same(load(zeroed(whole_state()), tmp_path / "store"), whole_state())
    assert "begins anew" not in caplog.text
    # Nobody's turn is left open.
    save({"x": 1}, Writer(tmp_path / "store"))


def test_an_import_keeps_the_nesting(tmp_path: Path) -> None:
    save_checkpoint(whole_state(), checkpoint_id=tmp_path / "files")
    import_checkpoint(tmp_path / "files", tmp_path / "store")
    metadata = Reader(tmp_path / "store").read_metadata()
    wanted = FileSystemReader(tmp_path / "files").read_metadata()
    assert metadata.planner_data == wanted.planner_data
    assert metadata.state_dict_metadata.keys() == wanted.state_dict_metadata.keys()


def test_an_import_of_what_json_does_not_hold(tmp_path: Path) -> None:
    save_checkpoint({"own": {1, 2}}, checkpoint_id=tmp_path / "files")
    with pytest.raises(CheckpointException, match="own"):
        import_checkpoint(tmp_path / "files", tmp_path / "store")
    assert cnr_store.versions(tmp_path / "store") == []


def test_an_import_beside_a_live_job(tmp_path: Path) -> None:
    save_checkpoint({"x": 1}, checkpoint_id=tmp_path / "files")
    save({"x": 2}, Writer(tmp_path / "store"))
    with pytest.raises(cnr_store.SupersededError, match="has not closed its claim"):
        import_checkpoint(tmp_path / "files", tmp_path / "store")
