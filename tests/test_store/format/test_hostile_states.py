"""The state is not trusted: whatever it says, a reader works exactly or raises an error of the library's own."""

from __future__ import annotations

import random

import pytest
import torch

from cnr_store.training.model.rng_state import check_rng_state, rng_state
from tests.nightly import of_today
from tests.test_store.format.wrong_values import NO_LIST, NO_OBJECT, Forge
from tests.test_store.support.tampering import (
    ABSENT,
    DENSE,
    ROWS,
    SLOT,
    TORCH_BYTES,
    WEIGHT,
    Json,
    put,
    refused,
    spoiled_generators,
)

NO_STATE = [
    {"$array": TORCH_BYTES | {"torch_dtype": "float64"}},
    {"$array": TORCH_BYTES | {"torch_dtype": "quint8"}},
    {"$array": TORCH_BYTES | {"torch_dtype": "load"}},
    {"$array": {"kind": "torch", "path": "../../../etc/passwd"}},
    {"$array": {"kind": "torch", "path": WEIGHT}},
    {"$array": {"kind": "numpy", "path": DENSE}},
    {"$array": TORCH_BYTES | {"strides": [-1]}},
    {"$array": TORCH_BYTES | {"strides": [1 << 40]}},
    {"$scalar": ["<f8", ""]},
    {"$dict": [[{"$dict": []}, 1]]},
    {"$class": ["torch.dtype", "load"]},
    {"$class": ["torch.dtype", 5]},
    {"$class": ["torch.device", "nowhere"]},
    {"$class": ["torch.Size", {"$float": "nan"}]},
]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["reader", "objects", "optimizers", "extra_state", "rng"])
def test_fields_of_the_state(forge: Forge, exact: dict[str, Json], field: str) -> None:
    wrong = [] if field == "reader" else [[1], 5, "x", {"$tuple": []}, {"$array": TORCH_BYTES}]
    for value in (ABSENT, *NO_STATE, *wrong):
        forgery = forge()
        put(forgery.state, field, value)
        refused(forgery, exact, value, ["load"])


@pytest.mark.parametrize("state", [None, [], 5, "x", {}])
def test_states_that_are_no_tree(forge: Forge, exact: dict[str, Json], state: Json) -> None:
    forgery = forge()
    forgery.state = state
    refused(forgery, exact, state, ["load"])


def test_a_large_array_that_a_state_refers_to_again_and_again(forge: Forge, exact: dict[str, Json]) -> None:
    forgery = forge()
    forgery.state["reader"] = [forgery.state["reader"]["large"]] * 2
    assert "twice" in str(refused(forgery, exact)["load"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("class", [ABSENT, None, [], "SGD"]),
        ("param_groups", [*NO_LIST, [{}], [{"params": 5}], [{"params": ["emb.weight"]}]]),
        ("state", [*NO_OBJECT, {"emb.weight": 5}, {"nobody": {}}, {"lin.weight": {}}]),
        (
            "slots",
            [
                *NO_OBJECT,
                *({"emb": slots} for slots in (5, ["nope"], ["weight"], ["sum", "sum"])),
                *({"nobody": ["sum"]}, {"lin.weight": ["sum"]}, {"$dict": [[5, ["sum"]]]}, {}),
            ],
        ),
        ("other", [*NO_OBJECT, {"$dict": [[0, {}]]}]),
    ],
)
def test_trees_of_optimizers(forge: Forge, exact: dict[str, Json], field: str, values: list[Json]) -> None:
    for value in of_today(values, 3):
        forgery = forge()
        put(forgery.tree, field, value)
        refused(forgery, exact, value, ["load"])


@pytest.mark.parametrize(
    ("path", "shape"), [(SLOT, [ROWS, 1 << 30]), (SLOT, [ROWS + 1, 16]), (SLOT, [ROWS, 17]), (SLOT, [16])]
)
def test_slots_that_do_not_follow_rows(
    forge: Forge, exact: dict[str, Json], path: str, shape: list[int]
) -> None:
    forgery = forge()
    forgery.entry(path)["shape"] = shape
    forgery.nodes[path]["shape"] = shape
    refused(forgery, exact)


@pytest.mark.slow
def test_generators_that_stand_outside_their_memory(forge: Forge, exact: dict[str, Json]) -> None:
    drawn = random.getstate()
    for name, rng in of_today(spoiled_generators(forge().state["rng"]), 12):
        forgery = forge()
        forgery.state["rng"] = rng
        found = refused(forgery, exact, name, ["load"])
        assert "random number generators" in str(found["load"]), name
    assert random.getstate() == drawn


def test_a_torch_generator_that_would_read_beyond_its_words() -> None:
    state = rng_state()
    check_rng_state(state)
    for left, following in ((624, 624), (2, 624), (0, 0), (625, 0)):
        spoiled = state["torch"].clone()
        spoiled[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
        spoiled[16:24] = torch.tensor([following]).view(torch.uint8)
        with pytest.raises((ValueError, RuntimeError)):
            check_rng_state(state | {"torch": spoiled})
