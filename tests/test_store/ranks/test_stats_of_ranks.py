"""What saves and `cnr info` say of the work of all ranks is the same on each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_store.cli.app import main
from cnr_store.training.saving.explanation import SaveStats
from tests.test_store.ranks.support.small_job import SmallJob, find_small_models
from tests.test_store.support.places import quick_folder


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    find_small_models(monkeypatch)
    with quick_folder() as folder:
        yield folder


def info_of(version: str, url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `cnr info` says."""
    with pytest.raises(SystemExit):
        main(["info", url, version, "--json"])
    return json.loads(capsys.readouterr().out)


def save_stats(job: SmallJob, step: int) -> list[SaveStats]:
    """Save: what each rank is told of it, once the store was maintained."""

    def save(rank: int) -> SaveStats:
        pending = job.checkpointers[rank].save(step)
        pending.result()
        assert pending.stats is not None
        return pending.stats

    job.train(step)
    found = job.each(save)
    job.each(lambda rank: job.checkpointers[rank]._upkeep.wait())
    return found


@pytest.mark.slow
def test_all_ranks_count_the_same(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    folds = 0
    with SmallJob(url, 3, retention=cnr_store.Retention(max_chain=2)) as job:
        for step in range(1, 9):
            first, *others = save_stats(job, step)
            for other in others:
                for name in ("rows", "table_rows", "bytes", "fold_bytes", "ranks"):
                    assert getattr(other, name) == getattr(first, name), name
            folds += first.fold_bytes
            assert first.ranks is not None
            assert first.ranks["world"] == 3
            version = cnr_store.versions(url)[-1]
            # The first rank also puts what belongs to none alone: the shared state, the manifest and the record.
            assert 0 < sum(first.ranks["bytes"]) < first.bytes == version.bytes
            assert info_of(version.id, url, capsys)["policy"]["ranks"] == first.ranks
    stored = sum(size for _, size in open_backend(url).list_keys("folds"))
    # No save has told yet of the fold after the last one.
    not_told = info_of(cnr_store.versions(url)[-1].id, url, capsys)["fold_bytes"] or 0
    assert folds == stored - not_told > 0
