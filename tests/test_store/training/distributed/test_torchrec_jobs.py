"""What a checkpointer makes of TorchRec's models and optimizers, in one process. Needs TorchRec."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from tests.test_store.support.distributed.ranks import group

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.test_store.ranks.support import torchrec_life
    from tests.test_store.ranks.support.torchrec_life import Job


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    with group(str(tmp_path / "keys"), 0, 1):
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def checkpointer_of(job: Job, url: str, optimizers: Any = None) -> cnr_store.Checkpointer:
    given = [job.dmp.fused_optimizer, job.dense] if optimizers is None else optimizers
    return cnr_store.Checkpointer(url, job.dmp, given, bits=32, policy="consecutive")


def test_tables_that_were_sharded_anew_are_refused(url: str) -> None:
    job = Job("tt", "EXACT_ROWWISE_ADAGRAD")
    module = job.dmp.module.ebc
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        checkpointer.save(1).result()
        module._lookups.clear()  # as DistributedModelParallel.reshard does, which one rank alone can't call
        module._create_lookups()
        for call in (lambda: checkpointer.save(2), checkpointer.load):
            with pytest.raises(cnr_store.ModelMismatchError, match="'ebc' lie in other memory .* make a new"):
                call()
