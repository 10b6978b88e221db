"""Which threads encode, how many chunks at once, and that what is stored depends on neither."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_codecs import UniformRows
from cnr_codecs.protocol import Offsets, Rows
from cnr_store import Checkpointer
from tests.test_store.support.zarr_nodes import values_of

ROWS, DIM = 80_000, 64  # many chunks, and more than one task


class OneByOne:
    """A codec as others write them: it encodes one chunk a call. Notes which threads call it."""

    def __init__(self) -> None:
        self.codec = UniformRows("asymmetric", 4)
        self.get_config, self.zarr_codec = self.codec.get_config, self.codec.zarr_codec
        self.bytes_per_row = self.codec.bytes_per_row
        self.threads: set[threading.Thread] = set()
        self.chunks: list[int] = []

    def encode_rows(self, values: Rows, offsets: Offsets | None, rows: int, **options: Any) -> bytes:
        self.threads.add(threading.current_thread())
        self.chunks.append(1)
        return self.codec.encode_rows(values, offsets, rows, **options)


class Together(OneByOne):
    """A codec that encodes several chunks a call."""

    def encode_chunks(
        self, values: Rows, offsets: Offsets | None, edges: Sequence[int], rows: int, **options: Any
    ) -> list[bytes]:
        self.threads.add(threading.current_thread())
        self.chunks.append(len(edges) - 1)
        return self.codec.encode_chunks(values, offsets, edges, rows, **options)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"users": nn.Embedding(ROWS, DIM, sparse=True)})


@pytest.mark.slow
@pytest.mark.some_by_day(2)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", [OneByOne, Together])
def test_one_worker_is_the_thread_that_writes(tmp_path: Path, kind: type[OneByOne], workers: int) -> None:
    codec, trained, plain, wrote = kind(), model(), model(), set()
    changed = list(range(7, ROWS, 3))
    with (
        Checkpointer(
            tmp_path / "store",
            trained,
            codec=codec,
            policy="consecutive",
            limits=cnr_store.Limits(workers=workers),
            on_done=lambda _: wrote.add(threading.current_thread()),
        ) as ours,
        Checkpointer(tmp_path / "plain", plain, codec=codec.codec, policy="consecutive") as other,
    ):
        for step in range(2):
            version, expected = ours.save(step).result(), other.save(step).result()
            assert version.kind == expected.kind
            found, same = (
                values_of(cnr_store.open(tmp_path / folder), "tables/users/weight")
                for folder in ("store", "plain")
            )
            np.testing.assert_array_equal(found, same)
            for checkpointer, each in ((ours, trained), (other, plain)):
                with torch.no_grad():
                    each.get_parameter("users.weight")[changed] += 1
                checkpointer.touch("users", torch.tensor(changed))
    assert (codec.threads == wrote) == (workers == 1)
    assert sum(codec.chunks) > 10
    assert (max(codec.chunks) > 1) == (kind is Together)
