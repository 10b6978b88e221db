"""Planners of a program's own that change what is saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import cnr_store
from cnr_store.dcp import Writer
from tests.test_store.dcp.test_one_process import load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, Any] = {"x": torch.ones(300, 20), "y": 7, "z": [{"a": 1.5}]}


class Doubles(DefaultSavePlanner):
    """Changes tensors, as planners that save another type do."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        return (
            object * 2 if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)
        )


class ChangesValues(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        if write_item.type != WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        file = io.BytesIO()
        torch.save(8 if object == 7 else object, file)
        return file


class LooksUpOthers(DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return 8 if found is STATE["y"] else found


@pytest.mark.parametrize(("planner", "x", "y"), [(Doubles(), 2.0, 7), (LooksUpOthers(), 1.0, 8)])
def test_what_planners_change_is_stored(
    tmp_path: Path, planner: DefaultSavePlanner, x: float, y: int
) -> None:
    save(STATE, Writer(tmp_path), planner=planner)
    found = load({"x": torch.zeros(300, 20), "y": 0, "z": [{"a": 0.0}]}, tmp_path)
    assert torch.equal(found["x"], torch.full((300, 20), x))
    assert (found["y"], found["z"]) == (y, [{"a": 1.5}])


def test_values_that_are_changed_in_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="transform_object of ChangesValues changes y"):
        save(STATE, Writer(tmp_path), planner=ChangesValues())
    assert cnr_store.versions(tmp_path) == []
