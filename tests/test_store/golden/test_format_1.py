"""A store of format 1, which a development version wrote: refused by name, and its exported weights are imported.

Commit 36dd5db5 wrote `format_1/store.zip`, and exported it: `cnr export URL format_1/exported.safetensors`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import cnr_store
from cnr_store.format import layout
from tests.test_store.cli.command import cnr

FOLDER = Path(__file__).parent / "format_1"
SAID = (
    "holds format 1, which a development version of cnr-store wrote; this release reads format 2. "
    "Commit 36dd5db5 of cnr-store reads it."
)
NEWEST = "000001-4c184a02.00000002"
HOW = "`cnr export URL out.safetensors`, and import them with this release, `cnr import out.safetensors NEW_URL`"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40, 4)
        self.items = nn.Embedding(25, 3)
        self.top = nn.Linear(4, 2)


@pytest.fixture
def url(tmp_path: Path) -> Path:
    shutil.unpack_archive(FOLDER / "store.zip", tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize(
    "call",
    [
        lambda url: cnr_store.Checkpointer(url, Model()),
        lambda url: cnr_store.versions(url),
        lambda url: cnr_store.state_dict(url),
        lambda url: cnr_store.load(url, Model()),
        lambda url: cnr_store.open(url),
        lambda url: cnr_store.state_dict(url, NEWEST),
        lambda url: cnr_store.pins(url),
        lambda url: cnr_store.gc(url, keep_last=1),
        lambda url: cnr_store.compact(url),
        lambda url: cnr_store.repair(url),
        lambda url: cnr_store.verify(url),
        lambda url: cnr_store.verify(url, NEWEST, deep=True),
    ],
)
def test_it_is_refused_and_untouched(url: Path, call: Callable[[Path], object]) -> None:
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    with pytest.raises(cnr_store.FormatError) as found:
        call(url)
    assert SAID in str(found.value)
    assert HOW in str(found.value)
    assert {path: path.read_bytes() for path in url.rglob("*") if path.is_file()} == before


def test_a_record_of_format_1_is_refused_in_a_root_of_this_one(url: Path) -> None:
    root = json.loads((url / "zarr.json").read_bytes())
    root["attributes"]["cnr"]["format"] = layout.FORMAT
    (url / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(cnr_store.FormatError, match=r"commit record of version .* holds format 1, which"):
        cnr_store.state_dict(url)


def test_the_exported_weights_are_imported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, names = FOLDER / "exported.safetensors", ["--table", "users", "--table", "items", "--step", "2"]
    assert cnr(capsys, "import", str(file), str(tmp_path / "new"), *names)[0] == 0
    expected = load_file(file)
    found = cnr_store.state_dict(tmp_path / "new", 2)
    assert found.keys() == expected.keys()
    model = Model()
    cnr_store.load(tmp_path / "new", model)
    for name, values in model.state_dict().items():
        assert np.array_equal(found[name], expected[name])
        assert torch.equal(values, torch.from_numpy(expected[name]))
