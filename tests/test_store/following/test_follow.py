"""What `follow` yields: which versions, which rows, in which blocks, at which cost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import (
    Checkpointer,
    CorruptionError,
    FormatError,
    ModelMismatchError,
    OptionError,
    Update,
    VersionInfo,
    VersionNotFoundError,
)
from cnr_store.catalog.catalog import Url
from cnr_store.following.follow import Since
from cnr_store.reading import changed_rows
from tests.test_store.support.follower import Follower
from tests.test_store.support.retention_helpers import delete_version

ROWS, DIM = 4000, 8


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, DIM, sparse=True, dtype=dtype)
        self.items = nn.Embedding(300, DIM, sparse=True, dtype=dtype)
        self.top = nn.Linear(DIM, 1).to(dtype)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.users(users) + self.items(users % 300))
        return out.float().sum()


class Run:
    """A job that trains on chosen users, with lossless rows unless told otherwise."""

    def __init__(self, place: Path, policy: str = "intermittent", bits: int = 32, **model: Any) -> None:
        self.place = place
        torch.manual_seed(0)
        self.model = Model(**model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.checkpointer = Checkpointer(place, self.model, self.optimizer, policy=policy, bits=bits)
        self.step = 0

    def save(self, *users: int, full: bool = False) -> VersionInfo:
        if users:
            self.optimizer.zero_grad()
            self.model(torch.tensor(users)).backward()
            self.optimizer.step()
        self.step += 1
        return self.checkpointer.save(self.step, full=full).result()


def rows_of(update: Update, name: str = "users.weight") -> list[int]:
    found = [block.rows for block in update.blocks() if block.name == name]
    return [int(row) for rows in found if rows is not None for row in rows]


def only(url: Url, since: Since) -> Update:
    (update,) = cnr_store.follow(url, since)
    return update


# Which versions


def test_every_committed_version_comes_oldest_first(tmp_path: Path) -> None:
    run = Run(tmp_path)
    infos = [run.save(step) for step in range(4)]
    assert [update.version for update in cnr_store.follow(tmp_path)] == infos
    assert [update.version for update in cnr_store.follow(tmp_path, infos[1])] == infos[2:]
    assert [update.version for update in cnr_store.follow(tmp_path, infos[1].id)] == infos[2:]
    assert [update.version for update in cnr_store.follow(tmp_path, infos[1].step)] == infos[2:]
    assert list(cnr_store.follow(tmp_path, infos[-1])) == []
    assert list(cnr_store.follow(tmp_path, "latest")) == []


def test_versions_committed_meanwhile_come_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    infos = [run.save(1)]
    updates = cnr_store.follow(tmp_path)
    assert next(updates).version == infos[0]
    infos.append(run.save(2))
    assert next(updates).version == infos[1]
    assert next(updates, None) is None


def test_nothing_comes_from_an_empty_place(tmp_path: Path) -> None:
    assert list(cnr_store.follow(tmp_path)) == []


@pytest.mark.parametrize("since", ["yesterday", 77, "000009-0123abcd"])
def test_a_version_that_never_was_is_refused_at_once(tmp_path: Path, since: str | int) -> None:
    Run(tmp_path).save(1)
    with pytest.raises(VersionNotFoundError):
        cnr_store.follow(tmp_path, since)


def test_an_empty_since_and_another_place_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="None if there is none"):
        cnr_store.follow(tmp_path, [])
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(FormatError):
        cnr_store.follow(tmp_path)


# Which rows


def test_a_delta_yields_the_rows_it_and_the_one_before_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path)
    whole, first, second = run.save(), run.save(5, 9), run.save(7)
    assert sorted(rows_of(only_after(tmp_path, whole, first))) == [5, 9]
    # It leans on the baseline, and so holds the rows of the one before again.
    assert sorted(rows_of(only_after(tmp_path, first, second))) == [5, 7, 9]


def only_after(url: Path, since: VersionInfo, version: VersionInfo) -> Update:
    return next(update for update in cnr_store.follow(url, since) if update.version == version)


def test_consecutive_deltas_yield_what_each_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path, policy="consecutive")
    infos = [run.save(), run.save(5, 9), run.save(7), run.save(9, 3999)]
    follower = Follower(open_backend(tmp_path))
    assert [update.version for update in follower.catch_up()] == infos
    assert rows_of(only(tmp_path, infos[2])) == [9, 3999]
    # Over versions that are left out, whatever any of them wrote.
    *_, last = cnr_store.follow(tmp_path, infos[0])
    assert rows_of(last) == [5, 7, 9, 3999]


def test_going_back_yields_the_rows_of_abandoned_versions(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    kept, _, abandoned = run.save(5), run.save(20, 21), run.save(30)
    run.checkpointer.load(kept)
    again = run.save(40)
    update = only(tmp_path, abandoned)
    assert update.version == again
    assert sorted(rows_of(update)) == [5, 20, 21, 30, 40]
    expected = cnr_store.state_dict(tmp_path, again)["users.weight"]
    before = cnr_store.state_dict(tmp_path, abandoned)["users.weight"]
    for name, rows, values in update.blocks():
        if name == "users.weight":
            before[rows] = values
    assert np.array_equal(before, expected)


def test_a_new_baseline_yields_everything_since_rows_are_quantized_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, bits=4)
    delta = (run.save(), run.save(5))[1]
    baseline = run.save(6, full=True)
    update = only(tmp_path, delta)
    assert update.version == baseline
    assert update.whole == {"users.weight", "items.weight", "top.weight", "top.bias"}
    assert sorted(rows_of(update)) == list(range(ROWS))


def test_what_is_not_known_of_a_follower_makes_everything_come(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, second, third = run.save(), run.save(5), run.save(6)
    assert next(cnr_store.follow(tmp_path)).whole == next(cnr_store.follow(tmp_path)).arrays.keys()
    delete_version(open_backend(tmp_path), second.id)
    assert rows_of(only(tmp_path, second)) == list(range(ROWS))
    assert rows_of(only(tmp_path, [first, second])) == list(range(ROWS))
    assert rows_of(only(tmp_path, first)) == [5, 6]
    assert only(tmp_path, first).version == third


def test_an_update_left_out_or_cut_off_is_made_up_for(tmp_path: Path) -> None:
    run = Run(tmp_path, policy="consecutive")
    held = run.save()
    for user in (5, 6, 7):
        run.save(user)
    updates = cnr_store.follow(tmp_path, held)
    next(updates)
    next(iter(next(updates).blocks()))
    assert sorted(rows_of(next(updates))) == [5, 6, 7]


def test_collected_updates_bring_no_more_than_those_taken_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, policy="consecutive")
    held = run.save()
    for user in (5, 6, 7):
        run.save(user)
    updates = list(cnr_store.follow(tmp_path, held))
    assert [rows_of(update) for update in updates] == [[5], [6], [7]]
    assert [rows_of(update) for update in updates] == [[5], [6], [7]]


def test_a_table_that_grows_appears_or_goes_is_said_to(tmp_path: Path) -> None:
    class Other(Model):
        def __init__(self) -> None:
            super().__init__(rows=ROWS + 1)
            self.tags = nn.Embedding(50, 2)
            del self.items

    run = Run(tmp_path)
    run.save()
    held = run.save(5)
    other = cnr_store.save(tmp_path, Other())
    update = only(tmp_path, held)
    assert update.version == other
    assert update.removed == {"items.weight"}
    assert update.arrays["users.weight"].shape == (ROWS + 1, DIM)
    assert {"users.weight", "tags.weight"} <= update.whole
    follower = Follower(open_backend(tmp_path))
    follower.catch_up()


def test_a_type_that_changes_makes_a_table_whole(tmp_path: Path) -> None:
    held = Run(tmp_path).save()
    Run(tmp_path, dtype=torch.bfloat16).save()
    update = only(tmp_path, held)
    info = update.arrays["users.weight"]
    assert (info.element, info.dtype) == ("bfloat16", np.dtype(np.float32))
    assert "users.weight" in update.whole
    assert update.arrays["top.weight"].element == "bfloat16"
    assert update.arrays["top.weight"].dtype == np.uint16


def test_tied_tables_come_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(50, 2)
            self.b = nn.Embedding(50, 2)
            self.b.weight = self.a.weight

    cnr_store.save(tmp_path, Tied())
    (update,) = cnr_store.follow(tmp_path)
    assert update.arrays["a.weight"].aliases == ("b.weight",)
    assert [block.name for block in update.blocks()] == ["a.weight"]
    assert cnr_store.state_dict(tmp_path).keys() == {"a.weight", "b.weight"}


# Blocks and bytes


def test_blocks_are_bounded_and_each_row_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "BLOCK_BYTES", 1000)
    run = Run(tmp_path)
    held = run.save()
    run.save(*range(0, ROWS, 3))
    for update in (only(tmp_path, held), next(cnr_store.follow(tmp_path))):
        blocks = [block for block in update.blocks() if block.name == "users.weight"]
        assert all(block.values.nbytes <= 1000 for block in blocks)
        rows = np.concatenate([block.rows for block in blocks])
        assert (np.diff(rows) > 0).all()
        assert len(blocks) > len(rows) * DIM * 4 // 1000


class Counting(FaultyBackend):
    """Counts the bytes read."""

    def __init__(self, place: Path) -> None:
        super().__init__(open_backend(place), lambda *_: None)
        self.nbytes = 0

    def _get(self, key: str) -> bytes:
        return self._counted(super()._get(key))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._counted(super()._get_range(key, start, length))

    def _get_suffix(self, key: str, length: int) -> bytes:
        return self._counted(super()._get_suffix(key, length))

    def _counted(self, data: bytes) -> bytes:
        with self._lock:
            self.nbytes += len(data)
        return data


def test_bytes_read_follow_the_delta_and_not_the_table(tmp_path: Path) -> None:
    read = {}
    for rows in (20_000, 320_000):
        run = Run(tmp_path / str(rows), rows=rows, bits=8)
        held = run.save()
        run.save(*range(0, 20_000, 100))
        counting = Counting(tmp_path / str(rows))
        assert rows_of(only(counting, held)) == list(range(0, 20_000, 100))
        read[rows] = counting.nbytes
    assert read[320_000] < read[20_000] * 1.5
    assert read[320_000] < 320_000 * DIM / 20


RELATIVE: Any = {"id": "cnr_lattice", "rms_step": 0.2, "relative": True}


def train_relative(model: Model, checkpointer: Checkpointer, random: np.random.Generator) -> VersionInfo:
    """Move one user of a hundred a little."""
    rows = np.flatnonzero(random.random(len(model.users.weight)) < 0.01)
    with torch.no_grad():
        model.users.weight[rows] += 0.1 * torch.randn(len(rows), DIM)
    checkpointer.touch("users", rows)
    return checkpointer.save(1).result()


@pytest.mark.parametrize("new_call", [False, True], ids=["one iterator", "a call for each version"])
def test_codes_seen_before_are_not_read_again(tmp_path: Path, new_call: bool) -> None:
    """Rows relative to eight versions cost the bytes of the newest one."""
    model, random, counting = Model(rows=60_000), np.random.default_rng(0), Counting(tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", codec={"users": RELATIVE}) as saving:
        saving.save(0).result()
        updates = cnr_store.follow(counting)
        update = next(updates)
        found = {block.name: block.values.copy() for block in update.blocks()}
        shares = []
        for _ in range(8):
            info, before = train_relative(model, saving, random), counting.nbytes
            update = next(cnr_store.follow(counting, update) if new_call else updates)
            for name, rows, values in update.blocks():
                if rows is not None:
                    found[name][rows] = values
            shares.append((counting.nbytes - before) / info.bytes)
            assert found["users.weight"].tobytes() == cnr_store.state_dict(tmp_path)["users.weight"].tobytes()
    assert max(shares) < 1.2


def test_codes_that_are_not_right_are_read_again(tmp_path: Path) -> None:
    model, random = Model(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path, model, optimizer, policy="consecutive", codec={"users": RELATIVE}) as saving:
        saving.save(0).result()
        updates = cnr_store.follow(tmp_path)
        list(next(updates).blocks())
        for _ in range(2):
            train_relative(model, saving, random)
            update = next(updates)
            update._seen._tables["tables/users/weight"]._codes[::3, 1] += 1
            expected = cnr_store.state_dict(tmp_path)["users.weight"]
            for name, rows, values in update.blocks():
                if name == "users.weight":
                    np.testing.assert_array_equal(values, expected[rows])


# Deleted while it is read, or damaged


def test_a_version_deleted_before_it_is_taken_says_so_and_the_next_makes_up_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held, gone, last = run.save(), run.save(5), run.save(6)
    updates = cnr_store.follow(tmp_path, held)
    update = next(updates)
    delete_version(open_backend(tmp_path), gone.id)
    with pytest.raises(VersionNotFoundError, match=rf"{gone.id}.*was deleted.*go on with"):
        list(update.blocks())
    with pytest.raises(VersionNotFoundError, match="was deleted"):
        update.apply(Model())
    following = next(updates)
    assert following.version == last
    assert rows_of(following) == list(range(ROWS))


def test_a_version_deleted_before_it_comes_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held, gone, last = run.save(), run.save(5), run.save(6)
    updates = cnr_store.follow(tmp_path, held)
    delete_version(open_backend(tmp_path), gone.id)
    assert [update.version for update in updates] == [last]


def test_what_was_held_may_be_deleted_while_the_next_is_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held = (run.save(), run.save(5))[1]
    run.save(6)
    update = only(tmp_path, held)
    assert update.whole == {"top.weight", "top.bias"}
    delete_version(open_backend(tmp_path), held.id)
    assert rows_of(update) == list(range(ROWS))


def test_damage_is_an_error_and_never_a_value(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held, damaged = run.save(), run.save(5)
    (shard,) = (tmp_path / "versions" / damaged.id / "tables/users/weight/c").rglob("0/0")
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match=damaged.id):
        list(only(tmp_path, held).blocks())


# Models


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 32])
def test_a_model_that_applies_updates_equals_one_that_loads(
    tmp_path: Path, dtype: torch.dtype, bits: int
) -> None:
    run = Run(tmp_path, bits=bits, dtype=dtype)
    with torch.no_grad():
        run.model.users.weight[17, 0] = torch.nan
    for users in ([], [5, 9, 3000], [7], range(100, 300)):
        run.save(*users)
    served = Model(dtype=dtype)
    for update in cnr_store.follow(tmp_path):
        before = served.users.weight._version
        update.apply(served)
        assert served.users.weight._version > before
        loaded = Model(dtype=dtype)
        cnr_store.load(tmp_path, loaded, version=update.version)
        for name, values in loaded.state_dict().items():
            assert _bytes(served.state_dict()[name]) == _bytes(values), name


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_extra_state_is_applied(tmp_path: Path) -> None:
    class WithExtra(Model):
        vocabulary: object = "old"

        def get_extra_state(self) -> object:
            return {"words": self.vocabulary}

        def set_extra_state(self, state: dict[str, object]) -> None:
            self.vocabulary = state["words"]

    model = WithExtra()
    model.vocabulary = np.arange(5000)  # beside the state
    cnr_store.save(tmp_path, model, torch.optim.Adam(model.top.parameters()))
    served = WithExtra()
    only(tmp_path, None).apply(served)
    assert np.array_equal(served.vocabulary, model.vocabulary)  # type: ignore[arg-type]
    with pytest.raises(ModelMismatchError, match="extra state"):
        Run(tmp_path / "other").save()
        only(tmp_path / "other", None).apply(WithExtra())


@pytest.mark.parametrize("other", [Model(rows=ROWS + 1), Model(dtype=torch.float16), nn.Linear(2, 2)])
def test_a_model_that_does_not_fit_is_not_touched(tmp_path: Path, other: nn.Module) -> None:
    Run(tmp_path).save()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ModelMismatchError):
        only(tmp_path, None).apply(other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_following_needs_no_torch_and_applying_says_that_it_does(tmp_path: Path) -> None:
    Run(tmp_path).save(5)
    program = f"""
import sys
sys.modules["torch"] = None
import cnr_store
(update,) = cnr_store.follow({str(tmp_path)!r})
assert {{block.name for block in update.blocks()}} == update.arrays.keys()
try:
    update.apply(None)
except ImportError as error:
    assert "cnr-store[torch]" in str(error), error
else:
    raise SystemExit("applied without torch")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Named(nn.Module):
    """Tables whose parameters are not called ``weight`` of something with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 4))
        self.tied = nn.Embedding(50, 4)
        self.tied.weight = self.table
        self.weight = nn.Embedding(60, 4)


def test_an_update_is_applied_whatever_the_parameters_are_called(tmp_path: Path) -> None:
    trained, served = Named(), Named()
    cnr_store.save(tmp_path, trained, step=1, bits=32)
    for update in cnr_store.follow(tmp_path):
        update.apply(served)
    for name, values in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], values), name


@pytest.mark.parametrize("put_back", [True, False])
@pytest.mark.parametrize("new_call", [True, False])
def test_a_store_that_went_back_brings_everything(tmp_path: Path, put_back: bool, new_call: bool) -> None:
    place, copy = tmp_path / "store", tmp_path / "copy"
    run = Run(place)
    run.save(1)
    run.checkpointer.close()
    shutil.copytree(place, copy)
    later = Run(place)
    later.checkpointer.load()
    later.save(2)
    later.checkpointer.close()
    *_, held = cnr_store.follow(place)
    shutil.rmtree(place)
    since = held.version.id if new_call else held
    assert list(cnr_store.follow(place, since)) == []
    if put_back:
        copy.rename(place)
    else:
        remade = Run(place)
        remade.save(3)
        remade.checkpointer.close()
    (update,) = cnr_store.follow(place, since)
    assert update.whole == update.arrays.keys()
    assert update.version == cnr_store.versions(place)[-1]
    assert list(cnr_store.follow(place, update)) == []
