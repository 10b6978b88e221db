"""The table: pace and error of every contender over distributions, dims and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.codec_bench.contenders import CONTENDERS, Contender
from benchmarks.codec_bench.rows import DIMS, DRAWS, Rows, drawn
from benchmarks.codec_bench.sizes import Sizes
from benchmarks.codec_bench.timing import race

IN_CACHE, OUT_OF_CACHE = "in cache", "out of cache"


@dataclass(frozen=True)
class Line:
    """One contender on one set of rows. Paces are GB (10**9 bytes of float32) a second.

    `first_rows_l2_error` is over the few rows that slow contenders get, for a fair comparison with them.
    """

    rows: str
    dim: int
    size: str
    contender: str
    bits: int
    encode_gb_s: float
    decode_gb_s: float
    mean_l2_error: float
    first_rows_l2_error: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(sizes: Sizes, tables: dict[str, Rows]) -> Iterator[Line]:
    """Every distribution in cache, the normal one out of it too, and the trained tables as large as they are."""
    for dim in DIMS:
        for name in DRAWS:
            yield from _lines(name, IN_CACHE, drawn(name, sizes.in_cache_bytes // (4 * dim), dim), sizes)
        rows = drawn("normal", sizes.out_of_cache_bytes // (4 * dim), dim)
        yield from _lines("normal", OUT_OF_CACHE, rows, sizes)
    for name, rows in tables.items():
        most = sizes.in_cache_bytes // rows[0].nbytes
        yield from _lines(name, IN_CACHE, rows[:most], sizes)


def _lines(name: str, size: str, rows: Rows, sizes: Sizes) -> Iterator[Line]:
    # What takes milliseconds a row has no use for a size that caches don't hold.
    chosen = [each for each in CONTENDERS if not each.slow or size == IN_CACHE]
    few = rows[: sizes.slow_rows]
    given = {_key(each): few if each.slow else rows for each in chosen}
    # The paces of slow ones differ by factors of hundreds: two rounds tell.
    for group, rounds in ((False, _rounds(sizes, size)), (True, 2)):
        yield from _group(
            name, size, [each for each in chosen if each.slow == group], given, rounds, sizes.slow_rows
        )


def _rounds(sizes: Sizes, size: str) -> int:
    return sizes.rounds if size == IN_CACHE else max(2, sizes.rounds // 2)


def _key(contender: Contender) -> str:
    return f"{contender.name} {contender.bits}"


def _group(
    name: str, size: str, chosen: Sequence[Contender], given: dict[str, Rows], rounds: int, slow_rows: int
) -> Iterator[Line]:
    encoded = {_key(each): each.encode(given[_key(each)]) for each in chosen}
    encode = race({_key(each): _bind(each.encode, given[_key(each)]) for each in chosen}, rounds)
    decode = race({_key(each): _bind(each.decode, encoded[_key(each)]) for each in chosen}, rounds)
    for each in chosen:
        key, rows = _key(each), given[_key(each)]
        decoded, first = each.decode(encoded[key]), slice(slow_rows)
        gigabytes = rows.nbytes / 1e9
        yield Line(
            rows=name,
            dim=rows.shape[1],
            size=size,
            contender=each.name,
            bits=each.bits,
            encode_gb_s=gigabytes / encode[key],
            decode_gb_s=gigabytes / decode[key],
            mean_l2_error=mean_l2_error(rows, decoded),
            first_rows_l2_error=mean_l2_error(rows[first], decoded[first]),
        )


def _bind(function: Any, argument: Any) -> Any:
    return lambda: function(argument)


def mean_l2_error(rows: Rows, decoded: Rows) -> float:
    """Mean over rows of ||x - x'||_2."""
    total = 0.0
    for first in range(0, len(rows), 1 << 16):
        part = slice(first, first + (1 << 16))
        total += float(np.linalg.norm(rows[part].astype(np.float64) - decoded[part], axis=1).sum())
    return total / len(rows)


def show(line: Line) -> str:
    return (
        f"{line.rows:24} {line.dim:4}  {line.size:12} {line.bits} bits  {line.contender:28}"
        f"{line.encode_gb_s:10.5f} {line.decode_gb_s:10.5f} {line.mean_l2_error:12.6f}"
    )


HEAD = (
    f"{'rows':24} {'dim':>4}  {'size':12} {'':6}  {'contender':28}"
    f"{'enc GB/s':>10} {'dec GB/s':>10} {'mean l2':>12}"
)
