"""Everything that a version needs is durable before its record is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn
from torch.optim import Adagrad

import cnr_store


def test_each_file_and_folder_of_a_version_is_synced_before_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync, link = os.fsync, os.link
    checked: list[Path] = []

    def watched_sync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        sync(file)

    def watched_link(source: str, target: str) -> None:
        version = Path(target).parent
        if version.parent.name == "versions":
            files = [path for path in version.rglob("*") if path.is_file() and path != Path(source)]
            assert len(files) > 12
            for path in files:
                assert not path.name.startswith(".tmp-")
                assert {*path.parents} - {*tmp_path.parents} <= {*synced}
            checked.append(version)
        link(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "link", watched_link)
    model = nn.ModuleList(nn.EmbeddingBag(100, 8) for _ in range(5))
    for turn in range(2):
        cnr_store.save(tmp_path / "store", model, Adagrad(model.parameters()), step=turn)
        assert len(checked) == turn + 1
        synced.clear()
