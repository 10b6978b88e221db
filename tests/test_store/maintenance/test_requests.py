"""How many requests each version takes: on S3 they are what a store of many versions costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import cnr_store
from cnr_backends import Backend, open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store.catalog.catalog import Catalog
from cnr_store.cli.facts import read_store
from cnr_store.cli.report.figures import read_figures
from tests.test_store.support.places import memory_url
from tests.test_store.support.retention_helpers import save_many

FEW, MANY = 6, 14
"""Versions, or versions to remove, whose requests are compared: what all have in common is not counted."""


def each_takes(act: Callable[[Backend, int], object], versions: Callable[[int], int]) -> dict[str, float]:
    """Requests for each version more, by operation."""
    found = []
    for count in (FEW, MANY):
        with memory_url() as url:
            backend = open_backend(url)
            save_many(backend, range(1, 1 + versions(count)), full=range(1, 1 + versions(count)))
            counted = FaultyBackend(backend, lambda *_: None, reads=True)
            act(counted, count)
            found.append(Counter(operation for operation, _ in counted.log))
    few, many = found
    grown = {name: (many[name] - few[name]) / (MANY - FEW) for name in many | few}
    return {name: each for name, each in grown.items() if each}


@pytest.mark.slow
@pytest.mark.parametrize("look", [read_store, read_figures])
def test_a_look_reads_each_record_once(look: Callable[[Catalog], object]) -> None:
    assert each_takes(lambda backend, _: look(Catalog(backend)), lambda count: count) == {"get": 1}


@pytest.mark.slow
def test_a_dry_run_reads_each_record_and_lists_what_would_go() -> None:
    """Two listings: of the version, and of its fold."""

    def act(backend: Backend, count: int) -> None:
        assert len(cnr_store.gc(backend, keep_last=1, dry_run=True).removed) == count

    assert each_takes(act, lambda count: count + 1) == {"get": 1, "list_keys": 2}


@pytest.mark.slow
def test_a_version_is_removed_in_few_requests() -> None:
    """Tombstones are listed for all at once."""

    def act(backend: Backend, count: int) -> None:
        assert len(cnr_store.gc(backend, keep_last=1).removed) == count

    taken = each_takes(act, lambda count: count + 1)
    assert (taken["get"], taken["list_keys"]) == (2, 2)
    assert taken.keys() <= {"get", "put", "list_keys", "delete"}
