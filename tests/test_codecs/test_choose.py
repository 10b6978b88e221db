"""The search chosen for a table is the one that the documented rule gives, on the same sample."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from cnr_codecs import CodecConfigError, RowCodec, RowsError, UniformRows, choose_search, error_report
from cnr_codecs.protocol import Rows
from cnr_codecs.report import BINS_LADDER, RATIO_LADDER

Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, int]], Rows]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(0, 0.1, shape),
    "laplace": lambda rng, shape: rng.laplace(0, 0.1, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape),
}


def draw(name: str, count: int = 200, dim: int = 16) -> Rows:
    return DRAWS[name](np.random.default_rng(9), (count, dim)).astype(np.float32)


def error(codec: RowCodec, rows: Rows) -> float:
    return error_report(rows, codecs=[codec])[0].mean_l2_error


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", DRAWS)
def test_the_rule(name: str, bits: int) -> None:
    rows = draw(name)
    full = {bins: error(UniformRows("adaptive", bits, bins, 1.0), rows) for bins in BINS_LADDER}
    least = min(full.values())
    bins = min(bins for bins in full if full[bins] <= 1.01 * least)
    walks = [UniformRows("adaptive", bits, bins, ratio) for ratio in RATIO_LADDER]
    walk = next(walk for walk in walks if error(walk, rows) <= 1.01 * least)
    default = UniformRows("adaptive", bits)
    expected = default if error(default, rows) <= error(walk, rows) else walk
    found = choose_search(rows, bits)
    assert found == expected
    assert error(found, rows) <= 1.01 * least


def test_a_choice_depends_on_rows_and_seed_alone() -> None:
    rows = np.concatenate([draw("normal", 3000), draw("heavy", 3000)])
    assert choose_search(rows, 3, seed=4) == choose_search(rows.copy(), 3, seed=4)


class _Watched(np.ndarray[Any, Any]):
    """Rows that note which of them are read."""

    keys: list[Any]

    def __getitem__(self, key: Any) -> Any:
        self.keys.append(key)
        return np.asarray(self)[key]


@pytest.mark.parametrize(("count", "sampled"), [(300, 300), (5000, 1000), (200_000_000, 2000)])
def test_only_the_sample_is_read(count: int, sampled: int) -> None:
    rows = np.broadcast_to(np.linspace(0, 1, 8, dtype=np.float32), (count, 8)).view(_Watched)
    rows.keys = []
    choose_search(rows, 4, seed=7)
    (chosen,) = rows.keys
    assert len(chosen) == sampled == len(set(chosen.tolist()))
    assert (np.diff(chosen) > 0).all()
    rows.keys = []
    choose_search(rows, 4, seed=8)
    assert count == sampled or not np.array_equal(rows.keys[0], chosen)


def test_rows_that_are_not_finite_are_not_judged() -> None:
    rows = draw("laplace")
    spoiled = np.concatenate(
        [np.full((3, 16), np.nan, np.float32), rows, np.full((2, 16), np.inf, np.float32)]
    )
    assert choose_search(spoiled, 4) == choose_search(rows, 4)


def test_rows_that_leave_nothing_to_choose_are_refused() -> None:
    with pytest.raises(RowsError, match="finite"):
        choose_search(np.full((4, 4), np.nan, np.float32), 4)
    for shape in (0, 4), (4,), (4, 0):
        with pytest.raises(RowsError, match="shape"):
            choose_search(np.zeros(shape, np.float32), 4)
    with pytest.raises(RowsError, match="cast"):
        choose_search(np.zeros((4, 4)), 4)
    with pytest.raises(CodecConfigError, match="bits"):
        choose_search(draw("normal"), 9)
