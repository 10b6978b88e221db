"""What `follow` yields: which versions, and which of their rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_backends import open_backend
from cnr_store import (
    CorruptionError,
    EmptyStoreError,
    FormatError,
    OptionError,
    Update,
    VersionInfo,
    VersionNotFoundError,
)
from tests.test_store.following.followed_runs import DIM, ROWS, Counting, Model, Run, only, rows_of
from tests.test_store.support.follower import Follower
from tests.test_store.support.retention_helpers import delete_version

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


def test_nothing_comes_from_an_empty_place_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ask in (cnr_store.follow, cnr_store.versions, cnr_store.tags, cnr_store.pins):
        caplog.clear()
        assert list(ask(tmp_path)) == []
        assert "holds no store: check the URL" in caplog.text


@pytest.mark.parametrize("remains", [True, False])
def test_a_store_that_is_gone_is_no_store_without_news(tmp_path: Path, remains: bool) -> None:
    run, place = Run(tmp_path / "store"), tmp_path / "store"
    held = run.save(1)
    run.checkpointer.close()
    updates = cnr_store.follow(place)
    assert next(updates).version == held
    shutil.rmtree(place / "versions" if remains else place)
    for again in (updates, cnr_store.follow(place, held), cnr_store.follow(place, held.id)):
        with pytest.raises(EmptyStoreError, match=f"holds no version any more, though {held.id} was there"):
            list(again)


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
    assert update.arrays["a.weight"].is_table
    assert [block.name for block in update.blocks()] == ["a.weight"]
    assert cnr_store.state_dict(tmp_path).keys() == {"a.weight", "b.weight"}


# Of some tables


def test_chosen_tables_come_alone(tmp_path: Path) -> None:
    """And nothing else is read."""
    run = Run(tmp_path, policy="consecutive")
    held, _, _ = run.save(1, 2), run.save(3), run.save(4, 5)
    everything, chosen = Counting(tmp_path), Counting(tmp_path)
    whole, *_, last = (list(update.blocks()) for update in cnr_store.follow(everything))
    (first, *_, newest) = (
        (update, list(update.blocks())) for update in cnr_store.follow(chosen, tables=["items"])
    )
    assert first[0].arrays.keys() == first[0].whole == {"items.weight"}
    assert [block.name for block in first[1]] == ["items.weight"]
    for found, expected in ((first[1], whole), (newest[1], last)):
        (values,) = (block.values for block in found)
        (same,) = (block.values for block in expected if block.name == "items.weight")
        np.testing.assert_array_equal(values, same)
    assert chosen.nbytes < everything.nbytes / 3
    assert [
        rows_of(update, "items.weight") for update in cnr_store.follow(tmp_path, held, tables=["items"])
    ] == [
        [3],
        [4, 5],
    ]
    assert {*cnr_store.state_dict(tmp_path, tables=["items"])} == {"items.weight"}


def test_what_has_some_tables_is_no_whole_update(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    (update,) = cnr_store.follow(tmp_path, tables=["items", "users"])
    with pytest.raises(OptionError, match=r"has tables=\['items', 'users'\] alone"):
        update.apply(run.model)
    run.save(2)
    (newer,) = cnr_store.follow(tmp_path, update, tables=["items"])
    assert rows_of(newer, "items.weight")
    assert not newer.removed
    for tables in (None, ["items", "top"]):
        with pytest.raises(OptionError, match="alone: give no others"):
            cnr_store.follow(tmp_path, update, tables=tables)
    for wrong, why in (
        (["usrs"], "no array 'usrs': there are users"),
        (["top.bias"], "no table"),
        ("items", "a list"),
    ):
        with pytest.raises(OptionError, match=why):
            list(cnr_store.follow(tmp_path, tables=wrong))


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


def test_a_version_deleted_before_it_is_taken_does_not_come_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 5):
        run.save(step)
    updates = cnr_store.follow(tmp_path)
    held = next(updates)
    rows_of(held)
    next(updates)
    last = run.save(6)
    cnr_store.gc(tmp_path, keep_last=1)  # leaves its folder for as long as it may be read
    assert [update.version for update in cnr_store.follow(tmp_path, held)] == [last]


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
    with pytest.raises(EmptyStoreError):
        list(cnr_store.follow(place, since))
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
