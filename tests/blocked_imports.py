"""The process that runs the core's work, or tests, in forks in which parts of the rim can't be imported."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import Adam

from tests.paths import ROOT
from tests.test_store.support.fork_server import fork_jobs


class Blocked(importlib.abc.MetaPathFinder):
    """Refuses modules and what lies in them. A test is skipped if it, or a benchmark that it tests, imports one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in self._names):
            importer = _importer(sys._getframe(1))
            if any(importer.is_relative_to(ROOT / place) for place in ("tests", "benchmarks")):
                pytest.skip(f"it needs {fullname}", allow_module_level=True)
            raise ModuleNotFoundError(f"{fullname} is blocked", name=fullname)


def _importer(frame: FrameType | None) -> Path:
    """The file of who asked for a module, be it by a public name of ours that is imported when asked for."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not ("importlib" in file or file == str(ROOT / "cnr_store" / "__init__.py")):
            return Path(file)
        frame = frame.f_back
    raise AssertionError("nobody imports it")


def run(command: dict[str, Any]) -> None:
    """Do the core's work, or run the tests that the command names."""
    sys.meta_path.insert(0, Blocked(command["blocked"]))
    if command["tests"]:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # which is for answers
        options = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(ROOT), "--rootdir", str(ROOT)]
        status = pytest.main([*options, "-m", "not nightly and not slow and not server", *command["tests"]])
        assert status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    else:
        work(Path(command["side"]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.top = nn.Embedding(300, 8), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.table(ids)).square().mean()
        return found


def work(folder: Path) -> None:
    """Save under each policy, load, follow, collect, fold, verify."""
    import cnr_store
    from cnr_store.policies.policy import PolicyName

    for policy in get_args(PolicyName):
        url, model = folder / policy, Model()
        optimizer = Adam(model.parameters())
        with cnr_store.Checkpointer(url, model, optimizer, policy=policy, budget=0) as checkpointer:
            for step in range(1, 4):
                optimizer.zero_grad()
                model(torch.arange(step, 90, step)).backward()
                optimizer.step()
                checkpointer.save(step, reader={"position": step}).result()
        other = Model()
        loaded = cnr_store.load(url, other, Adam(other.parameters()))
        assert loaded.reader == {"position": 3}
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        behind, versions = Model(), cnr_store.versions(url)
        cnr_store.load(url, behind, version=versions[0])
        for update in cnr_store.follow(url, versions[0]):
            update.apply(behind)
        assert torch.equal(behind.table.weight, model.table.weight)
        cnr_store.compact(url)
        cnr_store.gc(url, keep_last=1, grace_seconds=0)
        assert [version.step for version in cnr_store.versions(url)] == [3]
        assert cnr_store.verify(url, deep=True).ok


if __name__ == "__main__":
    fork_jobs(run)
