"""What must hold on every rank of a model that TorchRec shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cnr_store.errors import UnsupportedModelError
from cnr_store.training.distributed import torchrec
from cnr_store.training.distributed.pieces import LocalPiece, local_pieces
from cnr_store.training.distributed.sharded import ShardedTable, bare_lookups
from cnr_store.training.distributed.torchrec import LookupHooks, find_sharded
from cnr_store.training.model.names import named_modules
from tests.nightly import NIGHT
from tests.test_store.support.distributed.sharded_model import (
    BAGS,
    DIM,
    FEATURES,
    FEW,
    ROWS,
    SEQUENCES,
    EmbeddingComputeKernel,
    KeyedJaggedTensor,
    TrainPipelineSparseDist,
    batch,
    sharded_model,
)

STEPS = 20 if NIGHT else 8


class Marked:
    """Which rows of each local shard were marked."""

    def __init__(self, model: Any) -> None:
        self.hooks: list[LookupHooks] = []
        self.sharded = find_sharded(named_modules(model))
        self.rows: dict[tuple[str, int], set[int]] = {}
        for each in self.sharded:
            self.hooks.append(LookupHooks(each, self._mark))

    def _mark(self, table: str, first_row: int, rows: torch.Tensor) -> None:
        self.rows.setdefault((table, first_row), set()).update(rows.tolist())

    def check(self) -> list[str | None]:
        return [each.check() for each in self.hooks]

    def remove(self) -> None:
        for each in self.hooks:
            each.remove()


def _tables(model: Any) -> dict[str, ShardedTable]:
    return {
        table.name.split(".")[-2]: table
        for each in find_sharded(named_modules(model))
        for table in each.tables
    }


def _live(table: ShardedTable) -> list[LocalPiece]:
    return [*table.pieces, *(piece for slot in table.slots.values() for piece in slot.pieces)]


def _copies(model: Any) -> dict[str, list[torch.Tensor]]:
    return {
        name: [piece.tensor.clone() for piece in _live(table)]
        for name, table in _tables(model).items()
        if not table.replicated
    }


def _changed(model: Any, before: dict[str, list[torch.Tensor]]) -> dict[tuple[str, int], set[int]]:
    """Rows of each local shard of which weights or state changed."""
    found: dict[tuple[str, int], set[int]] = {}
    for name, table in _tables(model).items():
        for piece, old in zip(_live(table), before.get(name, []), strict=name in before):
            new = piece.tensor.reshape(len(old), -1)
            rows = (new != old.reshape(len(old), -1)).any(1).nonzero().flatten().tolist()
            found.setdefault((table.name, piece.first_row), set()).update(rows)
    return found


def _step(model: Any, seed: int, **options: Any) -> None:
    loss, _ = model(batch(seed * 1000 + dist.get_rank(), **options))
    loss.backward()
    model.fused_optimizer.zero_grad()


def pieces_tile(optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> None:
    """The pieces of all ranks tile each table; they and state are those that TorchRec names, live."""
    world = dist.get_world_size()
    model = sharded_model(world, optimizer, without="")
    stored = model.state_dict()
    fused = model.fused_optimizer.state_dict()["state"]
    tables = _tables(model)
    assert tables.keys() == {*BAGS, *SEQUENCES}
    for name, table in tables.items():
        assert table.shape == (FEW.get(name, ROWS), DIM)
        covered = torch.zeros(table.shape, dtype=torch.int64)
        for piece in table.pieces:
            rows, columns = piece.tensor.shape
            covered[piece.first_row :, piece.first_column :][:rows, :columns] += 1
        dist.all_reduce(covered)
        assert (covered == (world if table.replicated else 1)).all()
        same = local_pieces(stored[table.name], table.name)
        assert [_place(each) for each in same] == [_place(each) for each in table.pieces]
        state = fused.get(table.name, {})  # has no entry without a shard
        assert not state or {f"{name}.{slot}" for slot in table.slots} == state.keys()
        for slot, value in table.slots.items():
            if f"{name}.{slot}" in state:
                theirs = local_pieces(state[f"{name}.{slot}"], name)
                assert [_place(p)[2] for p in theirs] == [_place(p)[2] for p in value.pieces]
            _check_slot(optimizer, table, value)


def _place(piece: LocalPiece) -> tuple[int, int, int]:
    return piece.first_row, piece.first_column, piece.tensor.data_ptr()


def _check_slot(optimizer: str, table: ShardedTable, slot: Any) -> None:
    """A slot's pieces lie where those of the weight do, or one column for each column shard."""
    held = torch.zeros(DIM, dtype=torch.int64)
    held[[piece.first_column for piece in table.pieces]] = 1
    dist.all_reduce(held)
    starts = torch.nonzero(held).flatten().tolist()
    if optimizer == "EXACT_ADAGRAD":
        assert (slot.shape, slot.boundaries) == (table.shape, ())
    elif len(starts) > 1:
        assert (slot.shape, slot.boundaries) == ((table.shape[0], len(starts)), tuple(starts))
    else:
        assert (slot.shape, slot.boundaries) == (table.shape[:1], ())
    for piece, weight in zip(slot.pieces, table.pieces, strict=True):
        assert piece.first_row == weight.first_row
        assert len(piece.tensor) == len(weight.tensor)
        expected = starts.index(weight.first_column) if slot.boundaries else weight.first_column
        assert piece.first_column == (expected if piece.tensor.ndim == 2 else 0)


def pieces_are_live() -> None:
    """What is written to pieces is what lookups return."""
    model = sharded_model(dist.get_world_size(), without="")
    for table in _tables(model).values():
        for piece in table.pieces:
            columns = torch.arange(piece.tensor.shape[1]) + piece.first_column
            rows = torch.arange(len(piece.tensor)) + piece.first_row
            piece.tensor.copy_(rows.unsqueeze(1) * 10 + columns)
    for each in find_sharded(named_modules(model)):
        for lookup in bare_lookups(each.module):
            lookup.purge()
            lookup.flush()
    ids = batch(5 + dist.get_rank())
    with torch.no_grad():
        bags = model.module.bags(ids)
        sequences = model.module.sequences(ids)
    for feature in "abcdefki":
        found = ids[feature]
        for example, some in enumerate(found.to_dense()):
            rows = (some.unsqueeze(1) * 10 + torch.arange(DIM)).float()
            if feature in bags.keys():  # noqa: SIM118 - it is no mapping
                assert torch.equal(bags[feature][example], rows.sum(0))
            elif feature in SEQUENCES.values():
                assert torch.equal(sequences[feature].to_dense()[example], rows)


def steps_change_marked_rows_only(optimizer: str = "EXACT_ROWWISE_ADAGRAD", weighted: bool = False) -> None:
    """Of every shard, the rows that steps change are those that were marked."""
    model = sharded_model(dist.get_world_size(), optimizer, weighted)
    marked, before = Marked(model), _copies(model)
    for seed in range(STEPS):
        _step(model, seed, weighted=weighted, most=1)
    changed = _changed(model, before)
    missed = {key: rows - marked.rows.get(key, set()) for key, rows in changed.items()}
    assert not any(missed.values()), missed
    assert all(table.moves_untouched_rows() is None for table in _tables(model).values() if table.optimizer)
    spare = sum(len(rows - changed[key]) for key, rows in marked.rows.items() if key in changed)
    total = sum(map(len, changed.values()))
    assert total > 100 / dist.get_world_size()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} {optimizer}: {total} changed, {spare} spare")
    assert spare == 0
    assert any(table.endswith("D.weight") for table, _ in marked.rows)
    assert marked.check() == [None, None]


def no_grad_lookups_mark_nothing() -> None:
    model = sharded_model(dist.get_world_size())
    marked = Marked(model)
    with torch.no_grad():
        model(batch(1))
    assert marked.rows == {}
    empty = batch(1, most=0)
    loss, _ = model(empty)
    loss.backward()
    assert marked.rows == {}


def a_user_may_track_too() -> None:
    """The place that TorchRec has for a tracker stays the user's, who may fill it before us and after."""
    model = sharded_model(dist.get_world_size())
    seen: list[str] = []
    bags = model.module.bags
    bags.register_post_lookup_tracker_fn(lambda *_: seen.append("before"))
    marked = Marked(model)
    _step(model, 0)
    assert set(seen) == {"before"}
    assert marked.rows
    marked.rows.clear()
    bags.post_lookup_tracker_fn = None
    bags.register_post_lookup_tracker_fn(lambda *_: seen.append("after"))
    _step(model, 1)
    assert "after" in seen
    assert marked.rows
    assert marked.check() == [None, None]
    marked.remove()
    marked.rows.clear()
    _step(model, 2)
    assert marked.rows == {}


def a_save_between_lookup_and_update_misses_nothing() -> None:
    model = sharded_model(dist.get_world_size())
    marked, before = Marked(model), _copies(model)
    loss, _ = model(batch(dist.get_rank()))
    marked.check()
    marked.rows.clear()
    loss.backward()
    changed = _changed(model, before)
    assert any(changed.values())
    assert all(rows <= marked.rows.get(key, set()) for key, rows in changed.items())


def other_changes_are_told() -> None:
    model = sharded_model(dist.get_world_size())
    marked = Marked(model)
    model.load_state_dict(model.state_dict())
    assert marked.check() == ["a state dict was loaded into it"] * 2
    assert marked.check() == [None, None]
    for lookup in model.module.bags._lookups:
        lookup._forward_hooks.clear()
    reason, none = marked.check()
    assert reason is not None
    assert "lookups were replaced" in reason
    assert none is None
    _step(model, 0)
    assert any("bags" in table for table, _ in marked.rows)
    assert marked.check() == [None, None]


def settings_are_used() -> None:
    """A learning rate that was assigned is the one that the next step uses."""
    model = sharded_model(dist.get_world_size(), "EXACT_SGD")
    for table in _tables(model).values():
        has_shard = table.pieces and table.optimizer
        assert {name: round(x, 6) for name, x in table.settings().items()} == (
            {"lr": 0.1} if has_shard else {}
        )
    for table in _tables(model).values():
        table.assign_settings({"lr": 0.0})
    before = _copies(model)
    _step(model, 0)
    assert not any(_changed(model, before).values())
    for table in _tables(model).values():
        table.assign_settings({"lr": 0.5})
    _step(model, 0)
    assert any(_changed(model, before).values())
    assert all(t.settings() == {"lr": 0.5} for t in _tables(model).values() if t.pieces and t.optimizer)


def ids_out_of_range_are_marked() -> None:
    """FBGEMM looks up the first row for them."""
    model = sharded_model(dist.get_world_size())
    marked, before = Marked(model), _copies(model)
    ids = batch(0)
    ids.values()[0] = ROWS + 7  # of the feature of table A, which is on one rank
    loss, _ = model(ids)
    loss.backward()
    assert all(rows <= marked.rows.get(key, set()) for key, rows in _changed(model, before).items())


def pipelined_steps_are_marked() -> None:
    """`TrainPipelineSparseDist` calls the lookups in its own way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sharded_model(dist.get_world_size())
        dense = [p for name, p in model.named_parameters() if name.startswith("over")]
        pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(dense, 0.1), torch.device("cpu"))
        marked, before = Marked(model), _copies(model)
        batches = iter([batch(seed * 1000 + dist.get_rank(), most=1) for seed in range(STEPS)])
        for _ in range(STEPS):
            pipeline.progress(batches)
    changed = _changed(model, before)
    assert any(changed.values())
    assert all(rows <= marked.rows.get(key, set()) for key, rows in changed.items())


def variable_batches_are_marked() -> None:
    """Each feature has a number of examples of its own."""
    model = sharded_model(dist.get_world_size(), without="DK")  # TorchRec 1.8 fails on D here
    marked, before = Marked(model), _copies(model)
    loss = sum(each.sum() for each in model.module.bags(_variable_batch()).values().split(DIM, 1))
    loss.backward()
    changed = _changed(model, before)
    assert any(changed.values())
    assert all(rows <= marked.rows.get(key, set()) for key, rows in changed.items())


def _variable_batch() -> Any:
    """One, two or three examples for each feature, which stand for four."""
    strides = [1 + place % 3 for place in range(len(FEATURES))]
    values = torch.arange(sum(strides)) * 3 % ROWS
    inverse = torch.stack([torch.arange(4) % stride for stride in strides])
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=values,
        lengths=torch.ones(sum(strides), dtype=torch.int64),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(list(FEATURES), inverse),
    )


def what_lookups_do_not_tell_is_refused() -> None:
    """Known by names, since these run on GPUs only."""
    model = sharded_model(dist.get_world_size())
    shards = [shard for shard in torchrec._all_shards(model.module.bags) if shard.name == "B"]
    for shard in shards:
        shard.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    assert [name for name, table in _tables(model).items() if table.cached] == ["B"]
    for shard in shards:
        shard.compute_kernel = EmbeddingComputeKernel.SSD_VIRTUAL_TABLE
    with pytest.raises(UnsupportedModelError, match=r"B\.weight' has the compute kernel 'ssd_virtual_table'"):
        find_sharded(named_modules(model))
    bags = model.module.bags
    bags.__class__ = type("ShardedManagedCollisionEmbeddingBagCollection", (type(bags),), {})
    with pytest.raises(UnsupportedModelError, match=r"bags is a ShardedManagedCollision.* more than lookups"):
        find_sharded(named_modules(model))
    model.__class__ = type("DMPCollection", (type(model),), {})
    with pytest.raises(UnsupportedModelError, match="DMPCollection holds replicas"):
        find_sharded(named_modules(model))


def ranks_without_tables_keep_nothing() -> None:
    """A lookup without tables returns the same tensor for ever, which gets no hooks."""
    model = sharded_model(dist.get_world_size())
    marked = Marked(model)
    _step(model, 0)
    for each in marked.sharded:
        for lookup in bare_lookups(each.module):
            assert not lookup._dummy_embs_tensor._backward_hooks


CHECKS: dict[str, Callable[[], None]] = {
    "tile": pieces_tile,
    "tile adagrad": lambda: pieces_tile("EXACT_ADAGRAD"),
    "tile sgd": lambda: pieces_tile("EXACT_SGD"),
    "live": pieces_are_live,
    "steps": steps_change_marked_rows_only,
    "steps adagrad": lambda: steps_change_marked_rows_only("EXACT_ADAGRAD"),
    "steps sgd": lambda: steps_change_marked_rows_only("EXACT_SGD"),
    "steps weighted": lambda: steps_change_marked_rows_only(weighted=True),
    "no grad": no_grad_lookups_mark_nothing,
    "user": a_user_may_track_too,
    "save between": a_save_between_lookup_and_update_misses_nothing,
    "told": other_changes_are_told,
    "settings": settings_are_used,
    "out of range": ids_out_of_range_are_marked,
    "pipeline": pipelined_steps_are_marked,
    "variable": variable_batches_are_marked,
    "refused": what_lookups_do_not_tell_is_refused,
    "nothing kept": ranks_without_tables_keep_nothing,
}
