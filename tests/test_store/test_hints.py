"""What a beginner gets wrong is answered before it costs a run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import cnr_store


@pytest.mark.parametrize("option", ["bits", "codec"])
def test_a_pattern_that_fits_no_table(tmp_path: Path, option: str) -> None:
    model = nn.ModuleDict({"users": nn.Embedding(10, 4), "films": nn.Embedding(10, 4)})
    value = {"users.weight": 2} if option == "bits" else {"users.weight": "cnr_rows"}
    with pytest.raises(
        cnr_store.OptionError, match=r"'users.weight' fits no table; there are 'users', 'films'"
    ):
        cnr_store.Checkpointer(tmp_path, model, **{option: value})  # type: ignore[arg-type]  # one of two


def test_a_run_that_begins_anew_beside_earlier_versions_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Embedding(10, 4)
    with caplog.at_level(logging.WARNING):
        cnr_store.save(tmp_path, model, step=20)
        with cnr_store.Checkpointer(tmp_path, model) as checkpointer:
            checkpointer.load()
            checkpointer.save(30)
        assert "begins anew" not in caplog.text
        cnr_store.save(tmp_path, model, step=10)
    assert "call load() before the first save" in caplog.text


def test_without_torch_the_extra_is_named() -> None:
    script = "import sys; sys.modules['torch'] = None\nimport cnr_store\ncnr_store.Checkpointer"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ImportError: cnr_store.Checkpointer needs torch: pip install 'cnr-store[torch]'" in done.stderr
