"""What a beginner gets wrong is answered before it costs a run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import dask.array
import numpy as np
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
    assert "call resume() or load() before the first save" in caplog.text


@pytest.mark.slow
def test_without_torch_the_extra_is_named() -> None:
    script = "import sys; sys.modules['torch'] = None\nimport cnr_store\ncnr_store.Checkpointer"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ImportError: cnr_store.Checkpointer needs torch: pip install 'cnr-store[torch]'" in done.stderr


def test_the_url_of_a_version_is_not_that_of_a_store(tmp_path: Path) -> None:
    info = cnr_store.save(tmp_path, nn.Embedding(10, 4))
    place = tmp_path / "versions" / info.id
    with pytest.raises(
        cnr_store.FormatError, match="is one version of a store; give the URL of the store above it"
    ):
        cnr_store.Checkpointer(place, nn.Embedding(10, 4))


@pytest.mark.nightly
def test_what_view_and_open_return_reaches_other_processes(tmp_path: Path) -> None:
    """As dask's schedulers send it."""
    model = nn.Embedding(1000, 4)
    cnr_store.save(tmp_path, model, bits=32)
    lazy = dask.array.from_array(cnr_store.open(tmp_path)["tables/weight/weight"], chunks=(300, 4))  # type: ignore[no-untyped-call]  # dask ships no types
    values = lazy.compute(scheduler="processes", num_workers=1)
    assert np.array_equal(values, model.weight.detach().numpy())
