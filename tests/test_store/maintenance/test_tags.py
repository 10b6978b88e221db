"""Tags: names that every `version=` takes, of versions that retention keeps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.errors import StorageError
from cnr_backends.testing import FaultyBackend
from cnr_backends.testing.faulty import Fault
from cnr_store import CorruptionError, OptionError, VersionNotFoundError
from tests.test_store.cli.command import cnr
from tests.test_store.support.faults import fault_at
from tests.test_store.support.retention_helpers import save_many


def test_a_tagged_version_stays_and_goes_by_its_name(backend: Backend) -> None:
    made = save_many(backend, range(1, 6), full=range(1, 6))
    assert cnr_store.tags(backend) == {}
    assert cnr_store.tag(backend, "before-launch", 2) == made[1]
    assert cnr_store.tag(backend, "best") == made[4]
    assert cnr_store.tag(backend, "best", "before-launch") == made[1]
    assert cnr_store.tags(backend) == {"before-launch": made[1], "best": made[1]}
    assert cnr_store.pins(backend) == []
    report = cnr_store.gc(backend, keep_last=1)
    assert report.kept[made[1]].startswith("tagged ")
    assert cnr_store.state_dict(backend, "best").keys() == cnr_store.state_dict(backend, made[1]).keys()
    assert cnr_store.verify(backend, "best").ok
    cnr_store.untag(backend, "best")
    cnr_store.untag(backend, "best")
    with pytest.raises(VersionNotFoundError, match="'best' is not a version"):
        cnr_store.open(backend, version="best")
    assert cnr_store.tags(backend) == {"before-launch": made[1]}


def test_a_version_that_is_removed_can_not_be_tagged(backend: Backend) -> None:
    made = save_many(backend, range(1, 4), full=[1, 2, 3])
    cnr_store.tag(backend, "best", 3)
    backend.put(f"tombstones/{made[0]}/{'0' * 16}", b"{}")
    for name in ("best", "other"):
        with pytest.raises(VersionNotFoundError, match="is being deleted by retention; tag another"):
            cnr_store.tag(backend, name, made[0])
    assert cnr_store.tags(backend) == {"best": made[2]}


def test_what_a_tag_names_stays_while_it_is_moved(backend: Backend) -> None:
    """To a version that is being removed, while another process collects, or moves the tag elsewhere."""
    made = save_many(backend, range(1, 7), full=range(1, 7))
    cnr_store.tag(backend, "best", made[0])
    backend.put(f"tombstones/{made[2]}/{'0' * 16}", b"{}")
    other: list[str] = []

    def meanwhile(operation: str, key: str, _: int) -> Fault:
        if (operation, key) == ("list_names", "tombstones") and not other:
            assert made[0] not in cnr_store.gc(backend, keep_last=3).removed
            other.append(cnr_store.tag(backend, "best", made[3]))
        return None

    with pytest.raises(VersionNotFoundError, match="tag another"):
        cnr_store.tag(FaultyBackend(backend, meanwhile, reads=True), "best", made[2])
    assert other == [made[3]]
    assert cnr_store.tags(backend) == {"best": made[3]}
    assert cnr_store.gc(backend, keep_last=1).kept[made[3]] == "tagged best"


def test_a_tag_is_as_it_was_although_the_storage_fails(backend: Backend) -> None:
    made = save_many(backend, range(1, 4), full=range(1, 4))
    cnr_store.tag(backend, "best", made[0])
    backend.put(f"tombstones/{made[1]}/{'0' * 16}", b"{}")
    for number in range(4):
        failing = FaultyBackend(backend, fault_at(number, "before"))
        with suppress(StorageError, VersionNotFoundError):
            cnr_store.tag(failing, "best", made[1])
        assert cnr_store.tags(backend) == {"best": made[0]}


def test_a_tag_that_is_made_where_deletes_are_refused_says_so(backend: Backend) -> None:
    made = save_many(backend, range(1, 4), full=range(1, 4))
    refusing = FaultyBackend(backend, lambda operation, key, _: "before" if operation == "delete" else None)
    with pytest.raises(StorageError, match=f"{made[1]} is tagged 'best', but a pin .* stays .*`cnr unpin`"):
        cnr_store.tag(refusing, "best", 2)
    assert cnr_store.tags(backend) == {"best": made[1]}
    assert cnr_store.pins(backend) == [made[1]]
    with pytest.raises(StorageError, match="delete of 'tags/best' failed"):
        cnr_store.untag(refusing, "best")
    cnr_store.unpin(backend, "best")
    assert cnr_store.pins(backend) == []


def test_what_failed_first_is_told(backend: Backend) -> None:
    save_many(backend, [1])
    failing = FaultyBackend(backend, lambda operation, key, index: "before" if index else None)
    with pytest.raises(StorageError, match="put of 'tags/best' failed"):
        cnr_store.tag(failing, "best")


@pytest.mark.parametrize("name", ["", "latest", "7", "A", "a/b", ".a", "a.", "a" * 101, "zarr.json", "../a"])
def test_names_that_no_tag_has(backend: Backend, name: str) -> None:
    save_many(backend, [1])
    with pytest.raises(OptionError, match="can't name a version"):
        cnr_store.tag(backend, name)


def test_a_tag_that_can_not_be_read_removes_nothing(backend: Backend) -> None:
    save_many(backend, range(1, 4), full=[1, 2, 3])
    backend.put("tags/best", b"{}")
    with pytest.raises(CorruptionError, match="tags/best is malformed"):
        cnr_store.gc(backend, keep_last=1)
    assert len(cnr_store.versions(backend)) == 3
    assert any("tags/best" in str(each) for each in cnr_store.verify(backend).problems)


def test_an_altered_bit_of_a_tag_is_an_error(backend: Backend) -> None:
    made = save_many(backend, range(1, 4), full=[1, 2, 3])
    cnr_store.tag(backend, "best", 2)
    sound = backend.get("tags/best")
    for position in range(len(sound)):
        altered = bytearray(sound)
        altered[position] ^= 1
        backend.put("tags/best", altered)
        with pytest.raises(CorruptionError, match="tags/best is malformed"):
            cnr_store.open(backend, version="best")
    assert any("tags/best" in str(each) for each in cnr_store.verify(backend).problems)
    assert cnr_store.tag(backend, "best", 2) == made[1]  # over the damaged one
    assert cnr_store.tags(backend) == {"best": made[1]}


def test_a_tag_under_another_name_is_an_error(backend: Backend) -> None:
    save_many(backend, [1, 2])
    cnr_store.tag(backend, "before-launch", 1)
    cnr_store.tag(backend, "bad-run", 2)
    backend.put("tags/before-launch", backend.get("tags/bad-run"))
    with pytest.raises(CorruptionError, match="it is the tag 'bad-run': objects were swapped"):
        cnr_store.tags(backend)


def remove_version(backend: Backend, version: str) -> None:
    for key, _ in list(backend.list_keys(f"versions/{version}")):
        backend.delete(key)


@pytest.mark.parametrize("left", [0, 1], ids=["nothing left", "record lost"])
def test_a_tag_whose_version_is_lost_removes_nothing(backend: Backend, left: int) -> None:
    made = save_many(backend, range(1, 5), full=range(1, 5))
    cnr_store.tag(backend, "best", 2)
    if left:
        backend.delete(f"versions/{made[1]}/zarr.json")
    else:
        remove_version(backend, made[1])
    before = dict(backend.list_keys(""))
    for dry_run in (True, False):
        with pytest.raises(CorruptionError, match=f"the tag 'best' names version {made[1]}, which is lost"):
            cnr_store.gc(backend, keep_last=1, grace_seconds=0, dry_run=dry_run)
    assert dict(backend.list_keys("")) == before
    assert [each.version for each in cnr_store.verify(backend).problems] == [made[1]]
    cnr_store.untag(backend, "best")
    assert cnr_store.gc(backend, keep_last=1).removed


def test_every_damaged_tag_is_reported(backend: Backend) -> None:
    save_many(backend, [1])
    for name in ("one", "two"):
        backend.put(f"tags/{name}", b"{}")
    found = {each.key for each in cnr_store.verify(backend).problems}
    assert found == {"tags/one", "tags/two"}
    assert {each.key for each in cnr_store.verify(backend, "one").problems} == found


@pytest.mark.parametrize("name", ["latest", "7", "000001-0123abcd.00000001", "A b"])
@pytest.mark.parametrize("command", ["tag", "untag"])
def test_the_command_line_refuses_what_no_tag_is_called(
    backend: Backend, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    save_many(backend, [1])
    status, out, err = cnr(capsys, command, backend.url, name)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"cnr: {name!r} can't name a version: give 1 to 100 of a-z" in err


def test_the_command_line_moves_a_tag_that_exists(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = save_many(backend, [1, 2])
    for version in (first, second):
        assert cnr(capsys, "tag", backend.url, "best", version)[:2] == (0, f"{version}: tagged best\n")
    assert json.loads(cnr(capsys, "tag", backend.url, "best", "1", "--json")[1]) == {
        "tag": "best",
        "version": first,
    }
    status, out, err = cnr(capsys, "tag", backend.url, "best", "7")
    assert (status, out) == (1, "")
    assert "7" in err
    assert cnr_store.tags(backend) == {"best": first}
    for _ in range(2):  # one that is not there is no error
        assert cnr(capsys, "untag", backend.url, "best")[:2] == (0, "best: no tag any more\n")
    assert cnr_store.tags(backend) == {}


@pytest.mark.parametrize("before", [None, 3])
def test_a_tag_is_not_granted_if_its_pin_was_removed_and_the_version_goes(
    backend: Backend, before: int | None
) -> None:
    made = save_many(backend, range(1, 4), full=[1, 2, 3])
    if before is not None:
        cnr_store.tag(backend, "release", before)
    removed: list[str] = []

    def meanwhile(operation: str, key: str, _: int) -> Fault:
        if (operation, key) == ("put", "tags/release") and not removed:
            cnr_store.unpin(backend, made[0])
            removed.extend(cnr_store.gc(backend, keep_last=1, grace_seconds=0).removed)
        return None

    with pytest.raises(VersionNotFoundError, match="tag another"):
        cnr_store.tag(FaultyBackend(backend, meanwhile), "release", made[0])
    assert made[0] in removed
    assert cnr_store.tags(backend) == ({} if before is None else {"release": made[before - 1]})


@pytest.mark.parametrize("marks", ["tombstones", "pins"])
def test_an_empty_folder_marks_no_version(tmp_path: Path, marks: str) -> None:
    """As a process leaves it that is killed between the removal of its mark and that of the folder."""
    made = save_many(open_backend(tmp_path), range(1, 4), full=[1, 2, 3])
    (tmp_path / marks / made[0]).mkdir(parents=True)
    assert cnr_store.verify(tmp_path).ok
    assert cnr_store.pins(tmp_path) == []
    cnr_store.gc(tmp_path, grace_seconds=0)
    assert len(cnr_store.versions(tmp_path)) == 3
    assert cnr_store.pin(tmp_path, made[0]) == made[0]
