"""The proof of what a document's members are: what it refuses, and what it says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store.format.record_document import prove_policy
from cnr_store.format.validate import (
    Digests,
    Time,
    Token,
    VersionText,
    array_path,
    proven,
    sizes,
)
from cnr_store.policies.checks import MOST, Natural

VERSION = "000003-0123abcd.00000042"


@pytest.mark.parametrize(
    ("kind", "sound", "wrong"),
    [
        (Natural, [0, MOST], [True, 1.0, -1, MOST + 1, 10**4000, "1", None]),
        (Time, [0, 1.5, 253_402_300_799], [True, -1.0, 1e300, math.nan, math.inf, 10**400, "1"]),
        (VersionText, [VERSION], [VERSION + "\n", " " + VERSION, VERSION.replace("3", "٣"), "", 5]),
        (Token, ["ab" * 8], ["ab" * 8 + "\n", "AB" * 8, "ab" * 33, "ab", b"ab" * 8]),
        (Digests, [["ab" * 32]], [[], ["ab" * 32 + "\n"], ["ab" * 31], [5], "ab" * 32, {"a": "ab" * 32}]),
        (dict, [{}, {1: 2}], [[], [("a", 1)], "a", None, np.zeros(2), torch.zeros(2)]),
        (dict[str, Any], [{"a": 1}], [{1: 2}, {("a",): 1}]),
        (list[str], [[], ["a"]], [[1], "a", {"a": 1}, np.zeros(2), torch.zeros(2)]),
    ],
)
def test_what_is_refused(kind: Any, sound: list[Any], wrong: list[Any]) -> None:
    for value in sound:
        assert proven(value, kind, "x") == value
    for value in wrong:
        with pytest.raises(ValueError, match=r"^x( is .+)?: "):
            proven(value, kind, "x")


def test_the_message_says_where_and_is_short() -> None:
    with pytest.raises(
        ValueError, match=r"^policy: Expected `int`, got `bool` - at `\$\.past\.written\.deltas`"
    ):
        prove_policy({"past": {"written": {"full_bytes": 1, "deltas": True}}})
    with pytest.raises(
        ValueError, match=r"^policy: Expected `str`, got `int` - at `\$\.whole\[\.\.\.\]\.tables\[1\]`"
    ):
        prove_policy({"whole": {"why": {"count": 2, "tables": ["users", 1]}}})
    with pytest.raises(ValueError, match=r"^policy: ") as found:
        prove_policy({"past": {"x" * 100_000: 1}})
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("shape", [[-1], [True], [1 << 49], [1 << 40, 1 << 40], [1, 1, 1], "11", [0, 1]])
def test_shapes_that_no_array_has(shape: Any) -> None:
    with pytest.raises(ValueError, match="shape"):
        sizes(shape, "shape", 1, (1, 2))
    assert sizes([0, 5], "shape", 0, (1, 2)) == (0, 5)


def test_paths_of_arrays() -> None:
    assert array_path("tables/a/weight") == "tables/a/weight"
    with pytest.raises(ValueError, match="encoded names"):
        array_path("tables/a%2fb/weight")
