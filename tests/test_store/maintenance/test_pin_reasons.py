"""Why versions are pinned: told to people, and never in the way of the pin itself."""

from __future__ import annotations

import json

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_store import OptionError
from tests.test_store.cli.command import cnr
from tests.test_store.support.places import memory_url
from tests.test_store.support.retention_helpers import save_many

REASON = "für den Start [red]<b>"


def test_a_pin_tells_its_reason_until_it_goes(backend: Backend) -> None:
    first, second = save_many(backend, [1, 2], full=[1, 2])
    assert cnr_store.pin_reasons(backend) == {}
    cnr_store.pin(backend, 1, reason=REASON)
    cnr_store.pin(backend, 1, reason="again")
    cnr_store.pin(backend, 1)
    cnr_store.pin(backend, 2)
    assert cnr_store.pin_reasons(backend) == {first: sorted([REASON, "again"])}
    assert cnr_store.pins(backend) == [first, second]
    cnr_store.unpin(backend, 1)
    assert cnr_store.pin_reasons(backend) == {}


def test_a_pin_without_a_reason_gives_none(backend: Backend) -> None:
    save_many(backend, [1], full=[1])
    cnr_store.pin(backend, 1)
    [(key, _)] = backend.list_keys("pins")
    assert json.loads(backend.get(key))["reason"] is None
    assert cnr_store.pin_reasons(backend.url) == {}


@pytest.mark.parametrize("damage", ["altered", "swapped", "cut", "empty", "deep", "another"])
def test_a_pin_with_a_damaged_reason_still_holds(backend: Backend, damage: str) -> None:
    made = save_many(backend, [1, 2, 3], full=[1, 2, 3])
    cnr_store.pin(backend, 1, reason=REASON)
    [(key, _)] = backend.list_keys("pins")
    data = backend.get(key)
    if damage == "swapped":
        cnr_store.pin(backend, 3, reason="x")
        [other] = [each for each, _ in backend.list_keys("pins") if each != key]
        data = backend.get(other)
        backend.delete(other)
    backend.put(
        key,
        {
            "altered": data.replace(b"Start", b"Stare"),
            "swapped": data,
            "cut": data[:-3],
            "empty": b"",
            "deep": b"[" * 5000,
            "another": b'{"reason": 3}',
        }[damage],
    )
    assert cnr_store.pin_reasons(backend) == {made[0]: ["(its reason can't be read)"]}
    report = cnr_store.gc(backend, keep_last=1)
    assert report.kept[made[0]] == "pinned"
    assert report.removed == (made[1],)


@pytest.mark.parametrize("reason", ["", "two\nlines", "\x1b[31m", "x" * 201, 3])
def test_a_reason_is_one_line(backend: Backend, reason: str) -> None:
    save_many(backend, [1], full=[1])
    with pytest.raises(OptionError, match="give one line of 1 to 200"):
        cnr_store.pin(backend, 1, reason=reason)
    assert cnr_store.pins(backend) == []


def test_reasons_of_no_store(backend: Backend) -> None:
    assert cnr_store.pin_reasons(backend) == {}


def test_the_command_line_takes_and_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with memory_url() as url:
        backend = open_backend(url)
        first, _ = save_many(backend, [1, 2], full=[1, 2])
        assert cnr(capsys, "pin", url, "1", "--reason", REASON)[:2] == (0, f"{first}: pinned\n")
        assert f"pinned: {REASON}" in cnr(capsys, "ls", url)[1]
        assert f"pinned: {REASON}" in cnr(capsys, "info", url, "1")[1]
        listed = json.loads(cnr(capsys, "ls", url, "--json")[1])
        assert [each["pin_reasons"] for each in listed] == [[REASON], []]
        found = json.loads(cnr(capsys, "info", url, "1", "--json")[1])
        assert (found["pinned"], found["pin_reasons"]) == (True, [REASON])
        assert cnr(capsys, "pin", url, "1", "--reason", "a\nb")[0] == 1


def test_retention_says_why_a_version_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    with memory_url() as url:
        backend = open_backend(url)
        first, second, third, newest = save_many(backend, [1, 2, 3, 4], full=[1, 2, 3, 4])
        cnr_store.pin(backend, 1, reason=REASON)
        cnr_store.pin(backend, 1, reason="again")
        cnr_store.pin(backend, 2)
        cnr_store.pin(backend, 4, reason="it is the newest, too")
        assert cnr(capsys, "gc", url, "--keep-last", "1", "--dry-run")[1].splitlines()[:4] == [
            f"kept {first}: pinned: again; {REASON}",
            f"kept {second}: pinned",
            f"kept {newest}: the newest",
            f"would be removed: {third}",
        ]
        found = json.loads(cnr(capsys, "gc", url, "--keep-last", "1", "--json")[1])
        assert found["kept"] == {first: "pinned", second: "pinned", newest: "the newest"}
        assert found["pin_reasons"][first] == ["again", REASON]
