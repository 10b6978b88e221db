"""Pins: what they keep, and when they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing.faulty import Fault, FaultyBackend
from cnr_store import VersionNotFoundError
from cnr_store.format.layout import version_key
from tests.test_store.support.places import quick_folder
from tests.test_store.support.retention_helpers import (
    check_exact,
    contents,
    objects,
    save_many,
    visible,
)


@pytest.mark.slow
def test_a_pinned_version_stays_with_what_it_leans_on(backend: Backend) -> None:
    made = save_many(backend, range(1, 8), full=[1, 4, 7])
    before = contents(backend)
    assert cnr_store.pin(backend, 2) == made[1]
    assert cnr_store.pin(backend, made[1]) == made[1]
    assert cnr_store.pins(backend) == [made[1]]
    report = cnr_store.gc(backend, keep_last=1)
    assert report.kept[made[1]] == "pinned"
    assert check_exact(backend, before) == [made[0], made[1], made[6]]
    assert cnr_store.unpin(backend, 2) == made[1]
    assert cnr_store.pins(backend) == []
    cnr_store.gc(backend, keep_last=1)
    assert check_exact(backend, before) == [made[6]]


def test_an_empty_folder_is_no_pin_after_unpin() -> None:
    """A process that was killed in `unpin` may leave it."""
    with quick_folder() as folder:
        made = save_many(open_backend(folder), [1, 2], full=[1, 2])
        Path(folder, "pins", made[0]).mkdir(parents=True)
        cnr_store.unpin(folder, made[0])
        assert cnr_store.pins(folder) == []
        assert cnr_store.gc(folder, keep_last=1).removed == (made[0],)


def test_a_doomed_version_can_not_be_pinned(backend: Backend) -> None:
    made = save_many(backend, [1, 2], policy="full")
    backend.put(version_key(made[0], "0", prefix="tombstones"), b"{}")
    with pytest.raises(VersionNotFoundError, match=made[0]):
        cnr_store.pin(backend, made[0])
    assert not list(backend.list_keys("pins"))
    with pytest.raises(VersionNotFoundError):
        cnr_store.pin(backend, 17)


@pytest.mark.slow
def test_a_pin_whose_version_is_lost_is_shown(backend: Backend) -> None:
    made = save_many(backend, [1, 2, 3], policy="full")
    cnr_store.pin(backend, 1)
    cnr_store.pin(backend, 2)
    for key in [key for key in objects(backend) if key.startswith(f"versions/{made[0]}/")]:
        backend.delete(key)
    backend.delete(f"versions/{made[1]}/zarr.json")
    assert cnr_store.pins(backend) == made[:2]
    report = cnr_store.verify(backend)
    assert [each.version for each in report.problems] == [made[1]]
    assert [(each.version, "a pin keeps it" in str(each)) for each in report.suspicious] == [(made[0], True)]
    assert cnr_store.unpin(backend, made[0]) == made[0]
    assert cnr_store.pins(backend) == [made[1]]
    with pytest.raises(VersionNotFoundError):
        cnr_store.unpin(backend, made[0])


def test_a_pin_that_comes_between_the_looks_holds(backend: Backend) -> None:
    """The pin was granted before there was a tombstone, so retention must see it the second time."""
    made = save_many(backend, [1, 2, 3], policy="full")

    def grant(operation: str, key: str, _: int) -> Fault:
        if key.startswith(f"tombstones/{made[0]}") and not cnr_store.pins(backend):
            cnr_store.pin(backend, made[0])
        return None

    report = cnr_store.gc(FaultyBackend(backend, grant), keep_last=1)
    assert visible(backend) == [made[0], made[2]]
    assert report.removed == (made[1],)
    assert not [key for key in objects(backend) if key.startswith(f"tombstones/{made[0]}")]
    cnr_store.pin(backend, made[0])
