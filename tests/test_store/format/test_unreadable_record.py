"""A version that no reader would take is never committed: it would stand in the way of all the others."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_codecs import LosslessRows
from cnr_store import SaveError
from cnr_store.format.layout import weight_path
from cnr_store.training.saving.snapshot import StagedRows
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.writer import Writer


def plan(step: int, rows: int) -> Plan:
    values = np.ones((rows, 4), np.float32)
    write = RowsWrite(
        weight_path("items"), (rows, 4), "float32", None, None, StagedRows(values), LosslessRows()
    )
    return Plan(step, None, [write], [], state={}, policy={"policy": "full"})


@pytest.mark.parametrize(("step", "rows"), [(2**62 + 1, 3), (-1, 3), (2, 0)])
def test_nothing_is_committed_that_can_not_be_read(step: int, rows: int) -> None:
    backend = open_backend(f"memory://{uuid.uuid4().hex}")
    writer = Writer(backend, workers=1)
    first = writer.write(plan(1, 3))
    with pytest.raises(SaveError, match=f"step {step} was not saved"):
        writer.write(plan(step, rows))
    last = writer.write(plan(3, 3))
    assert [info.id for info in cnr_store.versions(backend)] == [first.id, last.id]
    assert cnr_store.state_dict(backend)["items.weight"].shape == (3, 4)
