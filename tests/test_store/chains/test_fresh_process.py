"""Reading in a process that has written nothing and opened nothing before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cnr_store
from cnr_backends import OpenError

ZARR = "import zarr; group = zarr.open_group({url!r}, mode='r', storage_options={{'version': 7}})"
XARRAY = (
    "import xarray; group = xarray.open_datatree({url!r}, engine='zarr', chunks={{}}, consolidated=False, "
    "storage_options={{'version': 7}})"
)


@pytest.mark.slow
@pytest.mark.some_by_day(1)
@pytest.mark.parametrize("opening", [ZARR, XARRAY], ids=["zarr", "xarray"])
def test_a_chained_url_is_opened_inside_of_zarrs_own_loop(tmp_path: Path, opening: str) -> None:
    model = torch.nn.ModuleDict({"users": torch.nn.Embedding(2000, 16)})
    cnr_store.save(tmp_path, model, step=7, bits=32)
    program = (
        opening.format(url=f"cnr://::file://{tmp_path}")
        + "\nprint(float(group['tables/users/weight'][3, 5]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == cnr_store.state_dict(tmp_path)["users.weight"][3, 5]


def test_a_misspelled_argument_is_no_storage_option() -> None:
    url = "memory://misspelled"
    for step in (1, 2):
        cnr_store.save(url, torch.nn.Embedding(10, 4), step=step)
    with pytest.raises(OpenError, match="unknown option 'dryrun'; did you mean 'dry_run'"):
        cnr_store.gc(url, keep_last=1, dryrun=True)
    with pytest.raises(OpenError, match="unknown option 'keep'; did you mean 'keep_last'"):
        cnr_store.gc(url, keep=3)
    with pytest.raises(OpenError, match="unknown option 'verison'; did you mean 'version'"):
        cnr_store.open(url, verison=1)
    with pytest.raises(OpenError, match="unknown option 'verison'; did you mean 'version'"):
        cnr_store.open("s3://bucket/run", verison=1)  # whose driver takes any name
    with pytest.raises(OpenError, match=r"no storage options, got .'anon'.*misspelled"):
        cnr_store.open(url, anon=True)
    assert len(cnr_store.versions(url)) == 2
    assert len(cnr_store.versions(url, storage_options={})) == 2
