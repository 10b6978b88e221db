"""A save to a server that is busy, or gone, for a while."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

import cnr_store
from cnr_store import Checkpointer
from tests.test_store.support.lasting_store import make_model

if TYPE_CHECKING:
    from tests.s3_proxy import SpoiledOptions
    from tests.s3_server import S3Server


@pytest.mark.some_by_day(1)
@pytest.mark.server
@pytest.mark.parametrize("fate", ["503", "lose"])
def test_a_save_outlasts_a_busy_server(fate: str, s3_server: S3Server, spoiled: SpoiledOptions) -> None:
    """The driver gives up each time; both it and botocore have repeated the request before."""
    url = s3_server.url(uuid.uuid4().hex)
    config = {"config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 1}}}
    with (
        spoiled(lambda number, method: fate if method == "PUT" and number < 12 else None) as options,
        Checkpointer(url, make_model(), storage_options={**options, **config}) as checkpointer,
    ):
        pending = checkpointer.save(1)
        pending.result()
        assert pending.stats is not None
        assert pending.stats.seconds_waiting > 0
    assert [info.step for info in cnr_store.versions(url, **s3_server.storage_options)] == [1]
    assert cnr_store.verify(url, **s3_server.storage_options).ok
