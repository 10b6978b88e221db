"""Lists of a record are not trusted, nor what features of later releases it names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from cnr_store import CorruptionError
from tests.nightly import of_today
from tests.test_store.format.wrong_values import NO_LIST, NO_MEMBER, NO_NUMBER, NO_OBJECT, NO_SHAPE, Forge
from tests.test_store.support.tampering import (
    ABSENT,
    HUGE,
    ROWS,
    SLOT,
    WEIGHT,
    Forgery,
    Json,
    put,
    read_all,
    refused,
)


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


@pytest.mark.slow
@pytest.mark.some_by_day(2)
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
        (
            "zero",
            [
                each
                for each in [*NO_COLUMN, *([0, each] for each in [*NO_NUMBER, 5])]
                if ABSENT not in (each, *(each if isinstance(each, list) else []))
            ],
        ),
    ],
)
def test_fields_of_the_lists(
    forge_lists: Forge, exact: dict[str, Json], field: str, values: list[Json]
) -> None:
    for value in of_today(values, 3):
        forgery = forge_lists()
        put(forgery.cnr["tables"], field, value)
        refused(forgery, exact, value)


@pytest.mark.slow
def test_lists_that_do_not_fit_the_record(forge_lists: Forge, exact: dict[str, Json]) -> None:
    changes: list[Callable[[Forgery], object]] = [
        *(lambda forgery, value=value: put(forgery.cnr, "tables", value) for value in NO_OBJECT),
        *(lambda forgery, value=value: put(forgery.nodes[WEIGHT], "shape", value) for value in NO_SHAPE),
        *(lambda forgery, value=value: put(forgery.nodes[WEIGHT], "node_type", value) for value in NO_MEMBER),
        lambda forgery: forgery.nodes.pop(WEIGHT),
        lambda forgery: forgery.nodes.update({"tables/emb/another": forgery.nodes[WEIGHT]}),
        lambda forgery: forgery.cnr["arrays"].update({WEIGHT: {}}),
    ]
    for number, change in enumerate(changes):
        forgery = forge_lists()
        change(forgery)
        refused(forgery, exact, number)


@pytest.mark.slow
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
