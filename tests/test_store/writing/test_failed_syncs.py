"""The last sync of a commit fails: the version is there, and a power cut could take it away."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_store import SaveError
from cnr_store.format.layout import FOLDS
from tests.test_store.support.retention_helpers import Trainer


class Syncs:
    """Syncs of folders fail once a commit record below `place` has got its name, so many times."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, failures: int, place: str = "versions") -> None:
        self.failed, self._failures, self._left, self._linked = 0, failures, step, False
        self._place = place
        self._link, self._sync = os.link, os.fsync
        patch.setattr(os, "link", self.link)
        patch.setattr(os, "fsync", self.sync)

    def link(self, source: Path, target: Path) -> None:
        self._link(source, target)
        if target.name == "zarr.json" and target.parent.parent.name == self._place:
            self._left -= 1
            self._linked = self._left == 0

    def sync(self, file: int) -> None:
        if self._linked and self.failed < self._failures and stat.S_ISDIR(os.fstat(file).st_mode):
            self.failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(file)


def test_a_commit_that_can_be_synced_again_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch, step=2, failures=1)
    trainer = Trainer(open_backend(tmp_path), bits=32)
    made = [trainer.save(1), trainer.save(2)]
    assert syncs.failed == 1
    assert [version.id for version in cnr_store.versions(tmp_path)] == made


def test_a_commit_that_may_not_be_durable_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch, step=2, failures=2)
    trainer = Trainer(open_backend(tmp_path), bits=32, keep_last=1)
    first = trainer.save(1)
    with pytest.raises(SaveError, match="neither voided nor confirmed"):
        trainer.save(2)
    assert syncs.failed == 2
    assert first in {version.id for version in cnr_store.versions(tmp_path)}
    trainer.save(3)
    reader = Trainer(open_backend(tmp_path), seed=5)
    assert reader.checkpointer.load().step == 3
    assert reader.weights() == trainer.weights()
    for each in (reader, trainer):
        each.close()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_fold_that_may_not_be_durable_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    trainer = Trainer(open_backend(tmp_path), bits=32)
    for step in (1, 2):
        trainer.save(step)
    trainer.close()
    syncs = Syncs(monkeypatch, 1, failures, FOLDS)
    if failures > 1:
        with pytest.raises(SaveError, match="was not folded: confirm"):
            cnr_store.compact(tmp_path)
    else:
        cnr_store.compact(tmp_path)
    assert syncs.failed == failures
    assert cnr_store.verify(tmp_path, deep=True).ok
