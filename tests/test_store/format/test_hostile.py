"""A store is not trusted: whatever its documents say, a reader works exactly or raises an error of the library's own.

Every digest in these stores matches: whoever can write a store can compute them.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import CorruptionError
from cnr_store.training.model.rng_state import check_rng_state, rng_state
from tests.test_store.support.tampering import (
    ABSENT,
    DENSE,
    HUGE,
    ROWS,
    SLOT,
    TORCH_BYTES,
    WEIGHT,
    Forgery,
    put,
    read_all,
    refused,
    spoiled_generators,
)

Json = Any
Forge = Callable[[], Forgery]


@pytest.fixture
def forge(base: Path, tmp_path: Path) -> Forge:
    numbers = itertools.count()
    return lambda: Forgery(base, tmp_path / str(next(numbers)))


NO_LIST = [ABSENT, None, {}, "x", 5, [1], [[]]]
NO_NUMBER = [ABSENT, None, [], "x", -1, 1.5, True, HUGE]
NO_DELTAS: list[Any] = [1, {}, [1], [["baseline"]], [["later", 1]], [["previous", -1]], [["previous", 1]] * 2]
NO_OFFERS: list[Any] = [1, [], {}, {"baseline_bytes": 1, "previous_bytes": -1}]
SUMS: dict[str, Any] = dict.fromkeys(("full_bytes", "deltas", "deltas_bytes", "first_bytes", "last_bytes"), 1)
PAST: dict[str, Any] = {
    "written": SUMS,
    "intermittent": SUMS,
    "folds_bytes": 0,
    "links": 2,
    "beneath_bytes": 0,
    "excess_bytes": [-5],
    "older_excess_bytes": None,
}
NO_PASTS: list[Any] = [
    *(1, [], {}, PAST | {"more": 1}, {name: PAST[name] for name in PAST if name != "links"}),
    *(PAST | {"written": wrong} for wrong in (None, {}, SUMS | {"deltas": -1}, SUMS | {"more": 1})),
    *(
        PAST | {name: wrong}
        for name in ("folds_bytes", "links", "beneath_bytes")
        for wrong in (None, -1, 1.5)
    ),
    *(PAST | {"excess_bytes": wrong} for wrong in (None, 5, ["x"], [1.5], [True], [HUGE], [0] * 65)),
    *(PAST | {"older_excess_bytes": wrong} for wrong in ("x", 1.5, True, -HUGE)),
]
NO_REASONS: list[Any] = [
    *(1, [], {"why": 1}, {"why": {}}, {"why": {"count": 1}}, {"why": {"tables": ["t"]}}),
    *({"why": {"count": wrong, "tables": ["t"]}} for wrong in (-1, 0, "x", HUGE)),
    *({"why": {"count": 1, "tables": wrong}} for wrong in (1, "t", [1], {"t": 1})),
]
NO_WRITTEN: list[Any] = [[1], [1, "x"], [1, -1], [1, HUGE], [1, True], {}, "xx"]
NO_SUMS: list[Any] = [[1] * 65, {"min": 1, "max": 2}, {"min": 1, "mean": "x", "max": 2}]
NO_RANKS: list[Any] = [
    *(1, [], {}, {"world": None}, {"world": -1}, {"world": 1 << 30}, {"world": 2, "bytes": None}),
    *({"world": 2, "bytes": wrong} for wrong in NO_WRITTEN),
    *({"world": 65, "seconds": wrong} for wrong in NO_SUMS),
]
NO_OBJECT = [ABSENT, None, [], "x", 5]
NO_SHAPE = [ABSENT, None, 5, [], [5], "x", {}, [1 << 40, 16], [1, HUGE]]
NO_MEMBER = [ABSENT, None, 5, [], [5], "x", {}]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("requires", [*NO_LIST, ["telepathy"]]),
        ("id", [ABSENT, None, [], "x", "000001-00000000.00000001"]),
        ("nonce", [ABSENT, None, 5, []]),
        ("step", NO_NUMBER),
        ("time", [ABSENT, None, [], "x", -1, True, HUGE, 1e300]),
        ("previous", [ABSENT, [], 5, "x"]),
        ("needs", [*NO_LIST, ["../x"]]),
        ("arrays", [*NO_OBJECT, {"../../x": {}}, {WEIGHT: []}]),
        ("policy", [*NO_OBJECT, {"sizes_bytes": 5}, {"sizes_bytes": ["x"]}, {"full": 1}]),
        ("policy", [{"sizes_bytes": [1, 2], "deltas": wrong} for wrong in NO_DELTAS]),
        ("policy", [{"offer": wrong} for wrong in NO_OFFERS]),
        ("policy", [{"past": wrong} for wrong in NO_PASTS]),
        ("policy", [{"whole": wrong} for wrong in NO_REASONS]),
        ("policy", [{"ranks": wrong} for wrong in NO_RANKS]),
        ("restores", NO_NUMBER),
        ("bytes", NO_NUMBER),
        ("metadata", [ABSENT, {"$x": 1}, {"$float": [1]}, {"$array": {"kind": "numpy", "path": DENSE}}]),
    ],
)
def test_fields_of_the_record(forge: Forge, exact: dict[str, Json], field: str, values: list[Json]) -> None:
    for value in values:
        forgery = forge()
        put(forgery.cnr, field, value)
        refused(forgery, exact, value)


@pytest.mark.parametrize("field", ["step", "time", "restores", "bytes"])
def test_numbers_that_overflow(forge: Forge, exact: dict[str, Json], field: str) -> None:
    for text in ("1e400", "-1e400", "9" * 5000):
        forgery = forge()
        forgery.cnr[field] = forgery.text(text)
        refused(forgery, exact, text)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", [ABSENT, None, [], "x", "dense", "whole"]),
        ("shape", [ABSENT, None, [], "000", [-1, 16], [True, 16], [1 << 47, 16], [ROWS, 16, 1], [HUGE, 1]]),
        ("element", [ABSENT, None, [], "x", "O", "float64"]),
        ("base", [ABSENT, None, [], "x", "../x", "999999-00000000.00000001", "000000-00000000.00000001"]),
        ("rows", [*NO_NUMBER, ROWS + 1]),
        ("codec", NO_OBJECT),
        ("bytes", NO_NUMBER),
        ("aliases", [None, {}, "x", 5, [1], [[]]]),
    ],
)
def test_fields_of_an_array(forge: Forge, exact: dict[str, Json], field: str, values: list[Json]) -> None:
    for value in values:
        forgery = forge()
        put(forgery.entry(WEIGHT), field, value)
        refused(forgery, exact, value)


@pytest.fixture
def forge_lists(base: Path, tmp_path: Path) -> Forge:
    """Like `forge`, of a record whose entries of tables stand in lists."""
    numbers = itertools.count()
    return lambda: Forgery(base, tmp_path / f"listed-{next(numbers)}", listed=True)


NO_COLUMN = [*NO_LIST, [], [1], [1, 1, 1]]
NO_INDEX = [[0, -1], [0, 2], [0, True], [0, "0"], [0, HUGE], [0, [0]]]


def test_lists_that_are_what_was_written(forge_lists: Forge, exact: dict[str, Json]) -> None:
    forgery = forge_lists()
    assert forgery.cnr["tables"]["rows"] == [4, 4]
    assert forgery.cnr["arrays"].keys().isdisjoint({WEIGHT, SLOT})
    forgery.sign()
    assert read_all(forgery.url) == exact


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (
            "forms",
            [*NO_LIST, [], [5, 5], [{}, {}], [{"element": 5, "codec": {}}] * 2, [{"element": "float32"}] * 2],
        ),
        ("bases", [*NO_LIST, [], ["x"], ["999999-00000000.00000001"], ["000000-00000000.00000001"]]),
        ("form", [*NO_COLUMN, *NO_INDEX, [0, None]]),
        ("base", [*NO_COLUMN, *NO_INDEX]),
        ("bytes", [*NO_COLUMN, *([1, each] for each in NO_NUMBER if each is not ABSENT)]),
        ("rows", [*NO_COLUMN, *([1, each] for each in (*NO_NUMBER, ROWS + 1) if each is not ABSENT)]),
    ],
)
def test_fields_of_the_lists(
    forge_lists: Forge, exact: dict[str, Json], field: str, values: list[Json]
) -> None:
    for value in values:
        forgery = forge_lists()
        put(forgery.cnr["tables"], field, value)
        refused(forgery, exact, value)


def test_lists_that_do_not_fit_the_record(forge_lists: Forge, exact: dict[str, Json]) -> None:
    changes: list[Callable[[Forgery], object]] = [
        *(lambda forgery, value=value: put(forgery.cnr, "tables", value) for value in NO_OBJECT),
        *(lambda forgery, value=value: put(forgery.nodes[WEIGHT], "shape", value) for value in NO_SHAPE),
        *(lambda forgery, value=value: put(forgery.nodes[WEIGHT], "node_type", value) for value in NO_MEMBER),
        lambda forgery: forgery.cnr["requires"].remove("compact-record"),
        lambda forgery: forgery.nodes.pop(WEIGHT),
        lambda forgery: forgery.nodes.update({"tables/emb/another": forgery.nodes[WEIGHT]}),
        lambda forgery: forgery.cnr["arrays"].update({WEIGHT: {}}),
    ]
    for number, change in enumerate(changes):
        forgery = forge_lists()
        change(forgery)
        refused(forgery, exact, number)


@pytest.mark.parametrize(
    "configuration",
    [ABSENT, None, 5, [], "x", {}, {"chunk_shape": [1024]}, {"chunk_shape": [0, 16]}, {"bits": 4}],
)
def test_shards_in_short(forge: Forge, exact: dict[str, Json], configuration: Json) -> None:
    forgery = forge()
    (codec,) = forgery.nodes[WEIGHT]["codecs"]
    assert codec["name"] == "cnr.rows"
    put(codec, "configuration", configuration)
    refused(forgery, exact)


def test_what_only_features_have(forge: Forge, exact: dict[str, Json]) -> None:
    """Boundaries of columns, and states of ranks, are damage where their feature is not required."""
    forgery = forge()
    forgery.entry(SLOT)["boundaries"] = [0, 8, 16]
    found = refused(forgery, exact)
    assert "does not require column-boundaries" in str(found["load"])
    forgery = forge()
    forgery.state["ranks"] = ["0" * 64]
    found = refused(forgery, exact)
    assert "does not require state-parts" in str(found["load"])
    assert isinstance(found["verify"], CorruptionError)


def test_features_of_later_releases(forge_lists: Forge, exact: dict[str, Json]) -> None:
    forgery = forge_lists()
    forgery.cnr["requires"].append("telepathy")
    for name, error in refused(forgery, exact).items():
        assert "telepathy" in str(error), name


def test_names_of_an_escaped_array(forge: Forge, exact: dict[str, Json]) -> None:
    folder = WEIGHT.split("/")[1]
    escaped = WEIGHT.replace(folder, f"{folder}~01234567")
    names: tuple[Any, ...] = (
        None,
        5,
        [],
        "",
        "../x",
        WEIGHT,
        "tables/other/weight",
        f"{WEIGHT}/x",
        DENSE,
        escaped,
    )
    places = (
        "tables/..~01234567/weight",
        "tables/../weight",
        f"tables/{'x' * 200}~01234567/weight",
        DENSE,
        escaped,
    )
    for place, name in [*((WEIGHT, name) for name in names), *((place, WEIGHT) for place in places)]:
        forgery = forge()
        forgery.cnr["requires"] = ["escaped-names"]
        entry = forgery.cnr["arrays"].pop(WEIGHT)
        forgery.cnr["arrays"][place] = {**entry, "name": name}
        refused(forgery, exact, (place, name))
    forgery = forge()
    forgery.cnr["requires"] = ["escaped-names"]
    forgery.cnr["arrays"][escaped] = {**forgery.entry(WEIGHT), "name": WEIGHT}
    refused(forgery, exact, "two arrays of one name")


def test_an_array_that_leans_on_itself(forge: Forge, exact: dict[str, Json]) -> None:
    forgery = forge()
    forgery.entry(WEIGHT)["base"] = forgery.id
    refused(forgery, exact)


def test_a_dense_array_that_claims_to_have_rows(forge: Forge, exact: dict[str, Json]) -> None:
    forgery = forge()
    forgery.cnr["arrays"][DENSE] = dict(forgery.entry(WEIGHT))
    forgery.nodes[DENSE] = forgery.nodes[WEIGHT]
    refused(forgery, exact)


@pytest.mark.parametrize("value", [ABSENT, None, [], "x", {}, {"metadata": None}, {"metadata": {WEIGHT: 5}}])
def test_consolidated_metadata(forge: Forge, exact: dict[str, Json], value: Json) -> None:
    forgery = forge()
    put(forgery.record, "consolidated_metadata", value)
    refused(forgery, exact)


@pytest.mark.parametrize("path", [WEIGHT, DENSE])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("shape", NO_SHAPE),
        ("chunk_grid", NO_MEMBER),
        ("codecs", [*NO_MEMBER, [{}], [{"name": "bytes"}], [{"name": "zstd"}]]),
        ("data_type", [*NO_MEMBER, "O", "V99999999999", "float64", "i4,i4", {"names": ["a"]}]),
        ("chunk_key_encoding", [*NO_MEMBER, {"name": "v2"}]),
        ("node_type", [*NO_MEMBER, "group"]),
    ],
)
def test_metadata_of_arrays(
    forge: Forge, exact: dict[str, Json], path: str, field: str, values: list[Json]
) -> None:
    for value in values:
        forgery = forge()
        put(forgery.nodes[path], field, value)
        refused(forgery, exact, value)


@pytest.mark.parametrize(
    "attributes",
    [None, 5, [5], "x", *({"torch_dtype": name} for name in ("quint8", 5, "float64", "load", "bfloat16"))],
)
def test_attributes_of_dense_arrays(forge: Forge, exact: dict[str, Json], attributes: Json) -> None:
    forgery = forge()
    forgery.nodes[DENSE]["attributes"] = attributes
    refused(forgery, exact)


@pytest.mark.parametrize("path", [WEIGHT, DENSE])
@pytest.mark.parametrize(
    ("field", "value"),
    [("dimension_names", [5]), ("fill_value", {}), ("attributes", {"a": [1]}), ("storage_transformers", 5)],
)
def test_what_no_reader_needs_harms_none(
    forge: Forge, exact: dict[str, Json], path: str, field: str, value: Json
) -> None:
    forgery = forge()
    forgery.nodes[path][field] = value
    forgery.sign()
    assert read_all(forgery.url) == exact


@pytest.mark.parametrize(
    ("shape", "shard", "chunk"),
    [
        ([1, 1 << 22], [1, 4096], [1, 1]),
        ([ROWS, 1], [1024, 16384], [1024, 16384]),
        ([1 << 47, 1], [1, 1], [1, 1]),
        ([1 << 33, 16], [4096, 16], [1, 16]),
        ([1 << 38, 16], [1 << 32, 16], [1 << 20, 16]),
        ([1, 1 << 40], [1, 1 << 40], [1, 1 << 40]),
        ([1 << 24, 4096], [1 << 24, 4096], [1 << 24, 1]),
        ([ROWS, 16], [1000, 16], [3, 16]),
        ([ROWS], [1024], [1024]),
    ],
)
def test_grids_that_no_object_fits(
    forge: Forge, exact: dict[str, Json], shape: list[int], shard: list[int], chunk: list[int]
) -> None:
    forgery = forge()
    forgery.reshape(shape, shard, chunk)
    refused(forgery, exact)


@pytest.mark.parametrize("cut", [[1 << 40], [1]])
def test_a_dense_array_of_terabytes(forge: Forge, exact: dict[str, Json], cut: list[int]) -> None:
    forgery = forge()
    forgery.entry(DENSE)["shape"] = forgery.nodes[DENSE]["shape"] = [1 << 40]
    forgery.nodes[DENSE]["chunk_grid"]["configuration"]["chunk_shape"] = cut
    forgery.manifest["arrays"][DENSE]["bytes"] = [(4 << 40) + 4]
    found = refused(forgery, exact)
    assert isinstance(found["state_dict"], CorruptionError)


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc.pop("arrays"),
        lambda doc: doc.update(arrays=5),
        lambda doc: doc.update(version="x"),
        lambda doc: doc["arrays"].update({WEIGHT: None}),
        lambda doc: doc["arrays"].pop(WEIGHT),
        lambda doc: doc["arrays"].pop(DENSE),
        lambda doc: doc["arrays"].clear(),
        lambda doc: doc["arrays"][DENSE].update(bytes=[HUGE]),
        lambda doc: doc["arrays"][DENSE].update(bytes=[5]),
        lambda doc: doc["arrays"][WEIGHT].update(tail=[HUGE]),
        lambda doc: doc["arrays"][WEIGHT].update(index=[-1]),
        lambda doc: doc["arrays"][WEIGHT].update(index=[7]),
        lambda doc: doc["arrays"][WEIGHT].update(index={}),
        lambda doc: doc["arrays"][WEIGHT].update(index="0"),
        lambda doc: doc["arrays"][WEIGHT].pop("tail"),
    ],
)
def test_manifests(forge: Forge, exact: dict[str, Json], change: Callable[[Json], object]) -> None:
    forgery = forge()
    change(forgery.manifest)
    refused(forgery, exact)


@pytest.mark.parametrize("levels", [250, 900, 3000, 100_000])
@pytest.mark.parametrize(
    ("begin", "end"), [("[", "]"), ('{"$tuple":[', "]}"), ('{"a":', "}"), ('{"$dict":[[1,', "]]}")]
)
def test_deep_nesting(forge: Forge, exact: dict[str, Json], begin: str, end: str, levels: int) -> None:
    for of_state in (True, False):
        forgery = forge()
        text = forgery.text(begin * levels + "0" + end * levels)
        if of_state:
            forgery.state["reader"] = text
        else:
            forgery.cnr["metadata"] = text
        refused(forgery, exact, "state" if of_state else "metadata")


NO_STATE = [
    {"$array": TORCH_BYTES | {"torch_dtype": "float64"}},
    {"$array": TORCH_BYTES | {"torch_dtype": "quint8"}},
    {"$array": TORCH_BYTES | {"torch_dtype": "load"}},
    {"$array": {"kind": "torch", "path": "../../../etc/passwd"}},
    {"$array": {"kind": "torch", "path": WEIGHT}},
    {"$array": {"kind": "numpy", "path": DENSE}},
    {"$scalar": ["<f8", ""]},
    {"$dict": [[{"$dict": []}, 1]]},
]


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
    for value in values:
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


def test_generators_that_stand_outside_their_memory(forge: Forge, exact: dict[str, Json]) -> None:
    drawn = random.getstate()
    for name, rng in spoiled_generators(forge().state["rng"]):
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


def test_a_manifest_that_inflates_takes_little_memory(forge: Forge) -> None:
    forgery = forge()
    forgery.manifest["z"] = forgery.text("[" + "[]," * (20 << 20) + "[]]")
    forgery.sign()
    code = (
        "import sys, cnr_store\n"
        "try:\n    cnr_store.state_dict(sys.argv[1])\n"
        "except cnr_store.CorruptionError:\n"
        "    print([int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line][0])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(forgery.url)], capture_output=True, check=True)
    assert int(shown.stdout) < 400 << 10


def test_arrays_called_as_chunks_are(tmp_path: Path) -> None:
    model = nn.Module()
    model.c = nn.Embedding(50, 4)
    model.add_module("top", nn.Linear(2, 2))
    model.register_parameter("zarr", nn.Parameter(torch.arange(6.0).reshape(2, 3)))
    other = nn.Module()
    other.e = nn.Embedding(50, 4)
    other.c = nn.Parameter(torch.tensor(7.0))
    for name, one in (("tables/c/weight", model), ("dense/model/c", other)):
        cnr_store.save(tmp_path / name, one, bits=32)
        array: Any = cnr_store.open(tmp_path / name)[name]
        weight = one.state_dict()["c.weight" if "tables" in name else "c"].numpy()
        assert np.array_equal(array[...], weight)
