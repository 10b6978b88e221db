"""Adaptive rows through Zarr against the bare codec, and two threads against one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

import cnr_codecs
from benchmarks.codec_bench.contenders import ADAPTIVE_4
from benchmarks.codec_bench.machine import pinned
from benchmarks.codec_bench.rows import Rows, drawn
from benchmarks.codec_bench.sizes import Sizes
from benchmarks.codec_bench.timing import race

DIM = 64
_SERIALIZER: dict[str, Any] = {"name": "cnr.uniform", "configuration": {"scheme": "adaptive", "bits": 4}}


def through_zarr(sizes: Sizes) -> dict[str, float]:
    """Share of the bare codec's pace that zarr-python reaches with it, by direction; shards of four chunks."""
    rows, chunk_rows = _rows(sizes)
    array = zarr.create_array(
        MemoryStore(),
        shape=rows.shape,
        dtype="float32",
        chunks=(chunk_rows, DIM),
        shards=(4 * chunk_rows, DIM),
        fill_value=np.nan,
        serializer=_SERIALIZER,
        compressors=[{"name": "crc32c"}],
    )
    pieces = _pieces(rows, chunk_rows)
    encoded = [ADAPTIVE_4.encode(piece) for piece in pieces]

    def write() -> None:
        array[:] = rows

    seconds = race(
        {
            "bare encode": lambda: [ADAPTIVE_4.encode(piece) for piece in pieces],
            "zarr encode": write,
            "bare decode": lambda: _decode_all(encoded, rows.shape, chunk_rows),
            "zarr decode": lambda: array[:],
        },
        sizes.rounds,
    )
    return {way: seconds[f"bare {way}"] / seconds[f"zarr {way}"] for way in ("encode", "decode")}


def _decode_all(encoded: list[bytes], shape: tuple[int, ...], chunk_rows: int) -> Rows:
    """One new array of all rows, which is what reading through Zarr gives too."""
    out = np.empty(shape, np.float32)
    for number, data in enumerate(encoded):
        part = out[number * chunk_rows : (number + 1) * chunk_rows]
        cnr_codecs.decode_into(cnr_codecs.parse(data), part, np.ones(len(part), np.uint8))
    return out


def two_threads(sizes: Sizes) -> dict[str, float] | None:
    """How many times one thread's pace two threads reach, by direction; None where there is one core."""
    rows, chunk_rows = _rows(sizes)
    pieces = _pieces(rows, chunk_rows)
    encoded = [ADAPTIVE_4.encode(piece) for piece in pieces]
    with pinned(2) as cores, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        if cores < 2:
            return None
        runs: dict[str, Callable[[], Any]] = {}
        for name, pool in (("one", one), ("two", two)):
            runs[f"{name} encode"] = _all(pool, ADAPTIVE_4.encode, pieces)
            runs[f"{name} decode"] = _all(pool, ADAPTIVE_4.decode, encoded)
        seconds = race(runs, sizes.rounds)
    return {way: seconds[f"one {way}"] / seconds[f"two {way}"] for way in ("encode", "decode")}


def _all(pool: ThreadPoolExecutor, function: Callable[[Any], Any], items: list[Any]) -> Callable[[], Any]:
    def run() -> None:
        for _ in pool.map(function, items):
            pass

    return run


def _rows(sizes: Sizes) -> tuple[Rows, int]:
    return drawn("normal", sizes.zarr_bytes // (4 * DIM), DIM), sizes.zarr_chunk_bytes // (4 * DIM)


def _pieces(rows: Rows, chunk_rows: int) -> list[Rows]:
    return [rows[first : first + chunk_rows] for first in range(0, len(rows), chunk_rows)]
