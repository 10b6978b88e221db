"""Wrong uses of a reader, and states that are not its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import cnr_store
from cnr_store import Checkpointer, OptionError, TrackedReader
from tests.test_store.training.data.loaders import BATCH, MAKE, Ids, Stream, seeded, taken

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's call
]


def test_an_iterator_goes_on_but_not_back() -> None:
    reader = TrackedReader(iter(range(6)))
    assert list(reader.interval(2)) == [0, 1]
    state = reader.state_dict()
    again = TrackedReader(iter(range(6)))
    again.load_state_dict(state)
    assert list(again) == [2, 3, 4, 5]
    reader.load_state_dict(state)
    with pytest.raises(OptionError, match="can be read only once"):
        list(reader)


def test_data_that_became_less_is_no_silent_end() -> None:
    reader = TrackedReader(range(6))
    list(reader.interval(5))
    again = TrackedReader(range(4))
    again.load_state_dict(reader.state_dict())
    with pytest.raises(OptionError, match="5 batches of this epoch were trained, and the loader has only 4"):
        list(again)


def test_no_state_was_saved_without_a_reader() -> None:
    with pytest.raises(
        OptionError, match="None is not a state of this reader: the version was saved without reader="
    ):
        TrackedReader([1]).load_state_dict(None)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: StatefulDataLoader(Ids()), "reader=loader"),
        (lambda: 7, "can't be iterated"),
        (lambda: DataLoader(Ids(), num_workers=2, in_order=False), "in_order=True"),
    ],
)
def test_loaders_that_are_refused(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrackedReader(loader())


@pytest.mark.parametrize("loader", [DataLoader(Ids(), BATCH), DataLoader(Stream(), BATCH)])
def test_a_loader_is_no_reader(tmp_path: Path, loader: DataLoader[Any]) -> None:
    model = torch.nn.EmbeddingBag(9, 2)
    with Checkpointer(tmp_path, model) as checkpointer:
        with pytest.raises(OptionError, match=r"make reader = TrackedReader\(loader\)"):
            checkpointer.save(1, reader=loader)
        with pytest.raises(OptionError, match=r"make reader = TrackedReader\(loader\)"):
            checkpointer.resume(reader=loader)
        checkpointer.save(1, reader=StatefulDataLoader(Ids(), BATCH)).result()
        assert checkpointer.resume(reader=StatefulDataLoader(Ids(), BATCH)) == 1
    with pytest.raises(OptionError, match=r"make reader = TrackedReader\(loader\)"):
        cnr_store.save(tmp_path, model, step=2, reader=loader)
    assert [info.step for info in cnr_store.versions(tmp_path)] == [1]


def test_only_generators_are_taken_for_generators() -> None:
    with pytest.raises(OptionError, match="generator 'it' is of type int"):
        TrackedReader([1], generators={"it": 3})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataLoader(Ids(), 2), "its loader is"),
        (DataLoader(Ids(20), BATCH), "its loader is"),
        (DataLoader(Stream(), BATCH), "its loader is"),
        ([1, 2], "its loader is"),
        (DataLoader(Ids(), BATCH, shuffle=True, generator=seeded()), "the loader.*loader.generator"),
    ],
)
def test_the_state_of_another_loader(other: Any, message: str) -> None:
    state, reader = TrackedReader(DataLoader(Ids(), BATCH)).state_dict(), TrackedReader(other)
    before = reader.state_dict()
    with pytest.raises(OptionError, match=message):
        reader.load_state_dict(state)
    assert reader.state_dict().keys() == before.keys()


def deep(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`state` with one value replaced."""
    if not path:
        return value
    if isinstance(state, tuple):
        return tuple(deep(one, path[1:], value) if i == path[0] else one for i, one in enumerate(state))
    return {**state, path[0]: deep(state[path[0]], path[1:], value)}


START = ("start", "global")


OWN = ("start", "own", "loader.batch_sampler.sampler.order")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), None),
        ((), {"epoch": 1}),
        (("epoch",), -1),
        (("batch",), True),
        (("batch",), 1.0),
        (("reused",), None),
        (("start",), None),
        (("start",), 3),
        (("start",), {}),
        (("generators",), 1),
        ((*START, "torch"), torch.zeros(5)),
        ((*START, "torch"), torch.zeros(5056, dtype=torch.uint8)),
        ((*START, "numpy", 2), 1 << 40),
        ((*START, "python", 1), (1, 2)),
        (OWN, None),
        ((*OWN, 0), 2),
        ((*OWN, 1), (*[0] * 624, 9999)),
    ],
)
def test_forged_states_change_nothing(path: tuple[Any, ...], value: Any) -> None:
    reader = TrackedReader(MAKE["own order"](0))
    first = taken(reader.interval(1))
    state = reader.state_dict()
    again = TrackedReader(MAKE["own order"](0))
    if path == ("generators",):
        state = {**state, "start": None, "batch": 0}
    with pytest.raises(OptionError, match="not a state of this reader"):
        again.load_state_dict(deep(state, path, value))
    assert taken(again.interval(1)) == first


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_states_of_numpys_generators_are_proven(bits: Callable[[int], Any]) -> None:
    reader = TrackedReader([1], generators={"it": np.random.Generator(bits(1))})
    state = reader.state_dict()
    reader.load_state_dict(state)
    good = state["generators"]["it"]
    for key in good:
        wrong = {"pos": -1, "key": np.zeros(3)} if key == "state" else -1
        with pytest.raises(OptionError, match="numpy generator"):
            reader.load_state_dict(deep(state, ("generators", "it", key), wrong))
    if "pos" in good["state"]:
        with pytest.raises(OptionError, match=r"numpy generator.*its pos is out of range"):
            reader.load_state_dict(deep(state, ("generators", "it", "state", "pos"), 10**6))
    if "buffer_pos" in good:
        with pytest.raises(OptionError, match=r"numpy generator.*its buffer_pos is out of range"):
            reader.load_state_dict(deep(state, ("generators", "it", "buffer_pos"), 1000))
