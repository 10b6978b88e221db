"""Commands that check, repair, fold and clean up a store."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from tests.test_store.cli.command import cnr
from tests.test_store.support.damaged_store import DAMAGES, SavedStore, shard_of
from tests.test_store.support.retention_helpers import save_many


def test_verify_tells_a_sound_store_from_a_damaged_one(
    capsys: pytest.CaptureFixture[str], own_store: str
) -> None:
    status, out, _ = cnr(capsys, "verify", own_store, "--deep")
    assert (status, out.splitlines()[-1].split(";")[0]) == (0, "2 of 2 versions can be restored")
    assert json.loads(cnr(capsys, "verify", own_store, "1", "--json")[1])["ok"] is True
    shard = next(Path(own_store).glob("versions/*/tables/0/weight/c/0/0"))
    shard.write_bytes(shard.read_bytes()[:-1])
    status, out, _ = cnr(capsys, "verify", own_store)
    assert status == 3
    assert out.startswith("damaged: ")
    assert str(shard.relative_to(own_store)) in out
    assert re.search(r"rows 0 to 999: .*\(it concerns at most 1,000 rows of these; 2 versions can't be", out)
    assert "versions can't be restored, the first is 000001-" in out
    status, out, _ = cnr(capsys, "verify", own_store, "--json")
    doc = json.loads(out)
    assert (status, doc["ok"]) == (3, False)
    assert doc["problems"]


@pytest.mark.slow
def test_verify_names_the_next_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=3)
    url = str(saved.folder)
    assert "next: " not in cnr(capsys, "verify", url)[1]
    claim = next(saved.folder.glob("writers/000001"))
    kept = claim.read_bytes()
    claim.write_bytes(b"{}")
    assert cnr(capsys, "verify", url)[1].splitlines()[-1].startswith("next: put back what is named above")
    claim.write_bytes(kept)
    DAMAGES["lost"](shard_of(saved.folder, saved.ids[-1]))
    last = cnr(capsys, "verify", url)[1].splitlines()[-1]
    assert last.startswith(f"next: `cnr repair {url}` shows what is lost")
    assert "load(salvage=True)" in last
    assert f"`cnr repair {url} 2`" in cnr(capsys, "verify", url, "2")[1].splitlines()[-1]
    assert cnr(capsys, "repair", url, "--yes")[0] == 0
    last = cnr(capsys, "verify", url)[1].splitlines()[-1]
    assert last.startswith("next: nothing, if only the newest version matters")
    assert f"`cnr repair {url} {saved.ids[-1]}` commits" in last


def test_verify_has_a_status_of_its_own_for_what_may_be_lost(
    capsys: pytest.CaptureFixture[str], own_store: str
) -> None:
    newest = cnr_store.versions(own_store)[-1].id
    Path(own_store, "versions", newest, "zarr.json").unlink()
    status, out, _ = cnr(capsys, "verify", own_store)
    assert status == 4
    assert out.startswith("suspicious: ")


@pytest.mark.slow
def test_repair_shows_what_is_lost_and_asks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=2)
    url = str(saved.folder)
    assert cnr(capsys, "repair", url, "--dry-run")[:2] == (0, f"{saved.ids[-1]}: nothing is damaged\n")
    DAMAGES["lost"](shard_of(saved.folder, saved.ids[-1]))
    status, out, _ = cnr(capsys, "repair", url, "--dry-run")
    assert status == 3
    assert out.startswith("damaged: emb: older values for ")
    assert f"from {saved.ids[0]}" in out
    status, _, err = cnr(capsys, "repair", url)
    assert status == 2
    assert "--yes" in err
    assert [info.id for info in cnr_store.versions(url)] == saved.ids
    status, out, _ = cnr(capsys, "repair", url, "--yes", "--json")
    doc = json.loads(out)
    assert (status, doc["outcome"], doc["damaged"]) == (0, "repaired", ["emb"])
    assert list(doc["salvaged"]["emb"]) == saved.ids[:1]
    assert doc["repaired"] == cnr_store.versions(url)[-1].id
    assert cnr(capsys, "repair", url, "--yes")[0] == 0
    assert len(cnr_store.versions(url)) == 3


@pytest.mark.parametrize("answer", ["y", "n"])
def test_repair_on_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=2)
    DAMAGES["lost"](shard_of(saved.folder, saved.ids[-1]))
    keyboard = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", keyboard)
    status, _, err = cnr(capsys, "repair", str(saved.folder))
    assert "Commit a version" in err
    assert (status, len(cnr_store.versions(saved.folder))) == ((0, 3) if answer == "y" else (1, 2))


@pytest.mark.slow
def test_ls_and_info_mark_what_cannot_be_restored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=4)
    url, lost = str(saved.folder), saved.folder / "versions" / saved.ids[1] / "zarr.json"
    assert "can't be restored" not in cnr(capsys, "ls", url)[1]
    assert json.loads(cnr(capsys, "info", url, "--json")[1])["lost"] is None
    lost.unlink()
    listed = json.loads(cnr(capsys, "ls", url, "--json")[1])
    bases = [None, saved.ids[1], saved.ids[1]]
    assert [each["lost_base"] for each in listed] == bases
    assert cnr(capsys, "ls", url)[1].count("can't be restored") == 2
    assert f"its base {saved.ids[1]} is lost" in cnr(capsys, "info", url)[1]
    assert json.loads(cnr(capsys, "info", url, saved.ids[0], "--json")[1])["lost"] is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 3])
def test_ls_lists_the_rest_beside_a_damaged_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=4)
    url, record = str(saved.folder), saved.folder / "versions" / saved.ids[number] / "zarr.json"
    record.write_bytes(record.read_bytes()[:-20])
    status, out, err = cnr(capsys, "ls", url)
    lines = [line.split() for line in out.splitlines()[1:-1]]
    assert (status, len(lines)) == (3, 4)
    assert lines[number] == ["-"] * (len(lines[number]) - 1) + ["damaged"]
    assert [at for at, line in enumerate(lines) if line[-1] == "restored"] == [*range(number + 1, 4)]
    assert f"versions/{saved.ids[number]}" in err or f"version {saved.ids[number]}" in err
    status, out, _ = cnr(capsys, "ls", url, "--json")
    listed = json.loads(out)
    assert (status, [each["id"] for each in listed]) == (3, saved.ids)
    assert [each["damaged"] is not None for each in listed] == [
        each == saved.ids[number] for each in saved.ids
    ]


@pytest.mark.slow
def test_a_fold_stands_for_a_lost_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = SavedStore(tmp_path / "store", "consecutive", versions=4)
    url = str(saved.folder)
    cnr_store.compact(url, saved.ids[2])
    (saved.folder / "versions" / saved.ids[1] / "zarr.json").unlink()
    assert [each["lost_base"] for each in json.loads(cnr(capsys, "ls", url, "--json")[1])] == [None] * 3
    assert json.loads(cnr(capsys, "info", url, "--json")[1])["lost"] is None
    (saved.folder / "versions" / saved.ids[3] / "manifest").unlink()
    assert "manifest is lost" in cnr(capsys, "info", url)[1]


def test_ls_marks_what_is_being_removed(capsys: pytest.CaptureFixture[str], own_store: str) -> None:
    first = cnr_store.versions(own_store)[0].id
    tombstones = Path(own_store, "tombstones")
    tombstones.mkdir()
    (tombstones / first).write_text("{}")
    assert [each["removed"] for each in json.loads(cnr(capsys, "ls", own_store, "--json")[1])] == [
        True,
        False,
    ]
    assert cnr(capsys, "ls", own_store)[1].count("being removed") == 1
    assert json.loads(cnr(capsys, "info", own_store, first, "--json")[1])["removed"] is True


def test_folding_changes_no_value(capsys: pytest.CaptureFixture[str], own_store: str) -> None:
    values = cnr_store.state_dict(own_store)["0.weight"]
    assert cnr(capsys, "compact", own_store, "1")[1].endswith(": nothing to fold\n")
    status, out, _ = cnr(capsys, "compact", own_store, "--json")
    assert (status, json.loads(out)["outcome"]) == (0, "folded")
    assert cnr(capsys, "compact", own_store)[1].endswith(": already folded\n")
    assert (cnr_store.state_dict(own_store)["0.weight"] == values).all()


def test_retention_removes_what_it_foretold_and_no_pinned_version(
    capsys: pytest.CaptureFixture[str], own_store: str
) -> None:
    first, second = (info.id for info in cnr_store.versions(own_store))
    cnr_store.save(own_store, torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16)), step=3)
    rules = ("gc", own_store, "--keep-last", "1")
    assert cnr(capsys, "pin", own_store, "1")[1] == f"{first}: pinned\n"
    planned = json.loads(cnr(capsys, *rules, "--dry-run", "--json")[1])
    assert (planned["removed"], len(cnr_store.versions(own_store))) == ([second], 3)
    status, out, _ = cnr(capsys, *rules)
    assert (status, f"removed: {second}" in out.splitlines()) == (0, True)
    assert cnr(capsys, "unpin", own_store, "1")[0] == 0
    assert json.loads(cnr(capsys, *rules, "--json")[1])["removed"] == [first]
    assert [info.step for info in cnr_store.versions(own_store)] == [3]


def test_retention_says_why_versions_stay_only_where_a_rule_chose(
    capsys: pytest.CaptureFixture[str], own_store: str
) -> None:
    first, second = (info.id for info in cnr_store.versions(own_store))
    assert cnr(capsys, "gc", own_store)[1] == "2 versions kept, as there is no rule, 0 removed; 0 bytes\n"
    assert json.loads(cnr(capsys, "gc", own_store, "--json")[1])["kept"].keys() == {first, second}
    assert cnr(capsys, "gc", own_store, "--keep-last", "2")[1].splitlines() == [
        f"kept {first}: needed by {second}",
        f"kept {second}: the newest",
        "2 versions kept, 0 removed; 0 bytes",
    ]
    cnr_store.compact(own_store)
    assert "\n1 version kept, 1 removed; " in cnr(capsys, "gc", own_store, "--keep-last", "1")[1]


def test_a_fold_that_can_not_be_read_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = save_many(open_backend(tmp_path), range(1, 4))
    cnr_store.compact(tmp_path, made[1])

    def listed() -> tuple[int, list[tuple[int, bool]]]:
        status, out, _ = cnr(capsys, "ls", str(tmp_path), "--json")
        found = json.loads(out)
        assert [each["lost_base"] is not None for each in found] == [False] * len(found)
        return status, [(each["chain"], each["folded"]) for each in found]

    assert listed() == (0, [(1, False), (1, True), (2, False)])
    record = tmp_path / "folds" / made[1] / "zarr.json"
    sound = record.read_bytes()
    record.write_bytes(sound[:200] + b"x" + sound[201:])
    status, found = listed()
    assert (status, found) == (3, [(1, False), (2, False), (3, False)])
    record.unlink()  # as a fold that was killed leaves it
    assert listed() == (0, [(1, False), (2, False), (3, False)])
    shutil.rmtree(tmp_path / "versions" / made[0])
    _, out, _ = cnr(capsys, "ls", str(tmp_path), "--json")
    assert [each["lost_base"] for each in json.loads(out)] == [made[0]] * 2
