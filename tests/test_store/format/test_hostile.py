"""A store is not trusted: whatever its documents say, a reader works exactly or raises an error of the library's own.

Every digest in these stores matches: whoever can write a store can compute them.
"""

from __future__ import annotations

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
from cnr_store.format.layout import escape
from tests.nightly import of_today
from tests.test_store.format.wrong_values import NO_LIST, NO_MEMBER, NO_NUMBER, NO_OBJECT, NO_SHAPE, Forge
from tests.test_store.support.tampering import (
    ABSENT,
    DENSE,
    DIM,
    HUGE,
    ROWS,
    WEIGHT,
    Json,
    put,
    read_all,
    refused,
)

NO_PERCENT: list[Any] = [None, [], "x", -1, -1e-9, 100.5, True, HUGE]
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


@pytest.mark.slow
@pytest.mark.some_by_day(5)
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
        ("policy", [*NO_OBJECT, {"full": 1}]),
        ("policy", [{"offer": wrong} for wrong in NO_OFFERS]),
        ("policy", [{"past": wrong} for wrong in NO_PASTS]),
        ("policy", [{"whole": wrong} for wrong in NO_REASONS]),
        ("policy", [{"ranks": wrong} for wrong in NO_RANKS]),
        ("policy", [{"budget": {"percent": wrong, "rms_step": 0.1}} for wrong in NO_PERCENT]),
        ("policy", [{"budget": wrong} for wrong in (5, {"percent": 0.01}, {"rms_step": 0.1})]),
        ("spent", NO_PERCENT),
        ("restores", NO_NUMBER),
        ("bytes", NO_NUMBER),
        ("metadata", [ABSENT, {"$x": 1}, {"$float": [1]}, {"$array": {"kind": "numpy", "path": DENSE}}]),
    ],
)
def test_fields_of_the_record(forge: Forge, exact: dict[str, Json], field: str, values: list[Json]) -> None:
    for value in of_today(values, 3):
        forgery = forge()
        put(forgery.cnr, field, value)
        refused(forgery, exact, value)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["step", "time", "restores", "spent", "bytes"])
def test_numbers_that_overflow(forge: Forge, exact: dict[str, Json], field: str) -> None:
    for text in ("1e400", "-1e400", "9" * 5000):
        forgery = forge()
        forgery.cnr[field] = forgery.text(text)
        refused(forgery, exact, text)


@pytest.mark.slow
@pytest.mark.some_by_day(3)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", [ABSENT, None, [], "x", "dense", "whole"]),
        ("shape", [ABSENT, None, [], "000", [-1, 16], [True, 16], [1 << 47, 16], [ROWS, 16, 1], [HUGE, 1]]),
        ("element", [ABSENT, None, [], "x", "O", "float64"]),
        ("base", [ABSENT, None, [], "x", "../x", "999999-00000000.00000001", "000000-00000000.00000001"]),
        ("rows", [*NO_NUMBER, ROWS + 1]),
        ("raw", [*NO_NUMBER[1:], ROWS + 1]),
        ("codec", NO_OBJECT),
        ("bytes", NO_NUMBER),
        ("aliases", [None, {}, "x", 5, [1], [[]]]),
    ],
)
def test_fields_of_an_array(forge: Forge, exact: dict[str, Json], field: str, values: list[Json]) -> None:
    for value in of_today(values, 3):
        forgery = forge()
        put(forgery.entry(WEIGHT), field, value)
        refused(forgery, exact, value)


@pytest.mark.slow
def test_names_of_an_escaped_array(forge: Forge, exact: dict[str, Json]) -> None:
    folder = WEIGHT.split("/")[1]
    forged = WEIGHT.replace(folder, f"{folder}~01234567")
    escaped = WEIGHT.replace(folder, escape(folder))
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
        forged,
        escaped,
        f"tables/{'x' * 201}/weight",
    )
    places = (
        "tables/..~01234567/weight",
        "tables/../weight",
        f"tables/{'x' * 200}~01234567/weight",
        DENSE,
        forged,
        WEIGHT.replace(folder, escape("x" * 201)),
        f"tables~{escape('tables')[-8:]}/{folder}/weight",
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
    forgery = forge()
    long = f"tables/{'x' * 201}/weight"
    forgery.cnr["arrays"][long] = forgery.cnr["arrays"].pop(WEIGHT)
    refused(forgery, exact, "a key that is too long")


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


@pytest.mark.slow
@pytest.mark.some_by_day(4)
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
    for value in of_today(values, 3):
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


@pytest.mark.slow
@pytest.mark.some_by_day(4)
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


@pytest.mark.slow
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


def test_a_whole_array_without_some_rows(forge: Forge) -> None:
    """It loads with no row of the memory that happened to be there."""
    forgery = forge()
    forgery.entry(WEIGHT).update(kind="whole", base=None)
    forgery.sign()
    for read in (
        lambda: np.asarray(cnr_store.open(forgery.url)[WEIGHT]),
        lambda: cnr_store.state_dict(forgery.url),
        lambda: cnr_store.rows(forgery.url, "emb", range(ROWS)),
        lambda: cnr_store.load(forgery.url, nn.ModuleDict({"emb": nn.Embedding(ROWS, DIM)}), strict="ignore"),
    ):
        with pytest.raises(CorruptionError, match=rf"{ROWS - 4} rows from row 2 on are in no link"):
            read()
